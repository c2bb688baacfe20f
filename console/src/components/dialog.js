import { useEffect, useRef, useState } from "preact/hooks";
import { html } from "../core/html.js";

/**
 * Show a modal dialog. `onClose` is called by Escape, by a click outside, and by the close buttons.
 *
 * `kept`: the close buttons alone close, because the dialog shows what cannot be shown again.
 */
export function Dialog({ title, children, onClose, kept = false }) {
  const element = useRef(null);
  const pressed = useRef(null);
  useEffect(() => {
    const dialog = element.current;
    const before = document.activeElement;
    dialog.showModal();
    return () => before?.focus?.();
  }, []);
  // A drag from the dialog to its outside also ends with a click outside, but begins within.
  const outside = (event) => !kept && [event.target, pressed.current].every((one) => one === element.current) && onClose();
  const cancel = (event) => (kept ? event.preventDefault() : onClose());
  return html`<dialog ref=${element} class="dialog" aria-labelledby="dialog-title" closedby=${kept ? "none" : undefined} onCancel=${cancel}
    onPointerDown=${(event) => (pressed.current = event.target)} onClick=${outside}>
    <div class="dialog-body"><h2 id="dialog-title">${title}</h2>${children}</div>
  </dialog>`;
}

/** Ask before an action: `children` say what the action does. Shows the refusal if the action fails. */
export function Confirm({ title, action, danger = false, disabled = false, onConfirm, onClose, children }) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const confirm = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      await onConfirm();
      onClose();
    } catch (failure) {
      if (failure.status === undefined) throw failure;
      setError(failure);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <form onSubmit=${confirm}>
      <div class="dialog-text">${children}</div>
      ${error && html`<p class="inline-error" role="alert">${error.message}</p>`}
      <div class="dialog-actions">
        <button type="button" class="button" onClick=${onClose}>Cancel</button>
        <button type="submit" class="button ${danger ? "button-danger" : "button-primary"}" disabled=${busy || disabled} autofocus>${action}</button>
      </div>
    </form>
  <//>`;
}
