/** An elastic training in words and numbers: nodes, who waits for whom, the quorum, what each node costs. Pure. */
import { count, counted } from "../core/format.js";
import { costOf } from "../jobs/attempts.js";

const STALL_PERCENT = 5;
const SLOW_SHARE = 0.5;
const END_WORDS = { complete: "complete", failed: "failed", interrupted: "lost", released: "left", canceled: "stopped" };
export const CAUSES = {
  connection_reset: "its process or machine died",
  silent: "it did not answer",
  left: "it left",
  excluded_by_operator: "excluded by an operator",
  refused: "it was refused",
  protocol: "it sent wrong messages",
};

/** Return `node 2`, `nodes 0 and 2`, `nodes 0, 2 and 5`. */
export function named(seats) {
  const all = seats.length < 2 ? seats.join("") : `${seats.slice(0, -1).join(", ")} and ${seats.at(-1)}`;
  return `${seats.length === 1 ? "node" : "nodes"} ${all}`;
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);
const verb = (seats, one, many) => (seats.length === 1 ? one : many);
const reasonOf = (attempt) => attempt.reason?.message || attempt.reason?.code?.replaceAll("_", " ") || "";

/** Return the state of a node or of an empty seat as `[tone, word, detail]`. */
function stateOf(world, node, attempt) {
  if (world.state === "ended") return ["plain", attempt ? (END_WORDS[attempt.end] ?? "ended") : "never used", attempt ? reasonOf(attempt) : ""];
  if (node?.member) {
    if (attempt?.ended_at) return ["bad", END_WORDS[attempt.end] ?? "lost", reasonOf(attempt)];
    if (!node.lease_live) return ["warn", "silent", "its lease has run out"];
    return node.state === "leaving" ? ["warn", "leaves", "it was asked to leave"] : ["good", "trains", ""];
  }
  if (node) {
    if (!node.lease_live) return ["warn", "silent", "its lease has run out"];
    if (!node.ready) return ["accent", "fetches the state", "from its peers, which train on"];
    return world.state === "forming" ? ["accent", "ready", "waits for the others"] : ["accent", "joins", "at the end of a round"];
  }
  if (!attempt) return ["plain", "free", "waits for a worker"];
  if (!attempt.ended_at) return ["accent", "starts", "has not joined yet"];
  return ["plain", "free", `${END_WORDS[attempt.end] ?? "ended"}${reasonOf(attempt) ? `: ${reasonOf(attempt)}` : ""}`];
}

/** Return a row for each node and each seat without one, by seat. `attempts`: of all seats, null until they are loaded. */
export function rowsOf(world, attempts, now) {
  const total = world.nodes.reduce((sum, one) => sum + (one.member ? one.tokens : 0), 0);
  const bySeat = (seat) => (attempts ?? []).filter((one) => one.seat === seat);
  const row = (seat, node) => {
    const all = bySeat(seat);
    const attempt = node ? all.find((one) => one.epoch === Number(node.node.split(".")[1])) : all.at(-1);
    const live = attempt && !attempt.ended_at;
    const [tone, word, detail] = stateOf(world, node, attempt);
    return {
      key: node?.node ?? `seat ${seat}`,
      seat,
      node,
      attempt,
      tone,
      word,
      detail,
      member: Boolean(node?.member),
      ended: Boolean(attempt?.ended_at),
      machine: node?.machine_id ?? (live ? attempt.machine_id : null),
      place: live || node ? [attempt?.gpu_model, attempt?.provider].filter(Boolean).join(", ") : "",
      share: node?.member && total ? node.tokens / total : null,
      held: node ? (world.shards?.held[node.node] ?? 0) : 0,
      stall: live ? (attempt.progress?.metrics?.["world.stall"] ?? null) : null,
      loss: live ? (attempt.progress?.metrics?.loss ?? null) : null,
      usd: costOf(all, now),
      usd_per_hour: live ? attempt.price_usd_per_hour : null,
    };
  };
  const rows = world.nodes.map((node) => row(node.seat, node));
  for (let seat = 0; seat < world.max; seat += 1) {
    if (!world.nodes.some((node) => node.seat === seat)) rows.push(row(seat, null));
  }
  return rows.sort((one, other) => one.seat - other.seat || one.member - other.member);
}

/** Return the voters of the next epoch, those that answer, and whether these may go on alone, as the control plane decides. */
export function quorumOf(rows, world) {
  const order = world.nodes.map((node) => node.node);
  const replaced = (seat) => rows.some((one) => one.seat === seat && one.node && !one.member);
  const voters = rows.filter((one) => one.member && !one.ended && !replaced(one.seat)).sort((one, other) => order.indexOf(one.key) - order.indexOf(other.key));
  const answering = voters.filter((one) => one.node.lease_live);
  const half = 2 * answering.length === voters.length;
  return {
    voters,
    answering,
    silent: voters.filter((one) => !one.node.lease_live),
    holds: voters.length > 0 && (2 * answering.length > voters.length || (half && answering.includes(voters[0]))),
  };
}

/** Return who waits for whom, as `{tone, text}`, the most urgent first. `step`: of the newest checkpoint. */
export function waitsOf(world, rows, step) {
  if (world.state === "ended") return [];
  const seatsOf = (test) => rows.filter(test).map((one) => one.seat);
  if (world.state === "forming") {
    const ready = seatsOf((one) => one.node && !one.member && one.node.lease_live);
    const start = world.epoch ? ` The training goes on from ${step ? `the checkpoint of step ${count(step)}` : "the start"}.` : "";
    const starting = seatsOf((one) => one.word === "starts");
    return [
      {
        tone: "warn",
        text: `${ready.length ? `${capital(named(ready))} ${verb(ready, "waits", "wait")}` : "Nobody trains"}: ${ready.length} of ${counted(world.min, "node")} ${verb(ready, "has", "have")} joined, and the training begins with ${world.min}.${
          starting.length ? ` ${capital(named(starting))} ${verb(starting, "starts", "start")}.` : ""
        }${start}`,
      },
    ];
  }
  const found = [];
  const { answering, silent, holds, voters } = quorumOf(rows, world);
  const [on, off] = [answering, silent].map((some) => some.map((one) => one.seat));
  if (off.length && holds) {
    found.push({ tone: "warn", text: `${capital(named(on))} ${verb(on, "goes", "go")} on without ${named(off)}: ${on.length} of ${voters.length} members answer, which is a quorum. Steps of ${named(off)} count when ${verb(off, "it joins", "they join")} again.` });
  } else if (off.length && !on.length) {
    found.push({ tone: "bad", text: `No member answers. The training goes on when one of them does, or when their leases have ended and ${counted(world.min, "node")} ${world.min === 1 ? "has" : "have"} joined.` });
  } else if (off.length) {
    found.push({ tone: "bad", text: `${capital(named(on))} ${verb(on, "waits", "wait")} for ${named(off)}: ${on.length} of ${voters.length} members answer, which is no quorum. The wait ends when the leases of the silent nodes have ended, or at once if you exclude them.` });
  }
  const fetching = seatsOf((one) => one.word === "fetches the state");
  if (fetching.length) found.push({ tone: "plain", text: `${capital(named(fetching))} ${verb(fetching, "fetches", "fetch")} the state from the members and ${verb(fetching, "enters", "enter")} at the end of a round. The members train on.` });
  const last = world.rounds.at(-1);
  const members = rows.filter((one) => one.member && one.node.lease_live && one.node.joined_at);
  const late = last ? members.filter((one) => one.node.tokens === 0).map((one) => one.seat) : [];
  if (last && last.contributors < members.length && late.length) {
    found.push({ tone: "warn", text: `Round ${count(last.round)} did not wait for ${named(late)}: ${verb(late, "its", "their")} steps count in a later round.` });
  }
  const tokens = members.map((one) => one.node.tokens).filter(Boolean).sort((one, other) => one - other);
  const median = tokens[Math.floor(tokens.length / 2)];
  const slow = tokens.length > 2 ? members.filter((one) => one.node.tokens && one.node.tokens < SLOW_SHARE * median).map((one) => one.seat) : [];
  if (slow.length) found.push({ tone: "warn", text: `${capital(named(slow))} ${verb(slow, "trains", "train")} less than half as fast as the median of the nodes.` });
  const stalled = members.filter((one) => one.stall > STALL_PERCENT);
  for (const one of stalled) found.push({ tone: "plain", text: `Node ${one.seat} waits ${Math.round(one.stall)}% of its time for the others at the end of rounds.` });
  if (world.advice) found.push({ tone: "warn", text: world.advice });
  return found;
}

/** Return the epochs of a world by its events: `{at, epoch, round, members, joined, lost}`, oldest first. */
export const epochsOf = (events) =>
  (events ?? [])
    .filter((event) => event.type === "world.joined" || event.type === "world.lost")
    .map(({ at, data }) => ({ at, epoch: data.world_epoch, round: data.round, members: data.members ?? [], joined: data.joined ?? [], lost: data.lost ?? [] }));

/** Return a change of the members in words. */
export function changeOf({ members, joined, lost, round }) {
  const causes = lost.map((one) => `node ${one.seat}${one.cause ? ` (${CAUSES[one.cause] ?? one.cause.replaceAll("_", " ")})` : ""}`);
  const left = lost.length ? `${capital(causes.join(", "))} ${lost.length === 1 ? "is" : "are"} out` : "";
  const came = joined.length ? `${capital(named(joined))} joined` : "";
  return `${[came, left].filter(Boolean).join("; ")}: ${counted(members.length, "node")} from round ${count(round + 1)} on.`;
}

/** Return what an exclusion does, before it is done. `seats`: the members to exclude. */
export function exclusionOf(world, seats) {
  const kept = world.nodes.filter((node) => node.member && !seats.includes(node.seat)).map((node) => node.seat);
  const begin = kept.length
    ? `Epoch ${world.epoch + 1} begins at once with ${named(kept)}, without a vote. ${kept.length === 1 ? "It finishes" : "They finish"} the round without ${named(seats)}.`
    : `Epoch ${world.epoch + 1} begins without members: the world forms anew when ${counted(world.min, "node")} ${world.min === 1 ? "has" : "have"} joined, from the newest checkpoint if no node holds the state.`;
  return `${begin} A node that still runs keeps its steps and joins again as soon as it reaches the others; its machine is not stopped. An epoch cannot be undone.`;
}
