/** The page of one fleet. */
import { useState } from "preact/hooks";
import { Tag } from "../components/badge.js";
import { Icon } from "../components/icon.js";
import { Failure, Loading } from "../components/states.js";
import { duration, usd } from "../core/format.js";
import { html } from "../core/html.js";
import { useResource } from "../core/polling.js";
import { hrefOf } from "../core/router.js";
import { FleetActions } from "./actions.js";
import { lastsFor, usdPerHour } from "./budget.js";
import { offsetOf, useFleetNow, versionOf } from "./data.js";
import { Events } from "./history.js";
import { MachineChart } from "./machine-chart.js";
import { Machines } from "./machines.js";
import { Money } from "./money.js";
import { Offers } from "./offers.js";
import { Receipts } from "./receipts.js";
import { countsOf, GROUPS, permits, queuesOf, stateOf, why } from "./words.js";

const TABS = [
  ["", "Machines and money"],
  ["offers", "Offers"],
  ["receipts", "Receipts"],
  ["events", "Events"],
  ["document", "Document"],
];
const VIEWS = { "": Overview, offers: Offers, receipts: Receipts, events: Events, document: Document };

/** Show one fleet: its header, and the view that `tab` of the address names. */
export function FleetPage({ parts, query }) {
  return html`<${Fleet} key=${parts[1]} name=${parts[1]} tab=${query.tab ?? ""} />`;
}

function Fleet({ name, tab }) {
  const { data: fleet, error, refresh } = useResource(`/fleets/${encodeURIComponent(name)}`);
  if (error && !fleet) return html`<div class="page"><${Failure} error=${error} retry=${refresh} /><p class="state"><a href="#/fleets">Show all fleets</a></p></div>`;
  if (!fleet) return html`<div class="page"><${Loading} rows=${6} label="Loading the fleet" /></div>`;
  // When the answer comes, not when a part first shows a time.
  offsetOf(fleet);
  const View = VIEWS[tab] ?? Overview;
  return html`<div class="page job-page">
    <${Header} fleet=${fleet} />
    <nav class="tabs job-tabs" aria-label="Parts of the fleet">
      ${TABS.map(([part, label]) => html`<a key=${part} class="tab" href=${hrefOf(`/fleets/${name}`, { tab: part })} aria-current=${tab === part ? "page" : undefined}>${label}</a>`)}
    </nav>
    <${View} fleet=${fleet} version=${versionOf(fleet)} />
  </div>`;
}

/** Show whether a fleet rents as a dot and a word. */
export const FleetBadge = ({ fleet }) => html`<span class="badge badge-${stateOf(fleet)}"><span class="dot" aria-hidden="true"></span>${stateOf(fleet)}</span>`;

/** Return `2 with a job, 1 starting`. */
export function machineWords(machines) {
  const counts = countsOf(machines);
  return GROUPS.filter(([group]) => counts[group]).map(([group, word]) => `${counts[group]} ${word}`).join(", ");
}

function Header({ fleet }) {
  const { spec, machines, bounds } = fleet;
  const sentence = why(fleet);
  const price = usdPerHour(machines);
  const lasts_s = lastsFor(bounds, price, useFleetNow(fleet));
  return html`<header class="job-head">
    <div class="job-title">
      <p class="crumbs"><a href="#/fleets">Fleets</a> <span aria-hidden="true">/</span> <span>${spec.providers.join(", ")}</span></p>
      <h1>${spec.name}</h1>
      <div class="job-sub fleet-sub"><${FleetBadge} fleet=${fleet} /><span>${permits(spec)}</span><${Serves} fleet=${fleet} /></div>
    </div>
    <${FleetActions} fleet=${fleet} />
    ${sentence && html`<div class="job-why ${fleet.waits && !fleet.stopped ? "job-why-paused" : ""}"><p>${sentence}</p></div>`}
    <dl class="facts fleet-facts">
      <div class="fact"><dt>Machines</dt><dd><b>${machines.length}</b><span class="soft"> of ${spec.max}</span><span class="soft fact-line">${machineWords(machines) || "none now"}</span></dd></div>
      <div class="fact"><dt>Price now</dt><dd><b>${usd(price)}</b><span class="soft">/h</span></dd></div>
      <div class="fact"><dt>Spent</dt><dd><b>${usd(fleet.spent_usd)}</b><span class="soft fact-line">boots and idle time included</span></dd></div>
      <div class="fact"><dt>Money lasts for</dt><dd>${lasts_s === null ? html`<span class="soft">${price ? "no bound is reached in its period" : "nothing is rented"}</span>` : html`<b>${duration(lasts_s)}</b><span class="soft fact-line">at the present price</span>`}</dd></div>
    </dl>
  </header>`;
}

/** Show the queues and tags whose jobs a fleet serves, or its one job. */
export function Serves({ fleet }) {
  const { spec, job_id } = fleet;
  if (job_id) return html`<span>for <a href="#/jobs/${job_id}">job ${job_id.slice(0, 8)}</a></span>`;
  return html`<span>${queuesOf(spec)}</span>${Object.entries(spec.tags).map(([name, value]) => html`<${Tag} key=${name}>${value ? `${name}=${value}` : name}<//>`)}`;
}

function Overview({ fleet, version }) {
  const now = useFleetNow(fleet);
  return html`<div class="fleet-part"><${Money} fleet=${fleet} now=${now} /><${MachineChart} fleet=${fleet} version=${version} now=${now} /><${Machines} fleet=${fleet} now=${now} /></div>`;
}

function Document({ fleet }) {
  const [copied, setCopied] = useState(false);
  const text = JSON.stringify(fleet.spec, (_, value) => value ?? undefined, 2);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
  };
  return html`<section class="fleet-part" aria-label="Document">
    <div class="card-head-line"><p class="grow soft">Change a copy, and store it with <code>baton fleet apply ${fleet.spec.name}.json</code>.</p>
      ${navigator.clipboard && html`<button class="button button-small" onClick=${copy}><${Icon} name=${copied ? "check" : "copy"} />${copied ? "Copied" : "Copy"}</button>`}</div>
    <pre class="command" tabindex="0" aria-label="Document of the fleet"><code>${text}</code></pre>
  </section>`;
}
