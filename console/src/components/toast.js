import { html } from "../core/html.js";
import { signal, useSignal } from "../core/signal.js";
import { Icon } from "./icon.js";

const SHOWN_S = 10;
const toasts = signal([]);
let last = 0;

/** Tell the reader that something happened. `undo`: `{label, run}` for a button that reverts it. */
export function toast(text, { undo, tone = "plain" } = {}) {
  const one = { id: ++last, text, undo, tone };
  toasts.value = [...toasts.value.slice(-2), one];
  setTimeout(() => dismiss(one), SHOWN_S * 1000);
}

function dismiss(gone) {
  toasts.value = toasts.value.filter((one) => one.id !== gone.id);
}

async function revert(one) {
  dismiss(one);
  try {
    await one.undo.run();
  } catch (failure) {
    if (failure.status === undefined) throw failure;
    toast(failure.message, { tone: "error" });
  }
}

/** Show the toasts; once per page. */
export function Toasts() {
  const shown = useSignal(toasts);
  return html`<div class="toasts" role="status" aria-live="polite">
    ${shown.map(
      (one) => html`<div class="toast toast-${one.tone}" key=${one.id}>
        <span class="toast-text">${one.text}</span>
        ${one.undo && html`<button class="button button-quiet" onClick=${() => revert(one)}>${one.undo.label}</button>`}
        <button class="icon-button" aria-label="Dismiss" onClick=${() => dismiss(one)}><${Icon} name="close" /></button>
      </div>`,
    )}
  </div>`;
}
