/** What watches a job, what fired, and the next revision of its rules. */
import { useEffect, useState } from "preact/hooks";
import { Tag } from "../components/badge.js";
import { Empty, Failure, Loading } from "../components/states.js";
import { Age } from "../components/time.js";
import { toast } from "../components/toast.js";
import { call, post } from "../core/api.js";
import { count, counted } from "../core/format.js";
import { html } from "../core/html.js";
import { refreshAll, useResource } from "../core/polling.js";
import { may } from "../core/session.js";
import { withInput } from "../submit/document.js";
import { isEnded } from "../jobs/job-list.js";
import { Backtest } from "./backtest.js";
import { kindOf, sentenceOf, toneOf } from "./events.js";
import { Copyable } from "./files.js";

const TYPING_MS = 400;
const RETRY_MS = 5000;
const EXAMPLE = "rules:\n  - name: not-a-number\n    when: not isfinite(loss)\n    do: {stop: failed}\n";

/** Show the rules of a job. */
export function Rules({ job, attempts, events }) {
  const { data, error } = useResource(`/job/${job.id}/rules`);
  const [editing, edit] = useState(false);
  if (error) return html`<${Failure} error=${error} />`;
  if (!data) return html`<${Loading} rows=${4} label="Loading the rules" />`;
  const fired = (events ?? []).filter((event) => kindOf(event) === "rules").reverse();
  const statuses = [...(data.acknowledged?.statuses ?? []), ...(data.control_plane?.statuses ?? [])];
  const mayEdit = may("submit") && !isEnded(job);
  return html`<div class="rules">
    <section aria-label="Rules in force">
      <div class="section-head"><h2>What watches this job</h2>
        ${mayEdit && !editing && html`<button class="button" onClick=${() => edit(true)}>${data.newest?.text ? "Change the rules" : "Add rules"}</button>`}</div>
      ${!data.newest?.text && !editing && html`<${Empty} title="No rules"><p>Presets still tell when the loss is NaN or explodes, when no step is done, and when the GPU is idle. Rules can stop, save, roll back, or change the learning rate.</p><//>`}
      ${data.newest && html`<p class="soft">Revision ${data.newest.revision}, stored <${Age} at=${data.newest.created_at} suffix=" ago" />. <${InForce} data=${data} /></p>`}
      ${statuses.length > 0 && html`<ul class="statuses">${statuses.map(
        (one) => html`<li key=${one.rule}><b>${one.rule}</b> <${Tag} tone=${one.fires ? "warn" : "plain"}>${one.state.replaceAll("_", " ")}<//>
          <span>${one.said}</span>${one.fires > 0 && html`<span class="soft">fired ${counted(one.fires, "time")}</span>`}</li>`,
      )}</ul>`}
      ${editing
        ? html`<${Editor} job=${job} attempts=${attempts} newest=${data.newest} onClose=${() => edit(false)} />`
        : data.newest?.text && html`<pre class="command" tabindex="0" aria-label="Rules">${data.newest.text}</pre>`}
    </section>
    <section aria-label="What fired"><h2>What fired</h2>
      ${events === null && html`<${Loading} rows=${3} label="Loading the events" />`}
      ${events !== null && fired.length === 0 && html`<p class="soft">No rule has fired.</p>`}
      <ol class="timeline">${fired.map(
        (event) => html`<li key=${event.seq} class="tone-${toneOf(event)}">
          <span class="timeline-at"><small><${Age} at=${event.at} suffix=" ago" /></small></span><span class="timeline-dot" aria-hidden="true"></span>
          <span class="timeline-text">${sentenceOf(event)}${event.data.step !== undefined && html`<small>step ${count(event.data.step)}</small>`}</span></li>`,
      )}</ol>
    </section>
  </div>`;
}

function InForce({ data }) {
  const { acknowledged, newest } = data;
  if (!acknowledged) return "The training has not reported yet.";
  if (acknowledged.rejected === newest.revision) return html`<b>The training rejected it:</b> ${acknowledged.reason}`;
  if (acknowledged.revision < newest.revision) return `Revision ${acknowledged.revision} is in force; the training takes the newest with its next heartbeat.`;
  return acknowledged.step === null ? "The training has it." : `In force since step ${count(acknowledged.step)}.`;
}

/** Edit the next revision: checked while the reader types, put in force by a button. */
function Editor({ job, attempts, newest, onClose }) {
  const [text, setText] = useState(newest?.text || EXAMPLE);
  // The revision that the reader changes, also after somebody else has stored another one.
  const [revision] = useState(newest?.revision ?? 0);
  const [checked, setChecked] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    let current = true;
    const check = async () => {
      try {
        const answer = await post("/rules/check", { text });
        if (!current) return;
        setChecked({ text, ...answer });
        setError(null);
      } catch (failure) {
        if (failure.status === undefined) throw failure;
        if (!current) return;
        setError(failure);
        if (failure.passing) timer = setTimeout(check, RETRY_MS);
      }
    };
    let timer = setTimeout(check, TYPING_MS);
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [text]);
  const sound = checked?.text === text && checked.faults.length === 0;
  const put = async () => {
    setBusy(true);
    try {
      await call("PUT", `/job/${job.id}/rules`, { body: { text, if_revision: revision } });
      refreshAll();
      toast(text.trim() ? "The rules are stored; the training takes them with its next heartbeat." : "The job has no rules any more.");
      onClose();
    } catch (failure) {
      if (failure.status === undefined) throw failure;
      setError(failure);
      setBusy(false);
    }
  };
  return html`<div class="editor">
    <label class="visually-hidden" for="rules-text">Rules</label>
    <textarea id="rules-text" class="code" rows="14" spellcheck=${false} value=${text} aria-invalid=${checked?.text === text && checked.faults.length > 0} aria-describedby="rules-faults" onInput=${(event) => {
      setText(event.target.value);
      setError(null);
    }}></textarea>
    <div id="rules-faults" role="status">
      ${(checked?.faults ?? []).map((fault, index) => html`<p key=${index} class="inline-error">${place(fault)}${fault.reason}. ${fault.remedy}</p>`)}
      ${(checked?.warnings ?? []).map((fault, index) => html`<p key=${`w${index}`} class="inline-warning">${place(fault)}${fault.reason}. ${fault.remedy}</p>`)}
      ${sound && html`<p class="soft">No faults.</p>`}
    </div>
    ${error && html`<p class="inline-error" role="alert">${error.message}</p>`}
    <${Backtest} job=${job} attempts=${attempts} text=${text} sound=${sound} />
    <details><summary>The back-test as a command</summary>
      <${Copyable} label="Copy the command" text=${`${withInput("cat > rules.yaml", text.trimEnd(), "RULES")}\nbaton rules backtest rules.yaml --job ${job.id}`} />
    </details>
    <div class="dialog-actions">
      <button class="button" onClick=${onClose}>Cancel</button>
      <button class="button button-primary" disabled=${!sound || busy} onClick=${put}>Put in force</button>
    </div>
  </div>`;
}

const place = (fault) => (fault.line ? `Line ${fault.line}${fault.column ? `, column ${fault.column}` : ""}: ` : fault.field ? `${fault.field}: ` : "");
