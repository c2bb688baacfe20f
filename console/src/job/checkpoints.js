import { useState } from "preact/hooks";
import { DownloadCheckpoint } from "../checkpoints/download.js";
import { Tag } from "../components/badge.js";
import { Confirm } from "../components/dialog.js";
import { Empty, Failure, Loading } from "../components/states.js";
import { Age } from "../components/time.js";
import { toast } from "../components/toast.js";
import { post } from "../core/api.js";
import { bytes, count, counted, number } from "../core/format.js";
import { html } from "../core/html.js";
import { refreshAll } from "../core/polling.js";
import { may } from "../core/session.js";
import { isEnded } from "../jobs/job-list.js";
import { useList } from "./data.js";

/** Return the step of the best checkpoint by the job's metric, the evaluation loss or the loss; null if unknown. Pure. */
export function bestOf(job, checkpoints) {
  const wanted = job.policy.retention?.keep_best_metric;
  for (const name of [wanted, "eval.loss", "eval_loss", "loss"].filter(Boolean)) {
    const known = checkpoints.filter((one) => Number.isFinite(one.metrics[name]) && !one.damaged);
    if (!known.length) continue;
    const most = name === wanted && job.policy.retention?.keep_best_mode === "max";
    const best = known.reduce((a, b) => (most === b.metrics[name] > a.metrics[name] && a.metrics[name] !== b.metrics[name] ? b : a));
    return { step: best.step, name };
  }
  return null;
}

/** Show the committed checkpoints, the newest first. */
export function Checkpoints({ job, version }) {
  const { items: found, more, error } = useList(`/job/${job.id}/checkpoints`, "checkpoints", version);
  const [chosen, choose] = useState(null);
  const [wanted, want] = useState(null);
  if (error) return html`<${Failure} error=${error} />`;
  if (found === null) return html`<${Loading} rows=${5} label="Loading the checkpoints" />`;
  if (!found.length) {
    return html`<${Empty} title="No checkpoint yet"><p>${job.state === "running" ? "The training has not committed one yet. If its machine dies now, the next attempt begins from the start." : "The next attempt begins from the start."}</p><//>`;
  }
  const best = bestOf(job, found);
  const total = found.reduce((sum, one) => sum + one.new_bytes, 0);
  return html`<section aria-label="Checkpoints">
    <p class="soft">Kept: ${more ? "more than " : ""}${counted(found.length, "checkpoint")}, ${bytes(total)} together; unchanged parts are stored once.</p>
    <div class="sheet-scroll" tabindex="0" role="region" aria-label="Table of checkpoints"><table class="sheet">
      <thead><tr><th>Step</th><th>Committed</th><th class="num">Size</th><th class="num">New bytes</th><th>Metrics</th><th></th><th><span class="visually-hidden">Actions</span></th></tr></thead>
      <tbody>${found.map(
        (one) => html`<tr key=${one.step}>
          <td><b>${count(one.step)}</b></td>
          <td><${Age} at=${one.committed_at} suffix=" ago" /></td>
          <td class="num">${bytes(one.total_bytes)}</td>
          <td class="num">${bytes(one.new_bytes)}</td>
          <td class="soft">${Object.entries(one.metrics).slice(0, 3).map(([name, value]) => `${name} ${number(value)}`).join(", ")}</td>
          <td><${Signs} one=${one} best=${best} /></td>
          <td class="num">
            ${may("submit") && !one.damaged && html`<button class="button button-quiet" onClick=${() => want(one)} aria-label="Download step ${count(one.step)}">Download</button>`}
            ${may("submit") && isEnded(job) && !one.damaged && html`<button class="button button-quiet" onClick=${() => choose(one)}>Resume from here</button>`}
          </td>
        </tr>`,
      )}</tbody>
    </table></div>
    ${!isEnded(job) && html`<p class="soft">To resume from an older checkpoint, stop the job first.</p>`}
    ${wanted && html`<${DownloadCheckpoint} job=${job} checkpoint=${wanted} onClose=${() => want(null)} />`}
    ${chosen && html`<${Resume} job=${job} checkpoint=${chosen} onClose=${() => choose(null)} />`}
  </section>`;
}

function Signs({ one, best }) {
  return html`<span class="signs">
    ${one.current && html`<${Tag} tone="accent">next attempt<//>`}
    ${best?.step === one.step && html`<${Tag} tone="good">best ${best.name}<//>`}
    ${one.tag && html`<${Tag}>${one.tag}<//>`}
    ${one.pinned && html`<${Tag}>pinned<//>`}
    ${one.damaged && html`<${Tag} tone="bad">damaged<//>`}
  </span>`;
}

function Resume({ job, checkpoint, onClose }) {
  const confirm = async () => {
    await post(`/job/${job.id}/retry`, { from_step: checkpoint.step });
    refreshAll();
    toast(`The job waits in queue ${job.queue} and goes on from step ${count(checkpoint.step)}.`);
  };
  return html`<${Confirm} title="Resume from step ${count(checkpoint.step)}" action="Resume from here" onConfirm=${confirm} onClose=${onClose}>
    <p>The job returns to queue ${job.queue} under the same id. The next attempt begins at step ${count(checkpoint.step)}; later checkpoints no longer belong to its history.</p>
  <//>`;
}
