/** A link that shows one job to readers without a key. */
import { useState } from "preact/hooks";
import { Dialog } from "../components/dialog.js";
import { toast } from "../components/toast.js";
import { post, remove } from "../core/api.js";
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

/** Return the id of the key in a link of the form `…#share=<prefix>_<id>_<secret>&job=…`. */
const keyIn = (link) => /#share=[a-z]+_([a-z0-9]+)_/.exec(link)?.[1];

function ShareDialog({ job, onClose }) {
  const [days, setDays] = useState(7);
  const [made, setMade] = useState(null);
  const [error, setError] = useState(null);
  const trying = (act) => async (event) => {
    event.preventDefault();
    setError(null);
    try {
      await act(event.target);
    } catch (failure) {
      if (failure.status === undefined) throw failure;
      setError(failure);
    }
  };
  const make = trying(async () => setMade(await post(`/job/${job.id}/share`, { expires_in_s: days * DAY_S })));
  const end = trying(async (form) => {
    await remove(`/keys/${made?.id ?? keyIn(form.elements.link.value)}`);
    toast("The link ends within a minute.");
    onClose();
  });
  const refusal = error && html`<p class="inline-error" role="alert">${error.message}</p>`;
  if (made) {
    return html`<${Dialog} title="Share this job" kept onClose=${onClose}>
      <${Copyable} text=${made.url} label="Copy the link" name="Link" />
      <p class="soft">Valid until ${fullMoment(made.expires_at)}. Keep the link or its id, to end the link earlier: <code>baton keys revoke ${made.id}</code></p>
      ${refusal}
      <div class="dialog-actions"><button class="button button-danger" onClick=${end}>End the link</button><button class="button button-primary" onClick=${onClose}>Done</button></div>
    <//>`;
  }
  return html`<${Dialog} title="Share this job" onClose=${onClose}>
    <div class="dialog-text"><p>Whoever has the link sees this job, its curves, log and history, and can change nothing. Outputs and pictures are not shown.</p></div>
    ${refusal}
    <form onSubmit=${make}>
      <label class="tool"><span>Valid for</span><select value=${String(days)} onChange=${(event) => setDays(Number(event.target.value))}>
        ${LIVES.map(([value, label]) => html`<option key=${value} value=${String(value)}>${label}</option>`)}
      </select></label>
      <div class="dialog-actions"><button type="button" class="button" onClick=${onClose}>Cancel</button><button type="submit" class="button button-primary">Make the link</button></div>
    </form>
    <details><summary>End a link</summary><form onSubmit=${end}>
      <label class="field"><span>Link to end</span><input name="link" required pattern=".*#share=[a-z]+_[a-z0-9]+_.*" title="A link that ends with #share=… and a job" autocomplete="off" /></label>
      <div class="dialog-actions"><button type="submit" class="button button-danger">End the link</button></div>
    </form></details>
  <//>`;
}
