import { html } from "../core/html.js";
import { moment } from "../core/format.js";
import { perSecond, ratesOf } from "./ring-data.js";

const WIDTH = 1000;
const HEIGHT = 120;

/** Draw the samples per second that were put and read, since the page was opened. */
export function RateChart({ samples }) {
  const [put, read] = ["inserted", "read"].map((name) => ratesOf(samples, name));
  if (put.length < 2) return html`<p class="soft ring-chart-none">The curve begins with the third answer, in some seconds.</p>`;
  const most = Math.max(1e-9, ...put.map(([, rate]) => rate), ...read.map(([, rate]) => rate));
  const [first, last] = [put[0][0], put.at(-1)[0]];
  const line = (points) =>
    points.map(([at, rate]) => `${(((at - first) / (last - first || 1)) * WIDTH).toFixed(1)},${(HEIGHT - (rate / most) * (HEIGHT - 4) - 2).toFixed(1)}`).join(" ");
  const words = (name, points) => `${name} ${perSecond(points.at(-1)[1])}`;
  return html`<figure class="plot ring-chart">
    <figcaption><ul class="curve-key"><li><i class="swatch swatch--line-1"></i>${words("put", put)}</li><li><i class="swatch swatch--line-2"></i>${words("read", read)}</li></ul><span class="soft">most ${perSecond(most)}</span></figcaption>
    <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label="Samples per second: ${words("put", put)}, ${words("read", read)}">
      <polyline class="rate-put" points=${line(put)} /><polyline class="rate-read" points=${line(read)} />
    </svg>
    <div class="ring-axis soft"><span>${moment(first)}</span><span>${moment(last)}</span></div>
  </figure>`;
}
