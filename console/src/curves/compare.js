/** The choice of jobs to compare with. */
import { useState } from "preact/hooks";
import { Dialog } from "../components/dialog.js";
import { StateBadge } from "../components/badge.js";
import { Failure, Loading } from "../components/states.js";
import { counted } from "../core/format.js";
import { html } from "../core/html.js";
import { useResource } from "../core/polling.js";
import { titleOf } from "../jobs/actions.js";

export const MAX_COMPARED = 7;

/** Button with a dialog of the newest jobs. `onChange(ids)`: the chosen jobs besides `job`. */
export function Compare({ job, others, onChange }) {
  const [open, setOpen] = useState(false);
  return html`<button class="button button-quiet" onClick=${() => setOpen(true)}>${others.length ? `Compared with ${counted(others.length, "job")}` : "Compare"}</button>
    ${open && html`<${Dialog} title="Compare with up to ${MAX_COMPARED} jobs" onClose=${() => setOpen(false)}>
      <${Choice} job=${job} others=${others} onChange=${onChange} />
      <div class="dialog-actions">
        ${others.length > 0 && html`<button class="button" onClick=${() => onChange([])}>Clear</button>`}
        <button class="button button-primary" onClick=${() => setOpen(false)}>Show</button>
      </div>
    <//>`}`;
}

function Choice({ job, others, onChange }) {
  const { data, error } = useResource("/jobs?order=desc&limit=100");
  const [text, setText] = useState("");
  if (error) return html`<${Failure} error=${error} />`;
  if (!data) return html`<${Loading} rows=${4} label="Loading jobs" />`;
  const found = data.jobs.filter((one) => one.id !== job.id && `${titleOf(one)} ${one.id} ${one.queue}`.toLowerCase().includes(text.toLowerCase()));
  const full = others.length >= MAX_COMPARED;
  const toggle = (id) => onChange(others.includes(id) ? others.filter((one) => one !== id) : [...others, id]);
  return html`<input type="search" placeholder="Name, id or queue" aria-label="Search among the newest 100 jobs" value=${text} onInput=${(event) => setText(event.target.value)} />
    <p class="soft" role="status">${full && `A plot compares ${MAX_COMPARED + 1} jobs at most. Uncheck a job to choose another.`}</p>
    <ul class="compared">
      ${found.map((one) => html`<li key=${one.id}><label>
        <input type="checkbox" checked=${others.includes(one.id)} disabled=${full && !others.includes(one.id)} onChange=${() => toggle(one.id)} />
        <span class="clip">${titleOf(one)}</span><${StateBadge} state=${one.state} />
      </label></li>`)}
      ${found.length === 0 && html`<li class="soft">No other job matches.</li>`}
    </ul>`;
}
