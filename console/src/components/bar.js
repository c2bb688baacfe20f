import { html } from "../core/html.js";
import { percent } from "../core/format.js";

/** Show a share from 0 to 1 as a bar; null: a bar without a known end. */
export function ProgressBar({ share, label, tone = "accent" }) {
  const known = Number.isFinite(share);
  return html`<div
    class="bar bar-${tone} ${known ? "" : "bar-unknown"}"
    role="progressbar"
    aria-label=${label}
    aria-valuemin="0"
    aria-valuemax="100"
    aria-valuenow=${known ? Math.round(share * 100) : undefined}
    aria-valuetext=${known ? percent(share) : "unknown"}
  ><span style=${{ transform: `scaleX(${known ? Math.min(1, share) : 0})` }}></span></div>`;
}

/** Show parts of a whole side by side: `parts` of `{name, value, tone}`. */
export function StackedBar({ parts, label }) {
  const total = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  return html`<div class="stacked" role="img" aria-label=${label}>
    ${parts.filter((part) => part.value > 0).map(
      (part) => html`<span key=${part.name} class="part part-${part.tone}" title=${part.name} style=${{ flexGrow: part.value / total }}></span>`,
    )}
  </div>`;
}
