/** A link that shows one job to readers without a key. */
import { useState } from "preact/hooks";
import { Dialog } from "../components/dialog.js";
import { post } from "../core/api.js";
import { fullMoment } from "../core/format.js";
import { html } from "../core/html.js";
import { Copyable } from "./files.js";

const DAY_S = 86_400;
const LIVES = [
  [1, "a day"],
  [7, "a week"],
  [30, "30 days"],
];

/** Button with a dialog that makes a link. */
export function Share({ job }) {
  const [open, setOpen] = useState(false);
  return html`<button class="button" onClick=${() => setOpen(true)}>Share</button>
    ${open && html`<${ShareDialog} job=${job} onClose=${() => setOpen(false)} />`}`;
}

function ShareDialog({ job, onClose }) {
  const [days, setDays] = useState(7);
  const [made, setMade] = useState(null);
  const [error, setError] = useState(null);
  const make = async (event) => {
    event.preventDefault();
    try {
      setMade(await post(`/job/${job.id}/share`, { expires_in_s: days * DAY_S }));
    } catch (failure) {
      if (failure.status === undefined) throw failure;
      setError(failure);
    }
  };
  return html`<${Dialog} title="Share this job" onClose=${onClose}>
    <div class="dialog-text"><p>Whoever has the link sees this job, its curves, log and history, and can change nothing. Outputs and pictures are not shown.</p></div>
    ${made
      ? html`<${Copyable} text=${made.url} label="Copy the link" name="Link" />
          <p class="soft">Valid until ${fullMoment(made.expires_at)}. To end it earlier, revoke key ${made.id}.</p>
          <div class="dialog-actions"><button class="button button-primary" onClick=${onClose}>Done</button></div>`
      : html`<form onSubmit=${make}>
          <label class="tool"><span>Valid for</span><select value=${String(days)} onChange=${(event) => setDays(Number(event.target.value))}>
            ${LIVES.map(([value, label]) => html`<option key=${value} value=${String(value)}>${label}</option>`)}
          </select></label>
          ${error && html`<p class="inline-error" role="alert">${error.message}</p>`}
          <div class="dialog-actions"><button type="button" class="button" onClick=${onClose}>Cancel</button><button type="submit" class="button button-primary">Make the link</button></div>
        </form>`}
  <//>`;
}
