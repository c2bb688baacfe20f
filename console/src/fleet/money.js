/** The money of a fleet: each bound of its budget as a bar of spent, reserved, expected and left. */
import { StackedBar } from "../components/bar.js";
import { duration, usd } from "../core/format.js";
import { html } from "../core/html.js";
import { forecast, leftOf, usdPerHour } from "./budget.js";
import { boundName } from "./words.js";

/** Show all bounds. `now`: time of the fleets' clock. */
export function Money({ fleet, now }) {
  const price = fleet.stopped ? 0 : usdPerHour(fleet.machines);
  return html`<section class="card fleet-card" aria-label="Money">
    <h2 class="card-head">Budget</h2>
    ${fleet.bounds.map((bound) => html`<${BoundLine} key=${`${bound.scope} ${bound.name}`} bound=${bound} price=${price} now=${now} />`)}
    <p class="fleet-key soft"><span><i class="key-spent"></i>spent</span><span><i class="key-reserved"></i>reserved for the machines' next hour</span><span><i class="key-expected"></i>expected until the end of the period</span></p>
  </section>`;
}

function BoundLine({ bound, price, now }) {
  // The prices of the other fleets of the deployment are not known here.
  const { expected_usd, lasts_s } = forecast(bound, bound.scope === "fleet" ? price : 0, now);
  const { cap_usd, spent_usd, reserved_usd } = bound;
  const taken = Math.min(cap_usd, spent_usd + reserved_usd);
  const more = Math.max(0, (expected_usd ?? 0) - taken);
  const words = [
    `${usd(spent_usd)} spent`,
    `${usd(reserved_usd)} reserved`,
    expected_usd !== null && `~${usd(expected_usd)} expected`,
    `${usd(leftOf(bound))} left`,
  ].filter(Boolean);
  const parts = [
    { name: "spent", value: Math.min(cap_usd, spent_usd), tone: "accent" },
    { name: "reserved", value: taken - Math.min(cap_usd, spent_usd), tone: "reserved" },
    { name: "expected", value: more, tone: "expected" },
    { name: "left", value: cap_usd - taken - more, tone: "left" },
  ];
  return html`<div class="bound">
    <div class="bound-head"><strong>${boundName(bound)}</strong><span class="soft">${bound.period && `${bound.period}, UTC`}</span><b>${usd(cap_usd)}</b></div>
    <${StackedBar} parts=${parts} label="${boundName(bound)}: ${words.join(", ")} of ${usd(cap_usd)}" />
    <p class="bound-words">${words.join(" · ")}${lasts_s !== null && html`<span class="soft"> · ${bound.period ? "used up" : "lasts"} ${bound.period ? "in" : "for"} ${duration(lasts_s)} at the present price</span>`}</p>
  </div>`;
}
