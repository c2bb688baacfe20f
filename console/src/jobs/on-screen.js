/**
 * Details of the jobs on the screen, which the list of jobs does not contain.
 *
 * Each job is asked for once, and again after each change of its attempt or state: a running job costs nothing meanwhile,
 * because the list brings its progress.
 */
import { useEffect, useState } from "preact/hooks";

const AT_ONCE = 3;
const SETTLE_MS = 150;
const MAX_KEPT = 2000;

const waiting = [];
let running = 0;

/** Make a hook that returns what `read(job)` gave, null until then and for a job without attempts. */
export function makeDetails(read) {
  const kept = new Map();
  return function useDetails(job) {
    // A node of an elastic job may end while the others go on: the counters tell.
    const { interruptions, failures, releases } = job.counters;
    const version = `${job.epoch} ${job.state} ${job.nodes ? interruptions + failures + releases : ""}`;
    const [, render] = useState(0);
    useEffect(() => {
      if (!job.counters.attempts || kept.get(job.id)?.version === version) return undefined;
      const wanted = async () => {
        const data = await read(job);
        if (kept.size >= MAX_KEPT) kept.delete(kept.keys().next().value);
        kept.set(job.id, { version, data });
        render((count) => count + 1);
      };
      // A row that only passes by while the reader scrolls asks nothing.
      const timer = setTimeout(() => {
        waiting.push(wanted);
        next();
      }, SETTLE_MS);
      return () => {
        clearTimeout(timer);
        if (waiting.includes(wanted)) waiting.splice(waiting.indexOf(wanted), 1);
      };
    }, [job.id, version]);
    return kept.get(job.id)?.data ?? null;
  };
}

async function next() {
  if (running >= AT_ONCE || waiting.length === 0) return;
  running += 1;
  try {
    await waiting.shift()();
  } catch (error) {
    if (error.status === undefined) throw error;
    // The row keeps its counts; the next change of the job, or the next time on the screen, asks again.
  } finally {
    running -= 1;
    next();
  }
}
