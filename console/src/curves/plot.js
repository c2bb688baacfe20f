/** One metric over steps, drawn by uPlot: lines of attempts or jobs, bands, marks, repeated steps. */
import uPlot from "uplot";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { count, number } from "../core/format.js";
import { html } from "../core/html.js";
import { shownColors } from "../layout/theme.js";
import { useSignal } from "../core/signal.js";
import { MAX_COLORS } from "./curve-data.js";

const HEIGHT = 260;
const NEAR_PX = 7;
const SYNC = uPlot.sync("steps");
const MARK_COLORS = { kill: "--bad", failure: "--bad", resume: "--accent", rule: "--warn" };
const FONT = "11px system-ui, sans-serif";

const colorOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
/** Return the name of the style variable with the color of an attempt or job. */
export const lineColor = (index) => `--line-${(index % MAX_COLORS) + 1}`;

/**
 * Show a plot.
 *
 * `lines`: `[{color, dash, width, alpha, label}]` in the order of `columns[1...]`; `bands`: `[{high, low, color}]` with
 * columns of `columns`. `onZoom(from, to)` is called after a drag, and with nulls after a double click. With the focus,
 * the arrow keys move the readout, `+` zooms in at the readout, and `-` shows all steps.
 */
export function Plot({ title, columns, lines, bands, marks, ranges, log, range, onZoom }) {
  const place = useRef(null);
  const plot = useRef(null);
  const told = useRef({});
  const [hover, setHover] = useState(null);
  const colors = useSignal(shownColors);
  const shape = JSON.stringify([lines, bands, log, colors]);
  told.current = { marks, ranges, onZoom, columns, lines };

  useLayoutEffect(() => {
    const made = new uPlot(optionsOf({ lines, bands, log, told, setHover, width: place.current.clientWidth }), columns, place.current);
    plot.current = made;
    const observer = new ResizeObserver(() => made.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    observer.observe(place.current);
    return () => {
      observer.disconnect();
      made.destroy();
    };
  }, [shape]);
  useEffect(() => {
    const made = plot.current;
    made.setData(columns, false);
    const [from, to] = range ?? [columns[0][0] ?? 0, columns[0].at(-1) ?? 1];
    made.setScale("x", { min: from, max: to === from ? from + 1 : to });
    // The marks may have changed while the lines have not.
    made.redraw(false);
  }, [columns, range?.[0], range?.[1], marks, ranges, shape]);

  return html`<figure class="plot">
    <figcaption><strong title=${title}>${title}</strong><${Readout} hover=${hover} columns=${columns} lines=${lines} /></figcaption>
    <div class="plot-place" ref=${place} role="img" tabindex="0" aria-label=${describe(title, columns, lines)} onKeyDown=${(event) => onKey(event, plot.current, onZoom)}></div>
  </figure>`;
}

const MOVES = { ArrowLeft: -1, ArrowRight: 1 };

function onKey(event, made, onZoom) {
  const steps = made.data[0];
  if (event.ctrlKey || event.altKey || event.metaKey || !steps.length) return;
  const { min, max } = made.scales.x;
  const at = made.cursor.idx ?? null;
  if (event.key in MOVES) {
    const [first, last] = made.series[0].idxs;
    const index = at === null ? first : Math.max(first, Math.min(last, at + MOVES[event.key]));
    made.setCursor({ left: made.valToPos(steps[index], "x"), top: 0 }, true, true);
  } else if (event.key === "+") {
    const from = Math.round(Math.max(min, Math.min((min + max) / 2, (at === null ? (min + max) / 2 : steps[at]) - (max - min) / 4)));
    const to = Math.round(from + (max - min) / 2);
    if (to > from) onZoom(Math.max(0, from), to);
  } else if (event.key === "-") {
    onZoom(null, null);
  } else {
    return;
  }
  event.preventDefault();
}

/** Values at the pointer, in a place of its own: nothing moves while the pointer does. */
function Readout({ hover, columns, lines }) {
  const live = hover?.focused ? "polite" : undefined;
  if (!hover) return html`<span class="readout soft">${columns[0].length ? "" : "no points yet"}</span>`;
  if (hover.mark) return html`<span class="readout readout-mark" aria-live=${live}>${hover.mark.text}</span>`;
  const values = lines
    .map((line, index) => ({ ...line, value: nearest(columns, index + 1, hover.index) }))
    .filter((line) => line.label && line.value !== null);
  return html`<span class="readout" aria-live=${live}>
    <span>step ${count(Math.floor(columns[0][hover.index]))}</span>
    ${values.map((line) => html`<span key=${line.label}><i class="swatch swatch${line.color}"></i>${line.label} <b>${number(line.value)}</b></span>`)}
  </span>`;
}

/** Return the value at a place, or the next one to the left within the same line; null outside the line. */
function nearest(columns, column, index) {
  for (let place = index; place >= Math.max(0, index - 50); place -= 1) {
    const value = columns[column][place];
    if (value === null) return null;
    if (value !== undefined) return value;
  }
  return null;
}

function describe(title, columns, lines) {
  const texts = lines
    .map((line, index) => ({ label: line.label, values: columns[index + 1].filter(Number.isFinite) }))
    .filter(({ label, values }) => label && values.length)
    .map(({ label, values }) => `${label}: from ${number(values[0])} to ${number(values.at(-1))}`);
  return `${title} over steps. ${texts.join("; ")}`;
}

function optionsOf({ lines, bands, log, told, setHover, width }) {
  const soft = colorOf("--soft");
  const axis = { stroke: soft, font: FONT, grid: { stroke: colorOf("--line"), width: 1 }, ticks: { show: false } };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    padding: [8, 14, 0, 0],
    scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
    axes: [
      { ...axis, size: 28, values: (_, splits) => splits.map((value) => (Number.isInteger(value) ? short(value) : "")) },
      { ...axis, size: 58, values: (_, splits) => splits.map((value) => (value === null ? "" : number(value))) },
    ],
    series: [{}, ...lines.map((line) => seriesOf(line))],
    bands: bands.map(({ high, low, color }) => ({ series: [high, low], fill: withAlpha(colorOf(color), 0.16) })),
    cursor: {
      sync: { key: SYNC.key, setSeries: false },
      drag: { x: true, y: false, setScale: false },
      points: { size: 6 },
      y: false,
    },
    hooks: {
      drawClear: [(made) => drawRanges(made, told.current.ranges)],
      draw: [(made) => drawMarks(made, told.current.marks)],
      setCursor: [(made) => setHover(hoverOf(made, told.current.marks))],
      setSelect: [
        (made) => {
          if (made.select.width < 4) return;
          const [from, to] = [made.select.left, made.select.left + made.select.width].map((x) => Math.round(made.posToVal(x, "x")));
          made.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          if (to > from) told.current.onZoom(Math.max(0, from), to);
        },
      ],
      ready: [(made) => made.over.addEventListener("dblclick", () => told.current.onZoom(null, null))],
    },
  };
}

function seriesOf({ color, dash, width = 1.6, alpha = 1, hidden = false }) {
  return {
    stroke: hidden ? "transparent" : withAlpha(colorOf(color), alpha),
    width,
    dash,
    points: { show: (made, index, from, to) => !hidden && to - from < 3, size: 4 },
    scale: "y",
  };
}

function withAlpha(color, alpha) {
  return alpha === 1 ? color : `color-mix(in srgb, ${color} ${Math.round(alpha * 100)}%, transparent)`;
}

function short(value) {
  if (value >= 1e6) return `${number(value / 1e6)}M`;
  return value >= 1e4 ? `${number(value / 1e3)}k` : count(value);
}

function drawRanges(made, ranges) {
  const { ctx, bbox } = made;
  ctx.save();
  ctx.fillStyle = withAlpha(colorOf("--bad"), 0.09);
  for (const { from, to } of ranges) {
    const [left, right] = [from, to].map((step) => Math.max(bbox.left, Math.min(bbox.left + bbox.width, made.valToPos(step, "x", true))));
    if (right > left) ctx.fillRect(left, bbox.top, right - left, bbox.height);
  }
  ctx.restore();
}

function drawMarks(made, marks) {
  const { ctx, bbox } = made;
  const size = 4 * devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left - size, bbox.top - size, bbox.width + 2 * size, bbox.height + 2 * size);
  ctx.clip();
  for (const mark of marks) {
    const x = Math.round(made.valToPos(mark.step, "x", true));
    if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
    ctx.strokeStyle = ctx.fillStyle = colorOf(MARK_COLORS[mark.kind]);
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash(mark.kind === "resume" ? [3 * devicePixelRatio, 3 * devicePixelRatio] : []);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.setLineDash([]);
    drawSign(ctx, mark.kind, x, bbox.top + size, size);
  }
  ctx.restore();
}

/** Draw a cross for a loss, a triangle for a rule, an arrow to the right for a resume. */
function drawSign(ctx, kind, x, y, size) {
  ctx.beginPath();
  if (kind === "rule") {
    ctx.moveTo(x - size, y - size);
    ctx.lineTo(x + size, y - size);
    ctx.lineTo(x, y + size);
    ctx.fill();
  } else if (kind === "resume") {
    ctx.moveTo(x, y - size);
    ctx.lineTo(x + 1.6 * size, y);
    ctx.lineTo(x, y + size);
    ctx.fill();
  } else {
    ctx.lineWidth = 2 * devicePixelRatio;
    ctx.moveTo(x - size, y - size);
    ctx.lineTo(x + size, y + size);
    ctx.moveTo(x + size, y - size);
    ctx.lineTo(x - size, y + size);
    ctx.stroke();
  }
}

function hoverOf(made, marks) {
  const { left, idx } = made.cursor;
  if (idx === null || idx === undefined || left < 0) return null;
  const distance = (mark) => Math.abs(made.valToPos(mark.step, "x") - left);
  const mark = marks.reduce((best, one) => (distance(one) < (best ? distance(best) : NEAR_PX) ? one : best), null);
  return { index: idx, mark, focused: made.root.parentElement === document.activeElement };
}
