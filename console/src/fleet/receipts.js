/** The receipts of ended machines: observed cost, the provider's charge, and the proof of the end. */
import { Grid } from "../components/grid.js";
import { Empty, Failure, Loading } from "../components/states.js";
import { get } from "../core/api.js";
import { counted, duration, fullMoment, moment, usd } from "../core/format.js";
import { html } from "../core/html.js";
import { useReading } from "./data.js";

const LIMIT = 1000;

/** Show the receipts of a fleet, the newest first. */
export function Receipts({ fleet, version }) {
  const { data, error, again } = useReading(() => get(`/fleets/${fleet.spec.name}/machines`, { limit: LIMIT }), version);
  if (error) return html`<${Failure} error=${error} retry=${again} />`;
  if (!data) return html`<${Loading} rows=${6} label="Loading receipts" />`;
  if (!data.machines.length) return html`<${Empty} title="No receipts yet"><p>Each machine that is given back leaves a receipt: price, cost, the provider's charge, and the proof of its end.</p><//>`;
  return html`<section class="fleet-part" aria-label="Receipts"><${ReceiptGrid} label="Receipts" machines=${data.machines} />${data.machines.length === LIMIT && html`<p class="soft">The newest ${LIMIT} are shown.</p>`}</section>`;
}

/** Show receipts as a table with their totals. */
export function ReceiptGrid({ label, machines }) {
  const receipts = machines.map((one) => one.receipt).filter(Boolean);
  const charges = receipts.map((one) => one.charged_usd).filter((usd_) => usd_ !== null);
  const sum = (values) => values.reduce((all, one) => all + one, 0);
  return html`<div class="card fleet-card">
    <p class="card-head">${counted(receipts.length, "machine")} · <b>${usd(sum(receipts.map((one) => one.observed_usd)))}</b> observed${charges.length > 0 && html` · <b>${usd(sum(charges))}</b> charged${charges.length < receipts.length ? ` by the providers of ${charges.length} of them` : ""}`}</p>
    <${Grid} label=${label} columns=${COLUMNS} items=${machines} keyOf=${(one) => one.id} />
  </div>`;
}

const COLUMNS = [
  { name: "machine", label: "Machine", cell: (one) => html`<strong>${one.gpu_model ?? "no GPU"}</strong> <span class="soft">${one.provider}</span><div class="soft code wrap">${one.id}</div>` },
  { name: "ended", label: "Ended", cell: (one) => html`<span title=${fullMoment(one.since)}>${moment(one.since)}</span><div class="soft">${lifeOf(one)}</div>` },
  { name: "observed", label: "Observed", right: true, cell: ({ receipt }) => html`${usd(receipt?.observed_usd)}<div class="soft">${usd(receipt?.quoted_usd_per_hour)}/h</div>` },
  { name: "charged", label: "Charged", right: true, cell: ({ receipt }) => (receipt?.charged_usd == null ? html`<span class="soft" title="The provider has no record">not told</span>` : usd(receipt.charged_usd)) },
  { name: "why", label: "Why, and proof", cell: (one) => html`${one.reason}<div class="soft">${proofOf(one.receipt)}</div>` },
];

const lifeOf = ({ receipt, since }) => (receipt?.requested_at ? `after ${duration(since - receipt.requested_at)}` : "");

function proofOf(receipt) {
  const [first, second] = receipt?.absent_at ?? [];
  if (second) return `not listed at ${moment(first)} and ${duration(second - first)} later`;
  return receipt?.requested_at ? "never made by the provider" : "never ordered";
}
