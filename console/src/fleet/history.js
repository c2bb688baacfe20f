/** The newest events of a fleet, one line each. */
import { useState } from "preact/hooks";
import { Empty, Failure, Loading } from "../components/states.js";
import { get } from "../core/api.js";
import { fullMoment, moment, usd } from "../core/format.js";
import { html } from "../core/html.js";
import { useReading } from "./data.js";
import { sentenceOf, toneOf } from "./words.js";

const FIRST = 100;
const LAST = 1000;

/** Show the events, the newest first. */
export function Events({ fleet, version }) {
  const [limit, setLimit] = useState(FIRST);
  const { data, error, again } = useReading(() => get(`/fleets/${fleet.spec.name}/events`, { limit }), `${version} ${limit}`);
  if (error) return html`<${Failure} error=${error} retry=${again} />`;
  if (!data) return html`<${Loading} rows=${6} label="Loading events" />`;
  if (!data.events.length) return html`<${Empty} title="No events yet" />`;
  return html`<section class="fleet-part" aria-label="Events">
    <ol class="timeline">
      ${data.events.map((event, index) => html`<li key=${index} class="tone-${toneOf(event)}">
        <span class="timeline-at" title=${fullMoment(event.at)}><span>${moment(event.at)}</span></span>
        <span class="timeline-dot" aria-hidden="true"></span>
        <span class="timeline-text">${sentenceOf(event)}<small>${[event.machine, event.usd ? `${usd(event.usd)} so far` : "", event.type].filter(Boolean).join(" · ")}</small></span>
      </li>`)}
    </ol>
    ${data.events.length === limit && limit < LAST && html`<button class="button" onClick=${() => setLimit(LAST)}>Show earlier events</button>`}
  </section>`;
}
