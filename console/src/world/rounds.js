import { bytes, count, counted, duration } from "../core/format.js";
import { html } from "../core/html.js";

const SHOWN = 32;
const BAR_PX = 48;

/** Show the newest rounds as bars: how long each lasted, and the part that the reduce took. */
export function Rounds({ rounds }) {
  if (!rounds.length) return null;
  const shown = rounds.slice(-SHOWN);
  const longest = Math.max(...shown.map((one) => one.round_s), 1e-9);
  const last = shown.at(-1);
  const repaired = shown.reduce((sum, one) => sum + one.repaired, 0);
  return html`<section aria-label="Rounds"><h2>Rounds <span class="soft">${counted(shown.length, "newest round")}: ${counted(last.contributors, "contributor")}, ${count(last.tokens)} tokens and ${bytes(last.sent_bytes)} sent by a node in the last${repaired ? `; ${counted(repaired, "bucket")} reduced again after a loss` : ""}</span></h2>
    <div class="world-chart"><div style=${{ maxWidth: `${shown.length * BAR_PX}px` }}>
      <div class="world-rounds" role="img" aria-label="Rounds ${count(shown[0].round)} to ${count(last.round)}: the last took ${duration(last.round_s)}, ${duration(last.reduce_s)} of it reduce">
        ${shown.map(
          (one) => html`<span key=${one.round} class="world-round ${one.repaired ? "world-repaired" : ""}" title="Round ${count(one.round)} of epoch ${one.epoch}: ${duration(one.round_s)}, ${duration(one.reduce_s)} of it reduce, ${counted(one.contributors, "contributor")}" style=${{ height: `${Math.max(3, (one.round_s / longest) * 100)}%` }}><i style=${{ height: `${Math.min(100, (one.reduce_s / (one.round_s || 1)) * 100)}%` }}></i></span>`,
        )}
      </div>
      <div class="ring-axis soft"><span>round ${count(shown[0].round)}</span><span>longest ${duration(longest)}</span><span>round ${count(last.round)}</span></div>
    </div></div>
    <ul class="curve-key"><li><i class="swatch world-swatch-train"></i>inner steps</li><li><i class="swatch world-swatch-reduce"></i>reduce</li>${repaired > 0 && html`<li><i class="swatch world-swatch-repaired"></i>with buckets reduced again</li>`}</ul>
  </section>`;
}
