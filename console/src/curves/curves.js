/** The curves of a job, beside those of up to seven other jobs. */
import { useEffect, useMemo, useState } from "preact/hooks";
import { Empty, Failure, Loading } from "../components/states.js";
import { count, counted } from "../core/format.js";
import { html } from "../core/html.js";
import { useResource } from "../core/polling.js";
import { go, hrefOf, isJobId } from "../core/router.js";
import { session } from "../core/session.js";
import { titleOf } from "../jobs/actions.js";
import { MAX_COMPARED, Compare } from "./compare.js";
import { MAX_COLORS, byColor, marksOf, repeatedRanges, smooth, splitCurves, toColumns } from "./curve-data.js";
import { useCurves, useList, versionOf } from "../job/data.js";
import { decisionsOf } from "../job/events.js";
import { Plot, lineColor } from "./plot.js";

const WIDTH = 1000;
const MAX_METRICS = 6;
const NO_ITEMS = [];

const chosenOf = (query) => query.metrics?.split(",").filter(Boolean).slice(0, MAX_METRICS) ?? NO_ITEMS;
const rangeIn = (query) => (query.from && query.to ? [Number(query.from), Number(query.to)] : null);

/** Return what the address asks of the API. Node 0 is the node of an elastic job that the API shows by itself. */
export function askedOf(query) {
  const range = rangeIn(query);
  const names = chosenOf(query).join(",") || undefined;
  return { names, width: WIDTH, from_step: range?.[0], to_step: range?.[1], seat: Number(query.node) || undefined };
}

/** Show the curves. The address keeps metrics, range of steps and compared jobs, so that a link shows the same. */
export function Curves({ job, attempts: all, events, query }) {
  const [smoothing, setSmoothing] = useState(0);
  const [log, setLog] = useState(false);
  const chosen = chosenOf(query);
  const wanted = query.with?.split(",").filter(isJobId) ?? NO_ITEMS;
  const others = wanted.slice(0, MAX_COMPARED);
  const range = rangeIn(query);
  const seat = job.nodes ? Number(query.node ?? 0) : undefined;
  const attempts = useMemo(() => all?.filter((one) => (one.seat ?? undefined) === seat) ?? null, [all, seat]);
  const asked = askedOf(query);
  const { data, error } = useCurves(job, asked);
  const change = (changed) => go(hrefOf(`/jobs/${job.id}`, { ...query, ...changed }).slice(1), { replace: true });
  const zoom = (from, to) => change({ from: from === null ? "" : String(from), to: to === null ? "" : String(to) });

  const marks = useMemo(() => marksOf(attempts ?? NO_ITEMS, decisionsOf(events ?? NO_ITEMS)), [attempts, events]);
  const ranges = useMemo(() => repeatedRanges(attempts ?? NO_ITEMS), [attempts]);
  if (error && !data) return html`<${Failure} error=${error} />`;
  if (!data || attempts === null) return html`<${Loading} rows=${5} label="Loading the curves" />`;
  if (data.names.length === 0) {
    return html`<${Empty} icon="jobs" title="No metrics yet"><p>The training reports its metrics with <code>session.report(step, loss=...)</code>. Curves appear with the first report.</p><//>`;
  }
  const shown = chosen.length ? chosen : data.names.slice(0, 1);
  const toggle = (name) => {
    const next = shown.includes(name) ? shown.filter((one) => one !== name) : [...shown, name].slice(-MAX_METRICS);
    if (next.length) change({ metrics: next.join(",") });
  };
  return html`<section class="curves" aria-label="Curves">
    <div class="curve-tools">
      <div class="chips" role="group" aria-label="Metrics">
        ${data.names.map((name) => html`<button key=${name} class="chip" aria-pressed=${shown.includes(name)} onClick=${() => toggle(name)}>${name}</button>`)}
      </div>
      <label class="tool"><span>Smoothing</span>
        <input type="range" min="0" max="0.99" step="0.01" value=${smoothing} onInput=${(event) => setSmoothing(Number(event.target.value))} />
        <output>${smoothing ? smoothing.toFixed(2) : "off"}</output></label>
      <label class="tool"><input type="checkbox" checked=${log} onChange=${(event) => setLog(event.target.checked)} /><span>Log scale</span></label>
      ${job.nodes && html`<label class="tool"><span>Node</span><select value=${String(seat)} onChange=${(event) => change({ node: event.target.value })}>
        ${Array.from({ length: job.nodes.max }, (_, index) => html`<option key=${index} value=${String(index)}>${index}</option>`)}
      </select></label>`}
      ${!session.value.shared && html`<${Compare} job=${job} others=${others} onChange=${(ids) => change({ with: ids.join(",") })} />`}
      ${range && html`<button class="button button-quiet" onClick=${() => zoom(null, null)}>Show all steps</button>`}
    </div>
    ${wanted.length > others.length && html`<p class="soft" role="status">A plot compares ${MAX_COMPARED + 1} jobs at most: ${counted(wanted.length - others.length, "job")} of this address ${wanted.length - others.length === 1 ? "is" : "are"} left out.</p>`}
    ${!data.complete && html`<p class="soft" role="status">The control plane summarizes earlier points; steps up to ${count(data.last_step)} are shown.</p>`}
    ${others.length
      ? html`<${ComparedPlots} job=${job} attempts=${attempts} data=${data} others=${others} asked=${asked} names=${shown} view=${{ smoothing, log, range, zoom }} />`
      : shown.map((name) => html`<${MetricPlot} key=${name} name=${name} job=${job} data=${data} attempts=${attempts} marks=${marks} ranges=${ranges} view=${{ smoothing, log, range, zoom }} />`)}
    ${!others.length && html`<${Key} marks=${marks} ranges=${ranges} />`}
  </section>`;
}

/** Show the curve of one metric of a job. `view`: `{smoothing, log, range, zoom}`. */
export function MetricPlot({ name, job, data, attempts, marks, ranges, view }) {
  const { smoothing, log } = view;
  const built = useMemo(() => {
    const curves = data.curves.filter((curve) => curve.name === name);
    return buildOne(withNewest(curves, name, job), attempts, smoothing, log);
  }, [data, attempts, smoothing, log, job.progress?.step]);
  return html`<${Plot} title=${name} ...${built} marks=${marks} ranges=${ranges} log=${log} range=${view.range ?? rangeOf(data)} onZoom=${view.zoom} />`;
}

/** Return the range of steps of the answer. */
const rangeOf = (data) => (data.first_step === null ? null : [data.first_step, data.last_step]);

/** Add the step of the newest heartbeat, which comes earlier than the stored points. */
function withNewest(curves, name, job) {
  const { step } = job.progress ?? {};
  const value = job.progress?.metrics?.[name];
  const last = curves.filter((curve) => curve.epoch === job.epoch).at(-1);
  if (job.state !== "running" || value === undefined || !last || last.steps.at(-1) >= step) return curves;
  const grown = {
    ...last,
    steps: [...last.steps, step],
    means: [...last.means, value],
    lows: last.lows && [...last.lows, value],
    highs: last.highs && [...last.highs, value],
  };
  return curves.map((curve) => (curve === last ? grown : curve));
}

const fit = (value, log) => (value === null || (log && value <= 0) ? null : value);

function buildOne(curves, attempts, smoothing, log) {
  const { valid, repeated } = splitCurves(curves, attempts);
  const many = new Set(valid.map((point) => point.epoch)).size > 1;
  const colors = many ? MAX_COLORS : 1;
  const main = byColor(smoothing ? smooth(valid, smoothing) : valid, colors);
  const parts = [];
  const bands = [];
  const add = (points, value, line) => parts.push({ points, value: (point) => fit(value(point), log), line });
  for (const points of byColor(repeated, 2, { linked: false })) {
    if (points.length) add(points, (point) => point.mean, { color: "--soft", dash: [3, 3], width: 1.2, alpha: 0.8 });
  }
  if (curves.some((curve) => curve.lows)) {
    add(valid, (point) => point.high, { color: "--accent", hidden: true });
    add(valid, (point) => point.low, { color: "--accent", hidden: true });
    bands.push({ high: parts.length - 1, low: parts.length, color: lineColor(0) });
  } else if (smoothing) {
    add(valid, (point) => point.mean, { color: lineColor(0), width: 1, alpha: 0.25 });
  }
  main.forEach((points, index) => {
    if (!points.length) return;
    const epochs = [...new Set(points.filter((point) => point.mean !== null).map((point) => point.epoch))];
    add(points, (point) => point.mean, { color: lineColor(index), label: many && epochs.length < 3 ? `attempt ${epochs[0]}` : "value" });
  });
  return { columns: toColumns(parts), lines: parts.map((part) => part.line), bands };
}

function ComparedPlots({ job, attempts, data, others, asked, names, view }) {
  const [loaded, setLoaded] = useState({});
  const take = (id, value) => setLoaded((old) => (old[id]?.data === value.data && old[id]?.attempts === value.attempts ? old : { ...old, [id]: value }));
  const all = [{ job, data, attempts }, ...others.map((id) => loaded[id]).filter(Boolean)];
  return html`
    ${others.map((id) => html`<${Loader} key=${id} id=${id} asked=${{ ...asked, names: names.join(","), seat: undefined }} onData=${(value) => take(id, value)} />`)}
    ${names.map((name) => html`<${ComparedPlot} key=${name} name=${name} all=${all} view=${view} />`)}
    <ul class="curve-key">
      ${all.map((one, index) => html`<li key=${one.job.id}><i class="swatch swatch${lineColor(index)}"></i><a href="#/jobs/${one.job.id}">${titleOf(one.job)}</a> <span class="soft">${one.job.id.slice(0, 8)}</span></li>`)}
    </ul>`;
}

/** Follow another job, of an elastic job node 0, and show why the job is not in the plot if it is refused. */
function Loader({ id, asked, onData }) {
  const { data: job, error: unknown } = useResource(`/job/${id}`);
  const { items, error: refused } = useList(`/job/${id}/attempts`, "attempts", versionOf(job));
  const { data, error } = useCurves(job, asked);
  // The nodes number their attempts each alone.
  const attempts = useMemo(() => items?.filter((one) => !one.seat), [items]);
  const refusal = unknown ?? refused ?? error;
  useEffect(() => {
    if (job && data && attempts) onData({ job, data, attempts });
  }, [job, data, attempts]);
  return refusal && html`<p class="inline-error" role="alert">Job ${id.slice(0, 8)} did not load: ${refusal.message} <code>${refusal.code}</code></p>`;
}

function ComparedPlot({ name, all, view }) {
  const built = useMemo(() => {
    const parts = all.map(({ job, data, attempts }, index) => {
      const { valid } = splitCurves(data.curves.filter((curve) => curve.name === name), attempts);
      const points = view.smoothing ? smooth(valid, view.smoothing) : valid;
      const line = { color: lineColor(index), dash: index >= MAX_COLORS ? [6, 3] : undefined, label: titleOf(job) };
      return { points, value: (point) => fit(point.mean, view.log), line };
    });
    return { columns: toColumns(parts), lines: parts.map((part) => part.line) };
  }, [name, view.smoothing, view.log, ...all.flatMap((one) => [one.data, one.attempts])]);
  const ends = all.map((one) => rangeOf(one.data)).filter(Boolean);
  const range = ends.length ? [Math.min(...ends.map(([from]) => from)), Math.max(...ends.map(([, to]) => to))] : null;
  return html`<${Plot} title=${name} ...${built} bands=${NO_ITEMS} marks=${NO_ITEMS} ranges=${NO_ITEMS} log=${view.log} range=${view.range ?? range} onZoom=${view.zoom} />`;
}

const SIGNS = { kill: "✕", failure: "✕", resume: "▸", rule: "▾" };

/** List what the marks say, for readers without a pointer. `rule`: what a mark of a rule is. */
export function Key({ marks, ranges, rule = "rule or command" }) {
  const rules = marks.filter((mark) => mark.kind === "rule").length;
  const losses = marks.filter((mark) => mark.kind === "kill" || mark.kind === "failure").length;
  return html`<ul class="curve-key">
      ${losses > 0 && html`<li><b class="sign sign-kill">✕</b>machine lost or attempt failed</li>`}
      ${marks.some((mark) => mark.kind === "resume") && html`<li><b class="sign sign-resume">▸</b>next attempt goes on</li>`}
      ${ranges.length > 0 && html`<li><i class="swatch swatch-repeated"></i>steps trained again</li>`}
      ${rules > 0 && html`<li><b class="sign sign-rule">▾</b>${rule}</li>`}
      <li class="soft">Drag over steps to zoom, double-click to see all. Keys: arrows read values, + zooms, - shows all.</li>
    </ul>
    ${marks.length > 0 && html`<details class="mark-list">
      <summary>${counted(marks.length, "mark")} in words</summary>
      <ol>${[...marks].sort((a, b) => a.step - b.step).map((mark, index) => html`<li key=${index}><b class="sign sign-${mark.kind}">${SIGNS[mark.kind]}</b><span class="mark-step">${count(mark.step)}</span><span>${mark.text}</span></li>`)}</ol>
    </details>`}`;
}
