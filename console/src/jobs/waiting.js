/** What delays a waiting job beside the job itself, in the sentences of `baton explain` (gpu_client/cli/jobs/). Pure. */
import { counted, duration, usd } from "../core/format.js";
import { groupOf } from "../fleet/words.js";
import { avoidedMachines } from "./why.js";

const STARTING = {
  planned: "is about to be rented",
  requested: "is requested",
  ambiguous: "may exist, because the provider's answer was lost",
  booting: "boots",
  registered: "is checked",
};
/** `FAILED_WAITING_JOBS` of baton/contract/fleets/job_machines.py. */
const FAILED_WAITING_JOBS = "it failed the jobs that wait";

/**
 * Return the sentences on the place of a job in its queue, on the queue's fleets, and without a fleet on its workers.
 *
 * `pending`, `running`: pages of the queue's jobs, the oldest first; `machines`: the answer on the job's machines; an
 * unknown one is left out. A sentence is `[text]`, or `[before, name of a fleet, after]`.
 */
export function waitingFor(job, now, attempts, { pending, running, machines }, fleetNow) {
  const sentences = pending ? [position(job, now, pending)] : [];
  if (machines?.fleets.length) {
    const avoided = avoidedMachines(job, now, attempts);
    sentences.push(...machines.fleets.map(({ fleet, cannot }) => fleetSentence(fleet, cannot, fleetNow, avoided)));
  } else if (machines) {
    sentences.push([`No fleet serves the queue '${job.queue}'.`], running ? [workers(job, running)] : []);
  }
  return sentences.filter(([text]) => text);
}

/** A page that ends before the list does proves a least number, and no absence. */
function position(job, now, { jobs, next_cursor }) {
  const ahead = jobs.filter((one) => !(one.not_before > now) && precedes(one, job)).length;
  if (ahead === 0) return [next_cursor ? "" : "It is the first job of its queue."];
  return [`${next_cursor ? "At least " : ""}${counted(ahead, "job")} of its queue ${ahead === 1 ? "precedes" : "precede"} it.`];
}

/** Begun jobs are first, then priority, then age decide. */
function precedes(one, other) {
  const [ours, theirs] = [one, other].map((job) => [job.epoch === 0, -job.priority, job.created_at, job.id]);
  const at = ours.findIndex((value, index) => value !== theirs[index]);
  return at >= 0 && ours[at] < theirs[at];
}

function workers({ queue }, { jobs, next_cursor }) {
  if (jobs.length === 0) return next_cursor ? "" : `No job of the queue '${queue}' runs now. Start a worker.`;
  const some = `${next_cursor ? "at least " : ""}${counted(jobs.length, "job")}`;
  return `All workers are busy or unsuitable: ${some} of the queue '${queue}' ${jobs.length === 1 ? "runs" : "run"} now.`;
}

function fleetSentence({ spec, machines, stopped, waits }, cannot, now, avoided) {
  const { name, max } = spec;
  const said = (text) => ["Fleet ", name, ` ${text}.`];
  const ofMachine = (machine, text) => [`The machine ${machine.id} of fleet `, name, ` ${text}.`];
  const inGroup = (group) => machines.filter(({ state }) => groupOf(state) === group);
  if (cannot) return said(`serves its queue and cannot run it: ${cannot}`);
  if (stopped) return said("serves its queue and is stopped");
  const free = inGroup("idle");
  const ready = free.find(({ id }) => !avoided.has(id));
  if (ready) return ofMachine(ready, "is ready and asks for jobs");
  const [coming] = inGroup("starting").sort((one, other) => one.since - other.since);
  if (coming) return said(`rents: ${machineText(coming)} ${STARTING[coming.state]} (${duration(now - coming.since)} so far)`);
  if (free.length) {
    const back = machines.length >= max ? ", and gives this one back first, once no other job waits for it" : "";
    return ofMachine(free[0], `is free, but failed the job, which avoids it; the fleet rents another machine${back}`);
  }
  if (waits) return said(`rents no machine: ${waits}`);
  const replaced = machines.find(({ reason }) => reason === FAILED_WAITING_JOBS);
  if (replaced) return said(`gives the machine ${replaced.id} back, because ${FAILED_WAITING_JOBS}, and rents another one`);
  if (machines.length >= max) {
    const busy = inGroup("busy").length;
    const ending = machines.length - busy;
    return said(`has its maximum of ${counted(max, "machine")}: ${busy} busy${ending ? `, ${ending} on the way out` : ""}`);
  }
  return said("serves its queue; its controller looks for waiting jobs once a minute");
}

const machineText = ({ id, provider, gpu_model, usd_per_hour }) => `the machine ${id} of ${provider} (${gpu_model ? `${gpu_model}, ` : ""}${usd(usd_per_hour)}/h)`;
