/** Lines of a job's history in words. Pure. */
import { bytes, count, counted, duration, number } from "../core/format.js";
import { changeOf } from "../world/world-data.js";

const text = (value) => (value === null || value === undefined ? "unknown" : typeof value === "number" ? number(value) : String(value));
const step = (value) => (value ? `step ${count(value)}` : "the start");
const reasonOf = (data) => data.reason?.message || data.message || data.reason?.code?.replaceAll("_", " ") || data.code?.replaceAll("_", " ") || "";
const because = (data) => (reasonOf(data) ? `: ${reasonOf(data)}` : "");
const on = (data) => (data.machine_id ? ` on ${data.machine_id}` : "");
// The events of an elastic job's seats number the attempts at all seats: the reader knows the node.
const who = (event) => (event.data.seat === undefined ? `Attempt ${event.epoch}` : `Attempt ${event.data.attempt ?? event.epoch} of node ${event.data.seat}`);
const lower = (words) => words[0].toLowerCase() + words.slice(1);
const again = (data, at) => (data.not_before > at ? ` The next attempt may begin in ${duration(data.not_before - at)}.` : "");

/** Return the values that a rule read: `loss = 7.25, grad_norm = 12`. */
export const operandsOf = (data) =>
  Object.entries(data.operands ?? {})
    .map(([name, value]) => `${name} = ${text(value)}`)
    .join(", ");

function sourceOf(data) {
  if (data.command) return `Command ${data.command}`;
  return data.rule ? `Rule ${data.rule}` : "The rules";
}

const detail = (data) => [operandsOf(data), data.message].filter(Boolean).join(". ");
const withDetail = (sentence, data) => (detail(data) ? `${sentence}: ${detail(data)}` : sentence);
const dry = (data) => (data.dry_run ? " (dry run: nothing was done)" : "");
const actions = (data) => (data.actions ?? []).join(", ");

const SENTENCES = {
  "job.submitted": (data) =>
    data.copy_of ? "A rule created the job as a copy of another one." : `The job came into queue ${data.queue} with priority ${data.priority}.`,
  "job.started": (data, event) => `${who(event)} began${on(data)}, from ${step(data.resumed_step)}.`,
  "job.pause_requested": (data) => `A user asked for a pause${because(data)}. The training saves a checkpoint first.`,
  "job.paused": (data) => `The job is paused${because(data)}. No worker can claim it until somebody resumes it.`,
  "job.resumed": () => "The job returned to its queue.",
  "job.retried": (data) => `The job runs again, from ${step(data.from_step)}.`,
  "job.canceled": (data) => `The job was stopped${because(data)}.`,
  "job.completed": (data) => `The job is complete${data.artifacts?.length ? `: ${data.artifacts.length} outputs are stored and verified` : ""}.`,
  "job.failed": (data) => `The job failed${because(data)}.`,
  "job.backoff_ended": () => "The pause after the failure is over; a worker can claim the job.",
  "attempt.failed": (data, event) => `${who(event)} failed${on(data)}${because(data)}.${again(data, event.at)}`,
  "attempt.interrupted": (data, event) => `The machine of ${lower(who(event))}${on(data)} was lost${because(data)}. This is not counted as a failure.`,
  "attempt.released": (data, event) => `${who(event)} gave the job back${because(data)}.`,
  "attempt.recovered": (data, event) => `The machine of ${lower(who(event))}${on(data)} answered again and goes on.`,
  "checkpoint.committed": (data) =>
    `Checkpoint of step ${count(data.step)} is committed${data.total_bytes ? `: ${bytes(data.total_bytes)}` : ""}${data.new_bytes !== undefined && data.new_bytes !== null ? `, ${bytes(data.new_bytes)} of it new` : ""}.`,
  "checkpoint.damaged": (data) => `Checkpoint of step ${count(data.step)} is damaged; attempts resume from an earlier one.`,
  "job.rolled_back": (data) => withDetail(`${sourceOf(data)} rolled the training back to ${step(data.to_step)}`, { message: data.message }),
  "rule.fired": (data) => withDetail(`${sourceOf(data)} fired${dry(data)}`, data),
  "rule.cleared": (data) => withDetail(`${sourceOf(data)} is clear again`, data),
  "rule.error": (data) => withDetail(`${sourceOf(data)} could not be evaluated`, data),
  "rule.unevaluable": (data) => withDetail(`${sourceOf(data)} lacks a metric that it reads`, data),
  "rule.updated": (data) => withDetail("New rules are in force", data),
  "action.applied": (data) => withDetail(`${sourceOf(data)} did: ${actions(data)}`, data),
  "action.failed": (data) => withDetail(`${sourceOf(data)} tried without success: ${actions(data)}`, data),
  "action.rejected": (data) => withDetail(`${sourceOf(data)} may not: ${actions(data)}`, data),
  "ring.quarantined": (data) => `A damaged sample of ring ${data.ring} is left out: ${data.message}`,
  "world.joined": (data) => changeOf({ joined: [], lost: [], members: [], ...data }),
  "world.lost": (data) => changeOf({ joined: [], lost: [], members: [], ...data }),
  "world.repaired": (data) => `In round ${count(data.round)} the nodes reduced ${counted(data.repaired, "bucket")} again; no step is lost.`,
};

/** Return an event in words. */
export const sentenceOf = (event) => SENTENCES[event.type]?.(event.data, event) ?? event.type;

const TONES = {
  "job.completed": "good",
  "job.failed": "bad",
  "attempt.failed": "bad",
  "attempt.interrupted": "bad",
  "world.lost": "warn",
  "world.joined": "accent",
  "checkpoint.damaged": "bad",
  "rule.error": "bad",
  "action.failed": "bad",
  "rule.fired": "warn",
  "job.rolled_back": "warn",
  "rule.unevaluable": "warn",
  "action.rejected": "warn",
  "job.started": "accent",
  "attempt.recovered": "accent",
  "action.applied": "accent",
};
/** Return the tone of an event's dot. */
export const toneOf = (event) => TONES[event.type] ?? "plain";

const KINDS = { attempt: "attempts", job: "job", checkpoint: "checkpoints", rule: "rules", action: "rules", ring: "rings", world: "nodes" };
/** Return the subject of an event, for the filter of the timeline. */
export const kindOf = (event) => (event.type === "job.rolled_back" ? "rules" : event.type === "job.started" ? "attempts" : KINDS[event.type.split(".")[0]]);

const DECIDED = new Set(["rule.fired", "action.applied", "action.failed", "action.rejected", "job.rolled_back"]);

/** Return the decisions of rules and commands as marks of a curve: `{step, kind, text}`. */
export const decisionsOf = (events) =>
  events
    .filter((event) => DECIDED.has(event.type) && Number.isFinite(event.data.step ?? event.data.to_step))
    .map((event) => ({ step: event.data.step ?? event.data.to_step, kind: "rule", text: sentenceOf(event) }));
