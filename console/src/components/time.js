import { useEffect, useState } from "preact/hooks";
import { now_s } from "../core/clock.js";
import { age, fullMoment } from "../core/format.js";
import { html } from "../core/html.js";
import { signal } from "../core/signal.js";

const NOW_S = 5;
const tick = signal(0);
setInterval(() => !document.hidden && (tick.value += 1), 1000);

/** Render the component once a second, and return the server's time. */
export function useNow() {
  const [, render] = useState(0);
  useEffect(() => tick.subscribe(render), []);
  return now_s();
}

/** Show how long ago an instant was, with `suffix` such as " ago"; the full time stands in the tooltip. */
export function Age({ at, suffix = "" }) {
  const now = useNow();
  if (!at) return null;
  return html`<time datetime=${new Date(at * 1000).toISOString()} title=${fullMoment(at)}>${now - at < NOW_S ? "just now" : age(now - at) + suffix}</time>`;
}
