/** State, progress, cost and actions of a job, and why it is where it is. */
import { StateBadge, Tag } from "../components/badge.js";
import { ProgressBar } from "../components/bar.js";
import { Age, useNow } from "../components/time.js";
import { MIN_USD, count, counted, duration, number, percent, usd } from "../core/format.js";
import { html } from "../core/html.js";
import { hrefOf } from "../core/router.js";
import { JobActions, titleOf } from "../jobs/actions.js";
import { may, session } from "../core/session.js";
import { forecast, liveOf } from "../jobs/attempts.js";
import { QueueNote } from "../jobs/queue-feed.js";
import { why } from "../jobs/why.js";
import { Share } from "./share.js";

/** Show the head of a job's page. `attempts`: null until they are loaded; `more`: the job has further ones; `machines`: whether the job may have rented ones. */
export function JobHeader({ job, attempts, more, overhead_usd, machines }) {
  const now = useNow();
  const { spent_usd, expected_usd, eta_s } = forecast(job, attempts, now, overhead_usd);
  const sentence = why(job, now, attempts);
  const running = liveOf(job, attempts);
  const live = running.at(-1);
  const { step, total_steps, metrics = {} } = job.progress ?? {};
  const share = job.state === "complete" ? 1 : total_steps ? Math.min(1, step / total_steps) : null;
  return html`<header class="job-head">
    <div class="job-title">
      <p class="crumbs">${!session.value.shared && html`<a href="#/jobs">Jobs</a> <span aria-hidden="true">/</span> `}<code>${job.id}</code></p>
      <h1>${titleOf(job)}</h1>
      <div class="job-sub">
        <${StateBadge} state=${job.state} /><span>queue ${job.queue}</span><span>submitted <${Age} at=${job.created_at} suffix=" ago" /></span>
        ${Object.entries(job.tags).map(([name, value]) => html`<${Tag} key=${name}>${value ? `${name}=${value}` : name}<//>`)}
      </div>
    </div>
    <div class="job-actions"><${JobActions} job=${job} />${may("submit") && html`<a class="button" href=${hrefOf("/submit", { from: job.id })}>Submit again</a><${Share} job=${job} />`}</div>
    ${sentence && html`<div class="job-why job-why-${job.state}"><p>${sentence}.</p>${job.state === "pending" && !job.not_before && may("submit") && html`<${QueueNote} job=${job} now=${now} attempts=${attempts} />`}<${LastEnd} job=${job} attempts=${attempts} /></div>`}
    <dl class="facts">
      <${Fact} name="Progress" wide>
        ${step === undefined ? html`<span class="soft">no step yet</span>` : html`<b>${count(step)}</b>${total_steps ? html`<span class="soft"> of ${count(total_steps)} steps${share === null ? "" : `, ${percent(share)}`}</span>` : html`<span class="soft"> steps</span>`}`}
        <${ProgressBar} share=${share ?? (step === undefined ? 0 : null)} label="Progress of ${titleOf(job)}" tone=${TONES[job.state] ?? "accent"} />
      <//>
      <${Fact} name=${job.state === "running" ? "Left" : "Ran"}>
        ${job.state === "running"
          ? eta_s === null ? html`<span class="soft">not known yet</span>` : html`<b>${duration(eta_s)}</b>`
          : html`<b>${duration(job.counters.runtime_s)}</b>`}
      <//>
      <${Fact} name="Loss"><b>${job.progress?.nonfinite?.loss ?? (number(metrics.loss) || "–")}</b><//>
      <${Fact} name="Cost">
        ${spent_usd === null ? html`<span class="soft" title=${attempts?.length ? "The workers report no price" : undefined}>${attempts?.length ? "not reported" : "–"}</span>` : html`<b title=${overhead_usd ? `with ${usd(overhead_usd)} for boots and idle time of the job's own fleet` : undefined}>${more ? "more than " : ""}${usd(spent_usd)}</b>`}
        ${expected_usd >= MIN_USD && html`<span class="soft" title="Expected until the end at the present speed"> of ~${usd(expected_usd)}</span>`}
      <//>
      <${Fact} name=${job.nodes ? "Nodes" : "Attempts"}>
        <b>${count(job.nodes ? running.length : job.counters.attempts)}</b><span class="soft">${job.nodes ? ` of ${count(job.nodes.max)}, ${counted(job.counters.attempts, "attempt")}` : ""}</span><span class="soft">${lossesOf(job.counters)}</span>
      <//>
      <${Fact} name=${job.nodes ? "Machines" : "Machine"}><${Machine} job=${job} live=${live} running=${running} machines=${machines} /><//>
    </dl>
  </header>`;
}

function lossesOf({ interruptions, failures }) {
  const losses = [interruptions && `${counted(interruptions, "machine")} lost`, failures && counted(failures, "failure")].filter(Boolean);
  return losses.length ? `(${losses.join(", ")})` : "";
}

/** Tell how the last attempt ended, with the last lines of its output, if the job has not gone on since. */
function LastEnd({ job, attempts }) {
  const last = [...(attempts ?? [])].sort((one, other) => (one.ended_at ?? 0) - (other.ended_at ?? 0)).at(-1);
  if (!last || job.state === "running" || !["failed", "interrupted"].includes(last.end)) return null;
  const exit = last.signal ? ` by signal ${last.signal}` : last.exit_code ? ` with exit code ${last.exit_code}` : "";
  const what = last.end === "failed" ? `failed${exit}` : "lost its machine";
  return html`<p>${job.nodes ? `Node ${last.seat}` : `Attempt ${last.epoch}`} ${what}${last.reason?.message ? `: ${last.reason.message}` : ""}.</p>
    ${last.log_tail.length > 0 && html`<details><summary>Its last lines</summary><pre tabindex="0" aria-label="Last lines">${last.log_tail.join("\n")}</pre></details>`}`;
}

const TONES = { complete: "good", failed: "bad", paused: "warn", canceled: "soft", pending: "soft" };

const Fact = ({ name, wide, children }) => html`<div class="fact ${wide ? "fact-wide" : ""}"><dt>${name}</dt><dd>${children}</dd></div>`;

function Machine({ job, live, running, machines }) {
  if (job.nodes && running.length > 1) {
    const kinds = [...new Set(running.map((one) => one.gpu_model ?? one.provider))].filter(Boolean).join(", ");
    return html`<a href="#/jobs/${job.id}?tab=world"><b>${counted(running.length, "machine")}</b></a>${kinds && html`<span class="soft clip" title=${kinds}>${kinds}</span>`}`;
  }
  const name = job.machine_id ?? live?.machine_id ?? live?.worker_id;
  if (!name) return machines ? html`<a href="#/jobs/${job.id}?tab=machines">none now</a>` : html`<span class="soft">none now</span>`;
  const kind = [live?.gpu_model, live?.provider].filter(Boolean).join(", ");
  return html`${machines ? html`<a class="clip" href="#/jobs/${job.id}?tab=machines" title=${name}><b>${name}</b></a>` : html`<span class="clip" title=${name}><b>${name}</b></span>`}${kind && html`<span class="soft clip" title=${kind}>${kind}</span>`}`;
}
