import { useMemo, useState } from "preact/hooks";
import { Loading } from "../components/states.js";
import { Age } from "../components/time.js";
import { moment } from "../core/format.js";
import { html } from "../core/html.js";
import { kindOf, sentenceOf, toneOf } from "./events.js";

const SHOWN = 300;

/** Show the history of a job, one line for each event, the newest first. */
export function Timeline({ events }) {
  const [kind, setKind] = useState("");
  const [shown, setShown] = useState(SHOWN);
  const kinds = useMemo(() => [...new Set((events ?? []).map(kindOf))].sort(), [events]);
  const lines = useMemo(() => (events ?? []).filter((event) => !kind || kindOf(event) === kind).reverse(), [events, kind]);
  if (events === null) return html`<${Loading} rows=${6} label="Loading the timeline" />`;
  return html`<section aria-label="Timeline">
    <div class="chips" role="group" aria-label="Subject">
      <button class="chip" aria-pressed=${kind === ""} onClick=${() => setKind("")}>all</button>
      ${kinds.map((one) => html`<button key=${one} class="chip" aria-pressed=${kind === one} onClick=${() => setKind(one)}>${one}</button>`)}
    </div>
    <ol class="timeline">
      ${lines.slice(0, shown).map(
        (event) => html`<li key=${event.seq} class="tone-${toneOf(event)}">
          <span class="timeline-at"><span>${moment(event.at)}</span><small><${Age} at=${event.at} suffix=" ago" /></small></span>
          <span class="timeline-dot" aria-hidden="true"></span>
          <span class="timeline-text">${sentenceOf(event)}<small>${event.type}${event.data.step ? ` · step ${event.data.step.toLocaleString("en-US")}` : ""}</small></span>
        </li>`,
      )}
    </ol>
    ${lines.length > shown && html`<button class="button" onClick=${() => setShown(shown + SHOWN)}>Show ${Math.min(SHOWN, lines.length - shown)} earlier events</button>`}
  </section>`;
}
