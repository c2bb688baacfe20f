/** The machines of a fleet that have not ended, and the output of one. */
import { useState } from "preact/hooks";
import { Dialog } from "../components/dialog.js";
import { Grid } from "../components/grid.js";
import { Empty, Failure, Loading } from "../components/states.js";
import { get } from "../core/api.js";
import { age, fullMoment, usd } from "../core/format.js";
import { html } from "../core/html.js";
import { useReading } from "./data.js";
import { groupOf } from "./words.js";

/** Show the machines. `now`: time of the fleets' clock. */
export function Machines({ fleet, now }) {
  const [shown, show] = useState(null);
  const columns = [
    { name: "machine", label: "Machine", cell: (one) => html`<strong>${one.gpu_model ?? "no GPU"}</strong> <span class="soft">${one.provider}</span><div class="soft code wrap" title=${one.provider_id}>${one.id}</div>` },
    { name: "state", label: "State", cell: (one) => html`<${MachineBadge} state=${one.state} /><div class="soft" title=${fullMoment(one.since)}>for ${age(Math.max(now - one.since, 5))}</div>` },
    { name: "job", label: "Job", cell: (one) => (one.job_id ? html`<a class="code" href="#/jobs/${one.job_id}">${one.job_id.slice(0, 8)}</a>` : html`<span class="soft">none</span>`) },
    { name: "usd", label: "Spent", right: true, cell: (one) => html`${usd(one.spent_usd)}<div class="soft">${usd(one.usd_per_hour)}/h</div>` },
    { name: "note", label: "Measured", cell: (one) => html`${one.reason && html`<div>${one.reason}</div>`}<span class="soft">${measured(one.measured)}</span>` },
    { name: "output", label: html`<span class="visually-hidden">Output</span>`, right: true, cell: (one) => html`<button class="button button-small" aria-label="Output of ${one.id}" onClick=${() => show(one)}>Output</button>` },
  ];
  return html`<section class="card fleet-card" aria-label="Machines">
    <h2 class="card-head">Machines</h2>
    ${fleet.machines.length ? html`<${Grid} label="Machines" columns=${columns} items=${fleet.machines} keyOf=${(one) => one.id} />` : html`<${Empty} icon="fleet" title="No machine is rented"><p>Machines come with jobs and go without them; their receipts stay.</p><//>`}
    ${shown && html`<${Output} machine=${shown} onClose=${() => show(null)} />`}
  </section>`;
}

/** Show the state of a machine as a dot and a word. */
export const MachineBadge = ({ state }) => html`<span class="badge badge-${groupOf(state)}"><span class="dot" aria-hidden="true"></span>${state}</span>`;

function measured(found) {
  if (!found) return "";
  const driver = found.driver ? `driver ${found.driver}, ` : "";
  return `${driver}writes ${Math.round(found.disk_write_mb_s)} MB/s, downloads ${Math.round(found.download_mbit_s)} Mbit/s`;
}

function Output({ machine, onClose }) {
  const { data, error, again } = useReading(() => get(`/fleets/${machine.fleet}/machines/${machine.id}/logs`), "");
  return html`<${Dialog} title="Output of ${machine.id}" onClose=${onClose}>
    ${error && html`<${Failure} error=${error} retry=${again} />`}
    ${!data && !error && html`<${Loading} rows=${3} label="Asking the provider" />`}
    ${data && (data.text ? html`<pre class="command machine-output" tabindex="0" aria-label="Last output"><code>${data.text}</code></pre>` : html`<p class="soft">The provider has no output of the machine, or none yet.</p>`)}
    ${data?.job_id && html`<p><a href="#/jobs/${data.job_id}?tab=log">Show the log of its job</a></p>`}
    <div class="dialog-actions"><button class="button" onClick=${onClose}>Close</button></div>
  <//>`;
}
