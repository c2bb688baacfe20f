import { html } from "../core/html.js";

const WORDS = { pending: "Waiting", running: "Running", paused: "Paused", complete: "Complete", failed: "Failed", canceled: "Stopped" };

/** Show a job's state as a dot and a word. `detail` stands in the tooltip. */
export const StateBadge = ({ state, detail }) => html`
  <span class="badge badge-${state}" title=${detail}><span class="dot" aria-hidden="true"></span>${WORDS[state] ?? state}</span>
`;

/** Show a short word in a frame. */
export const Tag = ({ children, tone = "plain" }) => html`<span class="tag tag-${tone}">${children}</span>`;
