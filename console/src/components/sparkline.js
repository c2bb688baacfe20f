import { html } from "../core/html.js";
import { number } from "../core/format.js";

const WIDTH = 88;
const HEIGHT = 24;
const EDGE = 2;

/** Draw `points` of `[x, y]` as a small curve without axes. */
export function Sparkline({ points, label }) {
  const finite = points.filter(([, y]) => Number.isFinite(y));
  if (finite.length < 2) return html`<span class="sparkline sparkline-none" aria-hidden="true"></span>`;
  const [xs, ys] = [finite.map(([x]) => x), finite.map(([, y]) => y)];
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const x = (value) => EDGE + ((value - left) / (right - left || 1)) * (WIDTH - 2 * EDGE);
  const y = (value) => HEIGHT - EDGE - ((value - low) / (high - low || 1)) * (HEIGHT - 2 * EDGE);
  const line = finite.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
  const last = finite[finite.length - 1];
  return html`<svg class="sparkline" width=${WIDTH} height=${HEIGHT} viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img"
    aria-label="${label}: from ${number(ys[0])} to ${number(last[1])}">
    <polyline points=${line} /><circle cx=${x(last[0])} cy=${y(last[1])} r="1.75" />
  </svg>`;
}
