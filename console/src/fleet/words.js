/** Fleets, machines and events in words. Pure. */
import { counted, usd } from "../core/format.js";

const STARTING = ["planned", "requested", "ambiguous", "booting", "registered"];
const ENDING = ["draining", "lost", "terminating"];

/** What machines do, in the order of a drawing from below: name, word, states. */
export const GROUPS = [
  ["busy", "with a job", ["busy"]],
  ["idle", "without a job", ["ready"]],
  ["starting", "starting", STARTING],
  ["ending", "going back", ENDING],
];

/** Return what a machine in `state` does: `busy`, `idle`, `starting`, `ending`, or `ended`. */
export const groupOf = (state) => GROUPS.find(([, , states]) => states.includes(state))?.[0] ?? "ended";

/** Return the number of machines by what they do: `{busy: 2, idle: 0, starting: 1, ending: 0}`. */
export const countsOf = (machines) =>
  Object.fromEntries(GROUPS.map(([group]) => [group, machines.filter((one) => groupOf(one.state) === group).length]));

/** Return `active`, `stopping` or `stopped`. */
export const stateOf = ({ stopped, machines }) => (stopped ? (machines.length ? "stopping" : "stopped") : "active");

const BOUNDS = { total_usd: "In total", per_day_usd: "A day", per_month_usd: "A month" };

/** Return the name of a bound: `A day, all fleets`. */
export const boundName = ({ name, scope }) => `${BOUNDS[name] ?? name}${scope === "deployment" ? ", all fleets of the deployment" : ""}`;

/** Return `queue default` or `queues a, b`. */
export const queuesOf = ({ queues }) => `${queues.length === 1 ? "queue" : "queues"} ${queues.join(", ")}`;

/** Return what a fleet permits: `up to 2 machines of vast at $0.50/h each at most`. */
export const permits = (spec) =>
  `up to ${counted(spec.max, "machine")} of ${spec.providers.join(", ")} at ${usd(spec.max_usd_per_hour)}/h each at most`;

/** Return why the fleet rents no further machine, as of the last tick, as one or two sentences. */
export function why({ spec, stopped, machines, waits, job_id }) {
  const some = counted(machines.length, "machine");
  if (stopped && machines.length) return `${some} ${machines.length === 1 ? "is" : "are"} given back. A machine with a job saves a checkpoint first.`;
  if (stopped) return job_id ? "The fleet has ended with its job." : "The fleet is stopped and rents nothing.";
  if (waits) return `${machines.length ? "No further machine is rented" : "No machine is rented"}: ${waits}.`;
  if (machines.length >= spec.max) return `${some} ${machines.length === 1 ? "is" : "are"} rented, as many as the document permits.`;
  if (machines.length) return "No further machine is needed: the last tick found no job without a machine that this fleet can run.";
  return `No machine is rented: the last tick found no waiting job in ${queuesOf(spec)} that this fleet can run.`;
}

const STATES = {
  planned: "is planned",
  requested: "is ordered from its provider",
  ambiguous: "may exist: the provider's answer was lost, and the provider's list will tell",
  booting: "boots",
  registered: "has enrolled",
  ready: "is ready, without a job",
  busy: "began a job",
  draining: "saves a checkpoint and gives its job back",
  lost: "is lost",
  terminating: "is given back",
  gone: "is gone: two complete lists of its provider lack the machine",
  failed: "was not created",
  reallocated: "moves to another host",
  overdue: "stays long in its state",
};
const MONEY = {
  "budget.warning": "80% of a bound of the budget are spent",
  "budget.drained": "The money ends: a machine saves a checkpoint and is given back",
  "budget.exhausted": "The budget does not pay for another machine",
  "balance.low": "The credit at a provider is low",
  "charge.differs": "The provider's charge differs from the observed cost",
};

/** Return the sentence of an event. */
export function sentenceOf({ type, reason }) {
  const [kind, name] = type.split(".");
  const said = kind === "machine" ? `The machine ${STATES[name] ?? name}` : (MONEY[type] ?? type);
  return reason ? `${said}: ${reason}.` : `${said}.`;
}

const BAD = ["machine.failed", "machine.lost", "machine.overdue", "budget.exhausted", "budget.drained", "charge.differs", "balance.low"];
const TONES = { "machine.busy": "accent", "machine.ready": "accent", "machine.gone": "good", "budget.warning": "warn", "machine.ambiguous": "warn" };

/** Return the tone of an event's mark. */
export const toneOf = ({ type }) => (BAD.includes(type) ? "bad" : (TONES[type] ?? "plain"));
