/** All fleets of the tenant: machines, money, and why no further machine is rented. */
import { StackedBar } from "../components/bar.js";
import { Grid } from "../components/grid.js";
import { Empty, Failure, Loading } from "../components/states.js";
import { counted, usd } from "../core/format.js";
import { html } from "../core/html.js";
import { useResource } from "../core/polling.js";
import { hrefOf } from "../core/router.js";
import { may, session } from "../core/session.js";
import { leftOf, tightest, usdPerHour } from "./budget.js";
import { Doctor } from "./doctor.js";
import { FleetBadge, machineWords, Serves } from "./fleet.js";
import { boundName, countsOf, GROUPS, why } from "./words.js";

/** Tenant whose admins manage what all tenants share, such as the accounts at providers. */
const OPERATOR = "default";

/** List the fleets; the tab `doctor` is for admins of the deployment. */
export function Fleets({ query }) {
  const operator = may("admin") && session.value.tenant === OPERATOR;
  const doctor = operator && query.tab === "doctor";
  const { data, error, loading, refresh } = useResource(doctor ? null : "/fleets");
  const fleets = data?.fleets ?? [];
  const tabs = [["", "Fleets"], ["doctor", "Doctor"]];
  return html`<div class="page">
    <div class="page-head"><h1>Fleets</h1></div>
    ${operator && html`<nav class="tabs job-tabs" aria-label="Parts of the fleets">${tabs.map(([part, label]) => html`<a key=${part} class="tab" href=${hrefOf("/fleets", { tab: part })} aria-current=${(query.tab ?? "") === part ? "page" : undefined}>${label}</a>`)}</nav>`}
    ${doctor ? html`<${Doctor} />` : html`
      ${error && !data && html`<${Failure} error=${error} retry=${refresh} />`}
      ${loading && html`<${Loading} rows=${4} label="Loading fleets" />`}
      ${data?.damaged.map((line) => html`<p key=${line} class="warn-text">${line}</p>`)}
      ${data && fleets.length === 0 && data.damaged.length === 0 && html`<${NoFleets} />`}
      ${fleets.length > 0 && html`<${Totals} fleets=${fleets} /><section class="card fleet-card fleet-list"><${Grid} label="Fleets" columns=${COLUMNS} items=${fleets} keyOf=${(one) => one.spec.name} /></section>`}
    `}
  </div>`;
}

function Totals({ fleets }) {
  const machines = fleets.flatMap((one) => one.machines);
  const shared = fleets[0].bounds.filter((one) => one.scope === "deployment");
  const spent = fleets.reduce((sum, one) => sum + one.spent_usd, 0);
  return html`<dl class="facts fleet-facts">
    <div class="fact"><dt>Machines</dt><dd><b>${machines.length}</b><span class="soft fact-line">${machineWords(machines) || "none now"}</span></dd></div>
    <div class="fact"><dt>Price now</dt><dd><b>${usd(usdPerHour(machines))}</b><span class="soft">/h</span></dd></div>
    <div class="fact"><dt>Spent</dt><dd><b>${usd(spent)}</b><span class="soft fact-line">by ${counted(fleets.length, "fleet")} so far</span></dd></div>
    ${shared.map((bound) => html`<div class="fact" key=${bound.name}><dt>${boundName(bound)}</dt><dd><b>${usd(bound.spent_usd)}</b><span class="soft">of ${usd(bound.cap_usd)}</span><span class="fact-line"><${BoundBar} bound=${bound} /></span></dd></div>`)}
  </dl>`;
}

/** Show a bound as a bar of spent, reserved and left. */
function BoundBar({ bound }) {
  const { spent_usd, reserved_usd, cap_usd } = bound;
  const parts = [
    { name: "spent", value: spent_usd, tone: "accent" },
    { name: "reserved", value: reserved_usd, tone: "reserved" },
    { name: "left", value: leftOf(bound), tone: "left" },
  ];
  return html`<${StackedBar} parts=${parts} label="${boundName(bound)}: ${usd(spent_usd)} spent, ${usd(reserved_usd)} reserved of ${usd(cap_usd)}" />`;
}

const COLUMNS = [
  {
    name: "fleet",
    label: "Fleet",
    cell: (one) => html`<a class="fleet-name" href="#/fleets/${one.spec.name}">${one.spec.name}</a><div class="job-sub"><${Serves} fleet=${one} /></div>`,
  },
  { name: "state", label: "State", cell: (one) => html`<${FleetBadge} fleet=${one} />` },
  { name: "machines", label: "Machines", cell: (one) => html`<${MachineBar} fleet=${one} />` },
  { name: "price", label: "Price now", right: true, cell: (one) => html`${usd(usdPerHour(one.machines))}<span class="soft">/h</span>` },
  { name: "budget", label: "Budget", cell: (one) => html`<${Tightest} fleet=${one} />` },
  { name: "why", label: "Why no further machine", cell: (one) => html`<span class=${one.waits && !one.stopped ? "warn-text" : "soft"}>${why(one)}</span>` },
];

function MachineBar({ fleet }) {
  const { machines, spec } = fleet;
  const counts = countsOf(machines);
  const parts = [
    ...GROUPS.map(([group, word]) => ({ name: `${counts[group]} ${word}`, value: counts[group], tone: group })),
    { name: "not rented", value: Math.max(0, spec.max - machines.length), tone: "left" },
  ];
  return html`<div class="fleet-cell"><${StackedBar} parts=${parts} label="${machines.length} of ${spec.max} machines" /><span class="soft">${machines.length} of ${spec.max}${machines.length ? `: ${machineWords(machines)}` : ""}</span></div>`;
}

function Tightest({ fleet }) {
  const bound = tightest(fleet.bounds);
  return html`<div class="fleet-cell"><${BoundBar} bound=${bound} /><span class="soft">${usd(bound.spent_usd)} of ${usd(bound.cap_usd)} ${boundName(bound).toLowerCase()}</span></div>`;
}

const DOCUMENT = `name: nights
providers: [loopback]
max: 2
max_usd_per_hour: 0.50
disk_gib: 1
budget:
  total_usd: 20`;

function NoFleets() {
  return html`<div class="card"><${Empty} icon="fleet" title="No fleets yet">
    <p>A fleet permits renting machines for waiting jobs, within a budget; nothing is rented without one. A job can rent a machine of its own:</p>
    <pre class="command"><code>baton submit job.yaml --rent \\${"\n"}  --budget 2 --provider loopback</code></pre>
    <p>For many jobs, write <code>nights.yaml</code>, see what it would rent and cost, and store it:</p>
    <pre class="command"><code>${DOCUMENT}</code></pre>
    <pre class="command"><code>baton fleet plan nights.yaml${"\n"}baton fleet apply nights.yaml</code></pre>
  <//></div>`;
}
