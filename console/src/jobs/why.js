/** One sentence on the state of a job: why it waits, how it ended. From the job alone, so that a list costs no call per row. */
import { age, count, duration } from "../core/format.js";

const PAUSE_REASONS = new Set(["paused_by_user", "paused_by_rule"]);

/** Return the sentence, "" for a job that simply runs. `attempts`: null while not loaded. */
export function why(job, now, attempts = null) {
  const sentences = { pending, running, paused, failed, complete, canceled };
  return sentences[job.state]?.(job, now, attempts) ?? "";
}

/** Return what a worker must have, such as `24 GiB of GPU memory, 2 GPUs`. */
export function needs({ min_vram_gib, min_disk_gib, min_gpus, gpu_models = [], image }) {
  return [
    min_vram_gib && `${min_vram_gib} GiB of GPU memory`,
    min_gpus && (min_gpus === 1 ? "a GPU" : `${min_gpus} GPUs`),
    gpu_models.length > 0 && gpu_models.join(" or "),
    min_disk_gib && `${min_disk_gib} GiB of disk`,
    image && `the image ${image}`,
  ]
    .filter(Boolean)
    .join(", ");
}

/** Return where the next attempt begins. */
export const beginning = (job) => (job.checkpoint_step ? `step ${count(job.checkpoint_step)}` : "the start");

function reasonOf(job) {
  if (!job.reason) return "";
  const words = job.reason.code.replaceAll("_", " ");
  return job.reason.message ? `${words}: ${job.reason.message}` : words;
}

function pending(job, now, attempts) {
  if (job.not_before > now) {
    return `Tries again in ${duration(job.not_before - now)}${job.reason ? ` after ${reasonOf(job)}` : ""}`;
  }
  const needed = needs(job.requirements);
  const many = job.nodes?.min > 1;
  const workers = many ? `${job.nodes.min} workers` : "a worker";
  const worker = job.rent ? (many ? "its rented machines" : "its rented machine") : needed ? `${workers} with ${needed}` : `${workers} of queue ${job.queue}`;
  const before = job.epoch ? `, then goes on from ${beginning(job)}` : "";
  return `Waits ${waited(now - job.updated_at)}for ${worker}${before}${avoided(job, now, attempts)}`;
}

/** Return the machines that failed the job and cannot claim it yet, with the remaining seconds, as a Map. */
export function avoidedMachines(job, now, attempts) {
  const ends = (attempts ?? []).filter((one) => one.end === "failed" && one.machine_id).map((one) => [one.machine_id, one.ended_at + job.policy.avoid_machine_s - now]);
  return new Map([...new Map(ends)].filter(([, left_s]) => left_s > 0));
}

function avoided(job, now, attempts) {
  const left = [...avoidedMachines(job, now, attempts)].map(([machine, left_s]) => `${machine} (for ${duration(left_s)})`);
  return left.length ? `. These machines failed the job and cannot claim it yet: ${left.join(", ")}` : "";
}

const waited = (seconds) => (seconds < 5 ? "" : `${age(seconds)} `);

function running(job, now) {
  if (PAUSE_REASONS.has(job.reason?.code)) return "Pausing: saves a checkpoint first";
  const silent_s = job.lease_expires_at ? now - job.lease_expires_at : 0;
  if (silent_s > 0) return `Its machine is silent; another one goes on from ${beginning(job)}`;
  return "";
}

const paused = (job) => `Goes on from ${beginning(job)} when resumed${job.reason?.message ? ` (${job.reason.message})` : ""}`;
const complete = (job) => (job.started_at ? `took ${duration(job.completed_at - job.started_at)}` : "");

/** The last attempt says more than the limit that it reached. */
function failed(job, _now, attempts) {
  const last = attempts?.findLast((one) => one.reason?.message);
  return (job.reason?.code === "failure_cap" && last && reasonOf(last)) || reasonOf(job) || "No reason was recorded";
}

function canceled(job) {
  const message = job.reason?.message;
  if (job.reason?.code === "canceled_by_rule") return `By a rule${message ? `: ${message}` : ""}`;
  return `By a user${message ? `: ${message}` : ""}`;
}
