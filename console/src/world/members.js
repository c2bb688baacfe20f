import { useState } from "preact/hooks";
import { Age } from "../components/time.js";
import { count, moment } from "../core/format.js";
import { html } from "../core/html.js";
import { changeOf, epochsOf } from "./world-data.js";

const WIDTH = 1000;
const HEIGHT = 90;
const SHOWN = 8;

/** Show the number of members over time, and each change with its reason. */
export function Members({ events, world, job, now }) {
  const [all, showAll] = useState(false);
  const epochs = epochsOf(events);
  if (!epochs.length) return null;
  const end = job.completed_at ?? job.failed_at ?? job.canceled_at ?? now;
  const from = epochs[0].at;
  const x = (at) => (Math.min(at, end) - from) / Math.max(1, end - from);
  const y = (members) => 1 - members / world.max;
  const line = epochs.flatMap((one, index) => [
    [x(one.at), y(one.members.length)],
    [x(epochs[index + 1]?.at ?? end), y(one.members.length)],
  ]);
  const points = line.map(([left, top]) => `${(left * WIDTH).toFixed(1)},${(top * HEIGHT).toFixed(1)}`).join(" ");
  const newest = [...epochs].reverse();
  return html`<section aria-label="Members"><h2>Members over time <span class="soft">${count(epochs.length)} ${epochs.length === 1 ? "change" : "changes"}; ${count(world.min)} to begin, at most ${count(world.max)}</span></h2>
    <div class="world-chart">
      <div class="world-members" role="img" aria-label="Members from ${count(epochs[0].members.length)} to ${count(epochs.at(-1).members.length)}, at most ${world.max}">
        <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" aria-hidden="true">
          <line class="world-least" x1="0" x2=${WIDTH} y1=${y(world.min) * HEIGHT} y2=${y(world.min) * HEIGHT} />
          <polygon points="0,${HEIGHT} ${points} ${WIDTH},${HEIGHT}" /><polyline points=${points} />
        </svg>
        ${epochs.filter((one) => one.lost.length).map((one) => html`<i key=${one.epoch} class="world-loss" title=${changeOf(one)} style=${{ left: `${x(one.at) * 100}%`, top: `${y(one.members.length) * 100}%` }}></i>`)}
      </div>
      <div class="ring-axis soft"><span>${moment(from)}</span><span>${moment(end)}</span></div>
    </div>
    <ol class="timeline">${newest.slice(0, all ? undefined : SHOWN).map(
      (one) => html`<li key=${`${one.epoch} ${one.lost.length}`} class="tone-${one.lost.length ? "bad" : "good"}">
        <span class="timeline-at"><span>${moment(one.at)}</span><small><${Age} at=${one.at} suffix=" ago" /></small></span><span class="timeline-dot" aria-hidden="true"></span>
        <span class="timeline-text">${changeOf(one)}<small>epoch ${count(one.epoch)}</small></span></li>`,
    )}</ol>
    ${newest.length > SHOWN && !all && html`<button class="button" onClick=${() => showAll(true)}>Show ${newest.length - SHOWN} earlier changes</button>`}
  </section>`;
}
