import { StackedBar } from "../components/bar.js";
import { bytes, count, duration, percent } from "../core/format.js";
import { html } from "../core/html.js";

const PARTS = [
  ["productive_s", "new steps", "good"],
  ["repeated_s", "repeated steps", "bad"],
  ["transferring_s", "waiting for transfers", "warn"],
  ["stalled_s", "taking checkpoints", "accent"],
  ["idle_s", "starting and ending", "idle"],
];

/** Sum the goodput of all attempts; null without a report. Pure. */
export function totalGoodput(attempts) {
  const found = (attempts ?? []).map((one) => one.progress?.goodput).filter(Boolean);
  if (!found.length) return null;
  return Object.fromEntries(Object.keys(found[0]).map((name) => [name, found.reduce((sum, one) => sum + (one[name] ?? 0), 0)]));
}

/** Show where the time of a job went, and what its checkpoints cost. */
export function Goodput({ attempts }) {
  const total = totalGoodput(attempts);
  if (!total) return null;
  const whole_s = PARTS.reduce((sum, [name]) => sum + total[name], 0);
  if (!whole_s) return null;
  const parts = PARTS.map(([name, label, tone]) => ({ name: label, value: total[name], tone }));
  const told = parts.filter((part) => part.value > 0).map((part) => `${part.name} ${duration(part.value)}`).join(", ");
  return html`<section class="goodput" aria-label="Goodput">
    <h2>Goodput <span class="soft">${percent(total.productive_s / whole_s)} of ${duration(whole_s)} went into new steps</span></h2>
    <${StackedBar} parts=${parts} label="Goodput: ${told}" />
    <ul class="curve-key">
      ${parts.filter((part) => part.value > 0).map((part) => html`<li key=${part.name}><i class="swatch part-${part.tone}"></i>${part.name} <b>${duration(part.value)}</b></li>`)}
    </ul>
    ${total.checkpoints_committed > 0 && html`<p class="soft">${count(total.checkpoints_committed)} checkpoints: ${bytes(total.raw_bytes)} of state, ${bytes(total.uploaded_bytes)} sent.</p>`}
  </section>`;
}
