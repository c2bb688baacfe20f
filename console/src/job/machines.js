/** The rented machines of a job: which machine served each attempt, for how long and how much, and the fleets. */
import { Grid } from "../components/grid.js";
import { Empty, Failure, Loading } from "../components/states.js";
import { get } from "../core/api.js";
import { counted, duration, fullMoment, moment, usd } from "../core/format.js";
import { html } from "../core/html.js";
import { PART_INTERVAL_S, useResource } from "../core/polling.js";
import { may } from "../core/session.js";
import { useReading } from "../fleet/data.js";
import { FleetBadge } from "../fleet/fleet.js";
import { MachineBadge } from "../fleet/machines.js";
import { groupOf, why } from "../fleet/words.js";

/** Id of a rented machine: deployment, fleet, random part. */
const RENTED = /^[a-z][0-9a-z]{7}-.+-[0-9a-f]{12}$/;

/** Return true if the job has or waits for a machine that may be rented, without a request. */
export const mayHaveMachines = (job, attempts) => may("submit") && Boolean(job.rent || job.state === "pending" || attempts?.some((one) => RENTED.test(one.machine_id)));

const pathOf = (job) => `/job/${job.id}/machines`;

/** Return the cost in USD of boots and idle time of the fleet that the job rents for itself; 0 for other jobs, which do not pay for these. */
export function useOverhead(job, version) {
  const rents = may("submit") && job?.rent;
  const { data } = useReading(async () => (rents ? get(pathOf(job)) : null), rents ? version : "");
  return data ? overheadOf(data) : 0;
}

const overheadOf = ({ fleets, usd: worked_usd }) => fleets.filter(({ fleet }) => fleet.job_id).reduce((sum, { fleet }) => sum + Math.max(0, fleet.spent_usd - worked_usd), 0);

/** Show the rented machines of a job. */
export function RentedMachines({ job }) {
  const { data, error, refresh } = useResource(pathOf(job), PART_INTERVAL_S);
  if (error && !data) return html`<${Failure} error=${error} retry=${refresh} />`;
  if (!data) return html`<${Loading} rows=${3} label="Loading machines" />`;
  const overhead_usd = overheadOf(data);
  return html`<div class="fleet-part">
    <section class="card fleet-card labeled" aria-label="Machines">
      <p class="card-head">${counted(data.attempts.length, "attempt")} on rented machines · <b>${usd(data.usd)}</b> while the job ran${overhead_usd > 0 && html` · <b>${usd(overhead_usd)}</b> for boots and idle time`}</p>
      ${data.attempts.length ? html`<${Grid} label="Machines" columns=${COLUMNS} items=${[...data.attempts].reverse()} keyOf=${(one) => `${one.seat} ${one.epoch}`} />` : html`<${Empty} icon="fleet" title="No machine yet"><p>${data.fleets.length ? "A machine is rented, boots and then claims the job." : `No fleet serves queue ${job.queue}, so a worker of your own must claim the job.`}</p><//>`}
    </section>
    ${data.fleets.length > 0 && html`<section class="card fleet-card" aria-label="Fleets">
      <p class="card-head">Fleets that serve queue ${job.queue}</p>
      <${Grid} label="Fleets" columns=${FLEETS} items=${data.fleets} keyOf=${({ fleet }) => fleet.spec.name} />
    </section>`}
  </div>`;
}

const COLUMNS = [
  { name: "machine", label: "Machine", cell: ({ machine }) => html`<strong>${machine.gpu_model ?? "no GPU"}</strong> <span class="soft">${machine.provider}</span><div class="soft code wrap" title=${machine.provider_id}>${machine.id}</div>` },
  { name: "attempt", label: "Attempt", cell: (one) => (one.seat === null ? one.epoch : `node ${one.seat}, ${one.epoch}`) },
  { name: "fleet", label: "Fleet", cell: ({ machine }) => html`<a href="#/fleets/${machine.fleet}">${machine.fleet}</a>` },
  { name: "state", label: "State", cell: ({ machine }) => html`<${MachineBadge} state=${machine.state} /><div class="soft" title=${fullMoment(machine.since)}>${groupOf(machine.state) === "ended" ? "at" : "since"} ${moment(machine.since)}</div>` },
  { name: "held", label: "Held the job", right: true, cell: (one) => duration(one.held_s) },
  { name: "cost", label: "Cost", right: true, cell: (one) => html`${usd(one.usd)}<div class="soft">${usd(one.machine.usd_per_hour)}/h</div>` },
];

const FLEETS = [
  { name: "fleet", label: "Fleet", cell: ({ fleet }) => html`<a class="fleet-name" href="#/fleets/${fleet.spec.name}">${fleet.spec.name}</a>` },
  { name: "state", label: "State", cell: ({ fleet }) => html`<${FleetBadge} fleet=${fleet} />` },
  { name: "usd", label: "Spent", right: true, cell: ({ fleet }) => usd(fleet.spent_usd) },
  { name: "why", label: "Why no further machine", cell: ({ fleet, cannot }) => html`<span class=${cannot ? "warn-text" : "soft"}>${cannot ? `Cannot run this job: ${cannot}.` : why(fleet)}</span>` },
];
