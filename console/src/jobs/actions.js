/** What a user can do with a job: each action says its effect before, and offers its undo after. */
import { useState } from "preact/hooks";
import { Confirm } from "../components/dialog.js";
import { Icon } from "../components/icon.js";
import { toast } from "../components/toast.js";
import { post } from "../core/api.js";
import { count, duration } from "../core/format.js";
import { html } from "../core/html.js";
import { refreshAll } from "../core/polling.js";
import { may } from "../core/session.js";
import { isEnded } from "./job-list.js";
import { beginning } from "./why.js";

/** Return the title of a job for people. */
export const titleOf = (job) => job.name || job.recipe || job.command.join(" ").slice(0, 80) || job.id;

const lost = (job) => {
  const step = job.progress?.step;
  if (!step || step === job.checkpoint_step) return "";
  return job.checkpoint_step
    ? ` Steps ${count(job.checkpoint_step + 1)} to ${count(step)} are not in a checkpoint and are lost.`
    : ` ${count(step)} steps are done and no checkpoint is committed: they are lost.`;
};

const heartbeat = (job) => `within ${duration(job.policy.heartbeat_interval_s)}`;

const ACTIONS = {
  pause: {
    icon: "pause",
    label: "Pause",
    fits: (job) => (job.state === "running" && !job.reason?.code?.startsWith("paused")) || job.state === "pending",
    effect: (job) =>
      job.state === "running"
        ? `The training commits a checkpoint (it is told ${heartbeat(job)}) and gives its machine back. No step is lost.`
        : "No worker can claim the job until you resume it.",
    done: (job) => (job.state === "running" ? "pauses after its next checkpoint" : "is paused"),
    undo: { label: "Resume", path: "resume" },
  },
  resume: {
    icon: "play",
    label: "Resume",
    fits: (job) => job.state === "paused" || (job.state === "running" && Boolean(job.reason?.code?.startsWith("paused"))),
    effect: (job) =>
      job.state === "running"
        ? "The request to pause is withdrawn; the training goes on where it is."
        : `The job returns to queue ${job.queue}. The next free worker goes on from ${beginning(job)}.`,
    done: () => "is resumed",
    undo: { label: "Pause", path: "pause" },
  },
  retry: {
    icon: "retry",
    label: "Run again",
    fits: isEnded,
    effect: (job) =>
      `The job returns to queue ${job.queue} under the same id, goes on from ${beginning(job)}, and its limits count anew.` +
      (job.rent ? " A machine is rented again." : "") +
      (job.state === "complete" ? " Its outputs are replaced when it completes again." : ""),
    done: (job) => `waits in queue ${job.queue}`,
    undo: { label: "Stop", path: "stop" },
  },
  stop: {
    icon: "stop",
    label: "Stop",
    danger: true,
    fits: (job) => !isEnded(job),
    effect: (job) =>
      (job.state === "running" ? `The training ends without a last checkpoint, ${heartbeat(job)}.${lost(job)}` : "The job ends.") +
      (job.checkpoint_step ? " Checkpoints stay." : "") +
      ` You can run the job again from ${beginning(job)}.`,
    done: () => "is stopped",
    undo: { label: "Run again", path: "retry" },
  },
};

/** Return the names of the actions that fit a job's state and the reader's key. */
export const actionsOf = (job) => (may("submit") ? Object.keys(ACTIONS).filter((name) => ACTIONS[name].fits(job)) : []);

/** Show the actions of a job as icons (`compact`) or as buttons. */
export function JobActions({ job, compact = false }) {
  const [asked, ask] = useState(null);
  return html`<div class="job-actions">
    ${actionsOf(job).map((name) => {
      const { label, icon } = ACTIONS[name];
      return compact
        ? html`<button key=${name} class="icon-button" onClick=${() => ask(name)} aria-label="${label} ${titleOf(job)}" title=${label}><${Icon} name=${icon} /></button>`
        : html`<button key=${name} class="button" onClick=${() => ask(name)}><${Icon} name=${icon} />${label}</button>`;
    })}
    ${asked && html`<${ActionDialog} job=${job} name=${asked} onClose=${() => ask(null)} />`}
  </div>`;
}

function ActionDialog({ job, name, onClose }) {
  const action = ACTIONS[name];
  // The dialog tells the state in which the reader opened it, also while the job goes on.
  const [seen] = useState(job);
  const confirm = async () => {
    await post(`/job/${seen.id}/${name}`, {});
    refreshAll();
    toast(`${titleOf(seen)} ${action.done(seen)}.`, {
      undo: {
        label: action.undo.label,
        run: async () => {
          await post(`/job/${seen.id}/${action.undo.path}`, action.undo.path === "retry" ? { reset_counters: false } : {});
          refreshAll();
        },
      },
    });
  };
  return html`<${Confirm} title="${action.label}: ${titleOf(seen)}" action=${action.label} danger=${action.danger} onConfirm=${confirm} onClose=${onClose}>
    <p>${action.effect(seen)}</p>
  <//>`;
}
