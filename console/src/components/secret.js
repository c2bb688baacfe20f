import { useState } from "preact/hooks";
import { html } from "../core/html.js";
import { Dialog } from "./dialog.js";
import { Icon } from "./icon.js";

/** Show a secret that no later answer contains, with a button that copies the secret. */
export function SecretDialog({ title, secret, children, onClose }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(secret);
    setCopied(true);
  };
  return html`<${Dialog} title=${title} kept onClose=${onClose}>
    <div class="dialog-text">${children}</div>
    <pre class="command secret"><code>${secret}</code></pre>
    <div class="dialog-actions">
      ${navigator.clipboard && html`<button class="button" onClick=${copy}><${Icon} name=${copied ? "check" : "copy"} />${copied ? "Copied" : "Copy"}</button>`}
      <button class="button button-primary" onClick=${onClose}>I have stored it</button>
    </div>
  <//>`;
}
