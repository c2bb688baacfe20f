import { useState } from "preact/hooks";
import { html } from "../core/html.js";
import { Dialog } from "./dialog.js";

/** Show a form in a dialog. `onSubmit(values)` gets the form's values by name; a refusal is shown above the buttons. */
export function FormDialog({ title, action, onSubmit, onClose, children }) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      await onSubmit(new FormData(event.target));
    } catch (failure) {
      if (failure.status === undefined) throw failure;
      setError(failure);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <form onSubmit=${submit}>
      ${children}
      ${error && html`<p class="inline-error" role="alert">${error.message}</p>`}
      <div class="dialog-actions">
        <button type="button" class="button" onClick=${onClose}>Cancel</button>
        <button type="submit" class="button button-primary" disabled=${busy}>${action}</button>
      </div>
    </form>
  <//>`;
}
