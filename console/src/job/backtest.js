/** What rules would have done to this run: the control plane replays its reports, and nothing changes. */
import { useState } from "preact/hooks";
import { Tag } from "../components/badge.js";
import { Grid } from "../components/grid.js";
import { post } from "../core/api.js";
import { count, counted, duration, number } from "../core/format.js";
import { html } from "../core/html.js";
import { FiringCurve } from "./backtest-curve.js";

const USES = { saved: ["good", "saved"], wrongly: ["bad", "wrongly cut off"], unknown: ["plain", "of unknown use"] };

/** Back-test `text` by a button. `sound`: the text has no faults; `attempts`: null until they are loaded. */
export function Backtest({ job, attempts, text, sound }) {
  const [found, set] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const run = async () => {
    setBusy(true);
    setError(null);
    try {
      set({ text, ...(await post(`/job/${job.id}/rules/backtest`, { text })) });
    } catch (failure) {
      if (failure.status === undefined) throw failure;
      setError(failure);
    }
    setBusy(false);
  };
  return html`<section class="backtest" aria-label="Back-test">
    <div class="section-head"><p class="soft">Replay the reports of this run first: nothing changes.</p>
      <button type="button" class="button" disabled=${!sound || busy} onClick=${run}>${busy ? "Replaying …" : "Back-test"}</button></div>
    ${error && html`<p class="inline-error" role="alert">${error.message}</p>`}
    ${found && html`<div role="status"><${Verdict} found=${found} stale=${found.text !== text} /></div>`}
    ${found?.rules.some((one) => one.fires > 0) && html`<${FiringCurve} job=${job} attempts=${attempts} found=${found} />`}
  </section>`;
}

function Verdict({ found, stale }) {
  if (found.rows === 0) return html`<p class="soft">The job has reported no metrics yet.</p>`;
  const columns = [
    { name: "rule", label: "Rule", cell: (one) => html`<strong>${one.rule}</strong>${one.mode === "dry_run" && html`<div class="soft">dry run</div>`}` },
    { name: "fires", label: "Fires", cell: (one) => (one.tried ? html`<b>${one.fires ? counted(one.fires, "time") : "never"}</b>${one.fires > 0 && html`<div class="soft">first at step ${count(one.first_step)}${one.first_after_s === null ? "" : `, after ${duration(one.first_after_s)}`}</div>`}` : html`<span class="soft">not tried</span>`) },
    { name: "when", label: `Steps ${count(found.first_step)} to ${count(found.last_step)}`, cell: (one) => one.steps.length > 0 && html`<${Marks} one=${one} found=${found} />` },
    { name: "does", label: "It would", cell: (one) => html`${one.fires > 0 && one.actions.join(", ")}${one.use && one.gpu_hours !== null && html`<div><${Tag} tone=${USES[one.use][0]}>${number(one.gpu_hours)} GPU hours ${USES[one.use][1]}<//></div>`}<div class="soft">${[valuesOf(one), one.why, one.reason].filter(Boolean).join("; ")}</div>` },
  ];
  return html`<p>${endOf(found)} <span class="soft">${counted(found.rows, "report")} replayed${found.complete ? "" : ", the first ones of this run; the command replays all"}${stale ? ", with an earlier text of the rules" : ""}.</span></p>
    <div class="card"><${Grid} label="What the rules would have done" columns=${columns} items=${found.rules} keyOf=${(one) => one.rule} /></div>`;
}

/** Mark the steps of the firings on a line from the first to the last step. */
function Marks({ one, found }) {
  const share = (step) => (100 * (step - found.first_step)) / Math.max(1, found.last_step - found.first_step);
  const shown = one.steps.slice(0, 3).map(count).join(", ");
  return html`<div class="firings" role="img" aria-label="Fires at ${one.fires > 3 ? `${shown} and later steps` : `step ${shown}`}" title=${shown}>
    ${one.steps.map((step) => html`<i key=${step} style=${{ left: `${share(step)}%` }}></i>`)}</div>`;
}

const valuesOf = (one) => Object.entries(one.operands).map(([text, value]) => `${text} = ${typeof value === "number" ? number(value) : value}`).join(", ");

/** Say how the run would have ended. */
function endOf({ rules, ended_by }) {
  const end = rules.find((one) => one.rule === ended_by);
  if (!end) return "No rule would have ended the run.";
  const step = count(end.first_step);
  if (end.use === null) return `At step ${step}, ${end.rule} would have given the run another way (${end.actions.join(", ")}).`;
  return `${end.rule} would have ended the run at step ${step}.`;
}
