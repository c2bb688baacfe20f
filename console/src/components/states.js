import { html } from "../core/html.js";
import { Icon } from "./icon.js";

/** Show that nothing is there, why, and what to do. */
export const Empty = ({ icon = "inbox", title, children }) => html`
  <div class="state"><${Icon} name=${icon} /><h2>${title}</h2><div class="state-text">${children}</div></div>
`;

/** Show a refusal with its stable code. `retry`: called by a button, if the reader can try again. */
export const Failure = ({ error, title = "This did not load", retry }) => html`
  <div class="state state-error" role="alert">
    <${Icon} name="alert" /><h2>${title}</h2>
    <div class="state-text"><p>${error.message}</p><p class="code">${error.code}</p></div>
    ${retry && html`<button class="button" onClick=${retry}>Try again</button>`}
  </div>
`;

/** Show the outlines of rows until the first data come. */
export const Loading = ({ rows = 6, label = "Loading" }) => html`
  <div class="loading" role="status" aria-label=${label}>
    ${Array.from({ length: rows }, (_, index) => html`<div class="skeleton" key=${index}><i></i><i></i><i></i></div>`)}
  </div>
`;
