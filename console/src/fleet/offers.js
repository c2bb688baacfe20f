/** What the fleet would rent now: the offers that it considers, and why each is taken or not. */
import { Tag } from "../components/badge.js";
import { Grid } from "../components/grid.js";
import { Empty, Failure, Loading } from "../components/states.js";
import { post } from "../core/api.js";
import { count, counted, duration, moment, number, usd } from "../core/format.js";
import { html } from "../core/html.js";
import { useReading } from "./data.js";

/** Show the plan of the fleet's document. The call asks the providers; nothing is stored or rented. */
export function Offers({ fleet, version }) {
  const { spec } = fleet;
  const { data: plan, error, reading, again } = useReading(() => post(`/fleets/${spec.name}/plan`, { fleet: spec }), version);
  if (error) return html`<${Failure} error=${error} title="The providers' offers did not load" retry=${again} />`;
  if (!plan) return html`<${Loading} rows=${6} label="Asking the providers" />`;
  const starts = counted(plan.start, "further machine");
  return html`<section class="fleet-part" aria-label="Offers">
    <div class="card-head-line">
      <p class="grow"><strong>${fleet.stopped ? `The fleet is stopped; else ${starts} would start now.` : `${starts} would start now.`}</strong> Why not more: ${plan.why}.</p>
      <button class="button button-small" disabled=${reading} onClick=${again}>${reading ? "Asking …" : "Ask again"}</button>
    </div>
    <dl class="facts fleet-facts">${factsOf(plan).map(([name, value, more]) => html`<div class="fact" key=${name}><dt>${name}</dt><dd><b>${value}</b>${more && html`<span class="soft">${more}</span>`}</dd></div>`)}</dl>
    <div class="card fleet-card"><h2 class="card-head">Offers <span class="soft">asked ${moment(plan.at)}</span></h2>
      ${plan.offers.length ? html`<${Grid} label="Offers" columns=${columnsOf(plan)} items=${[...plan.offers.entries()]} keyOf=${([index]) => index} />` : html`<${Empty} title="No offers" />`}
      ${plan.omitted > 0 && html`<p class="card-foot soft">and ${count(plan.omitted)} more</p>`}
    </div>
    ${plan.unservable.length > 0 && html`<${Reasons} title="Jobs that this fleet cannot run" rows=${plan.unservable.map((one) => [html`<a class="code" href="#/jobs/${one.job}">${one.job.slice(0, 8)}</a>`, one.reason])} />`}
    ${plan.silent.length > 0 && html`<${Reasons} title="Providers without an answer" rows=${plan.silent.map((one) => [one.provider, one.reason])} />`}
  </section>`;
}

function* facts(plan) {
  const assumed = plan.works.filter((one) => one.hours_from === "assumed").length;
  yield ["Waiting jobs", count(plan.works.length), plan.unservable.length ? `and ${count(plan.unservable.length)} that cannot run here` : "can run here"];
  yield ["Left in the budget", usd(plan.room_usd), plan.paid_hours === null ? "" : `${number(plan.paid_hours)} h of the first offer`];
  if (!plan.usd) return;
  yield ["Expected cost", usd(plan.usd.expected), `${usd(plan.usd.low)} to ${usd(plan.usd.high)}${assumed ? "; an hour is assumed per job" : ""}`];
  yield ["Finished in", duration(plan.hours.expected * 3600), `${duration(plan.hours.low * 3600)} to ${duration(plan.hours.high * 3600)}`];
}

const factsOf = (plan) => [...facts(plan)];

const columnsOf = (plan) => [
  { name: "offer", label: "Offer", cell: ([, one]) => html`<strong>${hardware(one)}</strong><div class="soft">${place(one)}</div>` },
  { name: "price", label: "Price", right: true, cell: ([, one]) => `${usd(one.usd_per_hour)}/h` },
  { name: "total", label: "Expected total", right: true, cell: ([, one]) => html`<span title=${causes(one.expected)}>${usd(one.expected.total)}</span><div class="soft">boots ${duration(one.boot_s)}</div>` },
  { name: "verdict", label: "Decision", cell: ([, one]) => html`<${Verdict} offer=${one} why=${plan.why} />` },
];

function Verdict({ offer, why }) {
  if (offer.taken) return html`<${Tag} tone="accent">taken${offer.taken > 1 ? ` × ${offer.taken}` : ""}<//>`;
  if (offer.rejected) return html`<span class="verdict"><${Tag} tone="bad">not taken<//> ${offer.rejected}</span>`;
  return html`<span class="verdict"><${Tag} tone="good">fits<//> <span class="soft">not taken: ${why}</span></span>`;
}

const hardware = ({ gpus, gpu_model, vram_gib }) => (gpu_model ? `${gpus > 1 ? `${gpus} × ` : ""}${gpu_model}, ${number(vram_gib)} GiB` : "no GPU");
const place = ({ provider, spot, regions, disk_gib, interruptions_per_hour }) =>
  [provider, spot ? "spot" : "on demand", ...regions, `${count(Math.round(disk_gib))} GiB disk`, interruptions_per_hour > 0 && `lost every ${duration(3600 / interruptions_per_hour)}`].filter(Boolean).join(" · ");
const causes = ({ machine, boot, lost, traffic }) => `work ${usd(machine)}, boot ${usd(boot)}, lost work ${usd(lost)}, traffic ${usd(traffic)}`;

const Reasons = ({ title, rows }) => html`<div class="card fleet-card"><h2 class="card-head">${title}</h2>
  <dl class="reasons">${rows.map(([name, reason], index) => html`<div key=${index}><dt>${name}</dt><dd>${reason}</dd></div>`)}</dl>
</div>`;
