import { useMemo, useState } from "preact/hooks";
import { Loading } from "../components/states.js";
import { Age } from "../components/time.js";
import { count, moment, usd } from "../core/format.js";
import { html } from "../core/html.js";
import { costOf } from "../jobs/attempts.js";
import { kindOf, sentenceOf, toneOf } from "./events.js";

const SHOWN = 300;
const ATTEMPT_ENDS = new Set(["attempt.failed", "attempt.interrupted", "attempt.released"]);
const JOB_ENDS = new Set(["job.completed", "job.failed", "job.canceled"]);

/** Return the provider and the price at the begin of an attempt, its cost at its end, and the cost of the job at the job's end. */
function moneyOf({ type, epoch, data, at }, attempts) {
  const own = attempts.find((one) => (one.seat ?? undefined) === data.seat && one.epoch === (data.attempt ?? epoch));
  if (type === "job.started") {
    const price = own?.price_usd_per_hour ?? null;
    const words = [own?.provider, price === null ? "" : `${usd(price)} per hour`].filter(Boolean).join(", ");
    return words && ` Machine: ${words}.`;
  }
  const cost = ATTEMPT_ENDS.has(type) && own ? costOf([own], at) : JOB_ENDS.has(type) ? costOf(attempts.filter((one) => one.started_at <= at), at) : null;
  return cost === null ? "" : ` Cost of the ${JOB_ENDS.has(type) ? "job" : "attempt"}: ${usd(cost)}.`;
}

/** Show the history of a job, one line for each event, the newest first. `more`: the job has later events, which are not read. */
export function Timeline({ job, events, more, attempts }) {
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
    ${more && html`<p class="soft" role="status">The first ${count(events.length)} events are shown; <code>baton events ${job.id}</code> prints all of them.</p>`}
    <ol class="timeline">
      ${lines.slice(0, shown).map(
        (event) => html`<li key=${event.seq} class="tone-${toneOf(event)}">
          <span class="timeline-at"><span>${moment(event.at)}</span><small><${Age} at=${event.at} suffix=" ago" /></small></span>
          <span class="timeline-dot" aria-hidden="true"></span>
          <span class="timeline-text">${sentenceOf(event)}${moneyOf(event, attempts ?? [])}<small>${event.type}${event.data.step ? ` · step ${event.data.step.toLocaleString("en-US")}` : ""}</small></span>
        </li>`,
      )}
    </ol>
    ${lines.length > shown && html`<button class="button" onClick=${() => setShown(shown + SHOWN)}>Show ${Math.min(SHOWN, lines.length - shown)} earlier events</button>`}
  </section>`;
}
