import { Component } from "preact";
import { StateBadge, Tag } from "../components/badge.js";
import { ProgressBar } from "../components/bar.js";
import { Sparkline } from "../components/sparkline.js";
import { Age, useNow } from "../components/time.js";
import { MIN_USD, count, counted, duration, number, percent, usd } from "../core/format.js";
import { html } from "../core/html.js";
import { JobActions, titleOf } from "./actions.js";
import { forecast, liveOf, useAttempts } from "./attempts.js";
import { useLoss } from "./loss.js";
import { why } from "./why.js";

export const COLUMNS = [
  { name: "state", label: "State" },
  { name: "job", label: "Job" },
  { name: "progress", label: "Progress" },
  { name: "loss", label: "Loss" },
  { name: "attempts", label: "Attempts" },
  { name: "machine", label: "Machine" },
  { name: "cost", label: "Cost" },
  { name: "age", label: "Age" },
  { name: "actions", label: html`<span class="visually-hidden">Actions</span>` },
];
const BAR_TONES = { complete: "good", failed: "bad", paused: "warn", canceled: "soft", pending: "soft" };
const MAX_TAGS = 3;
const BRAND = /^(NVIDIA |AMD )?(GeForce |Radeon )?/;

/** Row of a job; rendered again only when the job itself changes, or its time passes. */
export class JobRow extends Component {
  shouldComponentUpdate({ job }) {
    return job !== this.props.job;
  }

  render({ job }) {
    return html`<${Cells} job=${job} />`;
  }
}

function Cells({ job }) {
  const found = useAttempts(job);
  const attempts = found?.attempts ?? null;
  const now = useNow();
  const { spent_usd, expected_usd, eta_s } = forecast(job, attempts, now);
  const sentence = why(job, now, attempts);
  const loss = job.progress?.metrics?.loss;
  const curve = useLoss(job);
  const broken = job.progress?.nonfinite?.loss;
  return html`
    <div class="cell cell-state" role="cell"><${StateBadge} state=${job.state} /></div>
    <div class="cell cell-job" role="cell">
      <a class="job-name" href="#/jobs/${job.id}" title=${titleOf(job)}>${titleOf(job)}</a>
      <div class="job-sub">
        <span class="job-id">${job.id.slice(0, 8)}</span><span>${job.queue}</span>
        ${Object.entries(job.tags).slice(0, MAX_TAGS).map(
          ([name, value]) => html`<${Tag} key=${name}>${value ? `${name}=${value}` : name}<//>`,
        )}
      </div>
    </div>
    <div class="cell cell-progress" role="cell"><${Progress} job=${job} eta_s=${eta_s} sentence=${sentence} /></div>
    <div class="cell cell-loss" role="cell">${broken ? html`<${Tag} tone="bad">${broken}<//>` : html`<div class="loss">${curve.length > 1 && html`<${Sparkline} points=${curve} label="Loss" />`}${number(loss)}</div>`}</div>
    <div class="cell cell-attempts" role="cell"><${AttemptStrip} job=${job} attempts=${attempts} /></div>
    <div class="cell cell-machine" role="cell"><${Machine} job=${job} attempts=${attempts} /></div>
    <div class="cell cell-cost" role="cell">
      ${spent_usd === null ? html`<span class="soft" title=${attempts?.length ? "The workers report no price" : undefined}>–</span>` : `${found?.next_cursor ? "more than " : ""}${usd(spent_usd)}`}
      ${expected_usd >= MIN_USD && html`<small title="Expected until the end at the present speed">of ~${usd(expected_usd)}</small>`}
    </div>
    <div class="cell cell-age" role="cell"><${Age} at=${job.created_at} /></div>
    <div class="cell cell-actions" role="cell"><${JobActions} job=${job} compact /></div>
  `;
}

function Progress({ job, eta_s, sentence }) {
  const { step, total_steps } = job.progress ?? {};
  const share = job.state === "complete" ? 1 : total_steps ? Math.min(1, step / total_steps) : null;
  const steps = step === undefined ? "" : total_steps ? `${count(step)} of ${count(total_steps)}` : `step ${count(step)}`;
  if (!steps) return html`<div class="why" title=${sentence}>${sentence}</div>`;
  return html`
    <div class="progress-line"><span>${steps}</span><span class="soft">${share === null ? "" : percent(share)}</span></div>
    <${ProgressBar} share=${share} label="Progress of ${titleOf(job)}" tone=${BAR_TONES[job.state] ?? "accent"} />
    <div class="progress-note" title=${sentence}>${sentence || (eta_s !== null ? `${duration(eta_s)} left` : "no estimate yet")}</div>
  `;
}

const END_WORDS = { complete: "complete", failed: "failed", interrupted: "killed", released: "given back", canceled: "stopped" };
const MAX_SHOWN = 14;

/** Show each attempt as a segment, as wide as it was long, with a mark where a machine died. */
export function AttemptStrip({ job, attempts }) {
  const { attempts: total, interruptions, failures } = job.counters;
  if (!total) return html`<span class="soft">–</span>`;
  const kills = interruptions ? counted(interruptions, "kill") : "";
  const words = [counted(total, "attempt"), kills, failures ? counted(failures, "failure") : ""].filter(Boolean).join(", ");
  if (job.nodes) return html`<${NodeStrip} job=${job} attempts=${attempts} words=${words} note=${kills || (failures ? counted(failures, "failure") : "")} />`;
  const shown = (attempts ?? []).slice(-MAX_SHOWN);
  const note = kills || (failures ? counted(failures, "failure") : "");
  return html`<div class="strip-line" role="img" aria-label=${words} title=${words}>
      <span class="strip-count">${count(total)}</span>
      <span class="strip">${shown.map(
        (one) => html`<i
          key=${one.epoch}
          class="seg seg-${one.end ?? "running"}"
          style=${{ flexGrow: Math.max(1, (one.ended_at ?? job.updated_at) - one.started_at) }}
          title="Attempt ${one.epoch}: ${one.end ? END_WORDS[one.end] : "running"}"
        ></i>`,
      )}</span>
    </div>
    ${note && html`<div class="strip-note">${note}</div>`}`;
}

/** Show the newest attempt at each seat of an elastic job. */
function NodeStrip({ job, attempts, words, note }) {
  const newest = [...new Map((attempts ?? []).map((one) => [one.seat, one])).values()];
  const live = liveOf(job, attempts).length;
  const said = `${live} of ${counted(job.nodes.max, "node")}, ${words}`;
  return html`<div class="strip-line" role="img" aria-label=${said} title=${said}>
      <span class="strip-count">${job.state === "running" && attempts ? `${live}/${job.nodes.max}` : job.nodes.max}</span>
      <span class="strip">${newest.map((one) => html`<i key=${one.seat} class="seg seg-${one.end ?? "running"}" style=${{ flexGrow: 1 }} title="Node ${one.seat}: ${one.end ? END_WORDS[one.end] : "running"}"></i>`)}</span>
    </div>
    <div class="strip-note">${["nodes", note].filter(Boolean).join(", ")}</div>`;
}

function Machine({ job, attempts }) {
  if (job.nodes) {
    const running = liveOf(job, attempts);
    const models = [...new Set(running.map((one) => (one.gpu_model ?? one.provider ?? "").replace(BRAND, "")))].filter(Boolean).join(", ");
    if (!running.length) return html`<span class="soft">–</span>`;
    return html`<div class="clip" title=${running.map((one) => one.machine_id).join(", ")}>${counted(running.length, "machine")}</div><div class="clip sub" title=${models}>${models}</div>`;
  }
  const live = attempts?.at(-1);
  const name = job.machine_id ?? (job.state === "running" ? live?.worker_id : null);
  if (!name) return html`<span class="soft">–</span>`;
  const model = live?.epoch === job.epoch ? (live.gpu_model ?? live.provider ?? "").replace(BRAND, "") : "";
  return html`<div class="clip" title=${name}>${name}</div><div class="clip sub">${model}</div>`;
}
