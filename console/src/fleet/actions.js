/** Stop a fleet and let the fleet rent again: the effect is said before, the undo offered after. */
import { useState } from "preact/hooks";
import { Confirm } from "../components/dialog.js";
import { Icon } from "../components/icon.js";
import { toast } from "../components/toast.js";
import { call, get, post } from "../core/api.js";
import { counted, usd } from "../core/format.js";
import { html } from "../core/html.js";
import { refreshAll } from "../core/polling.js";
import { permits, queuesOf } from "./words.js";

const pathOf = (name) => `/fleets/${name}`;

async function stop(name) {
  await post(`${pathOf(name)}/stop`);
  refreshAll();
}

/** Store the newest document again: the stored one is in force, and a stopped fleet rents again. */
async function rentAgain(name) {
  const { spec } = await get(pathOf(name));
  await call("PUT", pathOf(name), { body: spec });
  refreshAll();
}

const ACTIONS = {
  stop: {
    label: "Stop",
    icon: "stop",
    danger: true,
    run: stop,
    done: "stops",
    undo: { label: "Rent again", run: rentAgain },
  },
  rent: { label: "Rent again", icon: "play", run: rentAgain, done: "rents again", undo: { label: "Stop", run: stop } },
};

/** Show the action that fits the fleet's state. */
export function FleetActions({ fleet }) {
  const [asked, ask] = useState(null);
  const name = fleet.stopped ? "rent" : "stop";
  const ended = fleet.stopped && fleet.job_id;
  return html`<div class="job-actions">
    ${!ended && html`<button class="button" onClick=${() => ask({ name, fleet })}><${Icon} name=${ACTIONS[name].icon} />${ACTIONS[name].label}</button>`}
    ${asked && html`<${ActionDialog} ...${asked} onClose=${() => ask(null)} />`}
  </div>`;
}

function ActionDialog({ name, fleet, onClose }) {
  const action = ACTIONS[name];
  const fleetName = fleet.spec.name;
  const confirm = async () => {
    await action.run(fleetName);
    toast(`Fleet ${fleetName} ${action.done}.`, { undo: { label: action.undo.label, run: () => action.undo.run(fleetName) } });
  };
  const Effect = name === "stop" ? StopEffect : RentEffect;
  return html`<${Confirm} title="${action.label}: ${fleetName}" action=${action.label} danger=${action.danger} onConfirm=${confirm} onClose=${onClose}>
    <${Effect} fleet=${fleet} />
  <//>`;
}

function StopEffect({ fleet }) {
  const { machines, spec } = fleet;
  const held = machines.filter((one) => one.job_id);
  const free = machines.length - held.length;
  return html`
    ${machines.length === 0 && html`<p>No machine is rented now.</p>`}
    ${held.length > 0 && html`<p><strong>${counted(held.length, "machine")} with a job</strong> ${held.length === 1 ? "saves a checkpoint first. Its job waits in its queue and goes" : "save checkpoints first. Their jobs wait in their queues and go"} on from there; a training without checkpoints begins again.</p>`}
    ${free > 0 && html`<p><strong>${counted(free, "machine")} without a job</strong> ${free === 1 ? "goes" : "go"} back as soon as ${free === 1 ? "it answers" : "they answer"}.</p>`}
    ${machines.length > 0 && html`<p>After five minutes at the latest, the provider is told to end ${machines.length === 1 ? "the machine" : "all of them"}.</p>`}
    <p>The fleet rents nothing until you let it rent again. ${fleet.job_id ? "Its job waits without a machine." : `Jobs of ${queuesOf(spec)} wait for other workers.`} Receipts stay.</p>
  `;
}

function RentEffect({ fleet }) {
  const { spec, spent_usd } = fleet;
  return html`
    <p>The fleet rents ${permits(spec)}, while jobs of ${queuesOf(spec)} wait.${spec.min ? ` ${counted(spec.min, "machine is", "machines are")} rented also without jobs.` : ""}</p>
    <p>${spent_usd ? `${usd(spent_usd)} are spent already and count against the budget.` : "Nothing is spent yet."}</p>
  `;
}
