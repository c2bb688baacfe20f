/** Machines by what they do over time, as stacked steps. */
import { useState } from "preact/hooks";
import { Failure, Loading } from "../components/states.js";
import { get } from "../core/api.js";
import { counted, moment, number, percent } from "../core/format.js";
import { html } from "../core/html.js";
import { useReading } from "./data.js";
import { GROUPS } from "./words.js";

const POINTS = 160;
const REREAD_S = 300;
const HEIGHT = 100;
const SPANS = [
  ["6 h", 6],
  ["24 h", 24],
  ["7 d", 168],
  ["30 d", 720],
];

/** Show the machines of the last hours. `version`: of the fleet; `now`: time of the fleets' clock. */
export function MachineChart({ fleet, version, now }) {
  const [hours, setHours] = useState(24);
  const path = `/fleets/${fleet.spec.name}/history`;
  const { data, error, again } = useReading(() => get(path, { hours, points: POINTS }), `${version} ${hours} ${Math.floor(now / REREAD_S)}`);
  return html`<section class="card fleet-card" aria-label="Machines over time">
    <div class="card-head card-head-line"><h2 class="grow">Machines over time</h2>
      <div class="chips" role="group" aria-label="Time">${SPANS.map(([label, value]) => html`<button key=${value} class="chip" aria-pressed=${hours === value} onClick=${() => setHours(value)}>${label}</button>`)}</div>
    </div>
    ${error ? html`<${Failure} error=${error} retry=${again} />` : data ? html`<${Steps} history=${data} />` : html`<${Loading} rows=${3} label="Loading the history" />`}
  </section>`;
}

function Steps({ history }) {
  const [at, setAt] = useState(null);
  const spans = history.busy.length;
  const span_s = (history.until - history.since) / spans;
  const hoursOf = (group) => (history[group].reduce((sum, value) => sum + value, 0) * span_s) / 3600;
  const rented = GROUPS.reduce((sum, [group]) => sum + hoursOf(group), 0);
  const tops = stack(history);
  const top = Math.max(1, Math.ceil(Math.max(...tops.at(-1).map((value) => value - 1e-6))));
  const point = (event) => {
    const { left, width } = event.currentTarget.getBoundingClientRect();
    setAt(Math.max(0, Math.min(spans - 1, Math.floor(((event.clientX - left) / width) * spans))));
  };
  const words = GROUPS.map(([group, word]) => `${number(hoursOf(group)) || 0} machine-hours ${word}`).join(", ");
  return html`<div class="steps">
    <div class="steps-axis soft" aria-hidden="true"><span>${top}</span><span>0</span></div>
    <div class="steps-place" onPointerMove=${point} onPointerLeave=${() => setAt(null)}>
      <svg viewBox="0 0 ${spans} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label="From ${moment(history.since)} to ${moment(history.until)}: ${words}">
        ${GROUPS.map(([group], index) => html`<path key=${group} class="steps-${group}" d=${outline(tops[index], tops[index + 1], top)} />`)}
        ${at !== null && html`<rect class="steps-cursor" x=${at} y="0" width="1" height=${HEIGHT} />`}
      </svg>
    </div>
    <div class="steps-times soft" aria-hidden="true"><span>${moment(history.since)}</span><span>${moment((history.since + history.until) / 2)}</span><span>${moment(history.until)}</span></div>
    <p class="fleet-key">
      ${GROUPS.map(([group, word]) => html`<span key=${group}><i class="key-${group}"></i>${word} <b>${at === null ? hoursText(hoursOf(group)) : averageText(history[group][at])}</b></span>`)}
      <span class="soft">${at !== null
        ? `${moment(history.since + at * span_s)} to ${moment(history.since + (at + 1) * span_s)}, machines on average`
        : rented ? `${percent(hoursOf("busy") / rented)} of ${hoursText(rented)} rented had a job` : "no machine in this time"}</span>
    </p>
  </div>`;
}

const averageText = (value) => (value > 0 && value < 0.1 ? "<0.1" : String(Number(value.toFixed(1))));
const hoursText = (hours) => (hours > 0 && hours < 0.1 ? counted(Math.max(1, Math.round(hours * 60)), "min", "min") : `${hours.toFixed(hours < 10 ? 1 : 0)} h`);

/** Return the heights of the lines between the groups, from the lowest line. */
function stack(history) {
  const lines = [history.busy.map(() => 0)];
  for (const [group] of GROUPS) lines.push(lines.at(-1).map((value, index) => value + history[group][index]));
  return lines;
}

/** Return the path of the area between two lines of steps. */
function outline(low, high, top) {
  const y = (value) => (HEIGHT * (1 - value / top)).toFixed(2);
  const there = high.map((value, index) => `L${index} ${y(value)}H${index + 1}`).join("");
  const back = low.map((_, index) => low.length - 1 - index).map((index) => `L${index + 1} ${y(low[index])}H${index}`).join("");
  return `M0 ${y(low[0])}${there}${back}Z`;
}
