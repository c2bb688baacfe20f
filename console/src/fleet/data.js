/** Data of fleets beside their followed view: read once for each version, so that a quiet fleet costs no request. */
import { useEffect, useState } from "preact/hooks";
import { now_s } from "../core/clock.js";
import { useNow } from "../components/time.js";

const RETRY_MS = 5000;

/** Return a text that changes with each transition of a machine and each change of the document. */
export const versionOf = (fleet) =>
  [fleet.updated_at, fleet.waits, ...fleet.machines.map((one) => `${one.id} ${one.state} ${one.since}`)].join(" ");

/**
 * Call `read` for each new `version`, and again by `again()`; returns `{data, error, reading, again}`.
 *
 * The last data stay while others are read. A refusal is shown; while the control plane is away, the call is repeated.
 */
export function useReading(read, version) {
  const [found, set] = useState({ data: null, error: null, reading: true });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    let current = true;
    let timer;
    const ask = async () => {
      set((old) => ({ ...old, reading: true }));
      try {
        const data = await read();
        if (current) set({ data, error: null, reading: false });
      } catch (error) {
        if (error.status === undefined) throw error;
        if (current && error.passing) timer = setTimeout(ask, RETRY_MS);
        else if (current) set({ data: null, error, reading: false });
      }
    };
    ask();
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [version, turn]);
  return { ...found, again: () => setTurn(turn + 1) };
}

const offsets = new WeakMap();

/** Return the seconds by which the fleets' clock was ahead when `answer` first came here: a demonstration has a clock of its own. */
export function offsetOf(answer) {
  if (!offsets.has(answer)) offsets.set(answer, answer.at - now_s());
  return offsets.get(answer);
}

/** Render once a second, and return the present time of the fleets' clock. */
export const useFleetNow = (answer) => useNow() + offsetOf(answer);
