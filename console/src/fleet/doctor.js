/** What the doctor of the fleets finds, and the fixes: for admins of the deployment. */
import { useState } from "preact/hooks";
import { Tag } from "../components/badge.js";
import { Confirm } from "../components/dialog.js";
import { Empty, Failure, Loading } from "../components/states.js";
import { toast } from "../components/toast.js";
import { get, post } from "../core/api.js";
import { moment } from "../core/format.js";
import { html } from "../core/html.js";
import { useReading } from "./data.js";
import { ReceiptGrid } from "./receipts.js";

const HARMLESS = "foreign_machines";

/** Examine all providers once, and show the findings. */
export function Doctor() {
  const { data, error, reading, again } = useReading(() => get("/fleet-doctor"), "");
  const [asked, ask] = useState(null);
  if (error) return html`<${Failure} error=${error} title="The examination failed" retry=${again} />`;
  if (!data) return html`<${Loading} rows=${4} label="Asking all providers" />`;
  const examined = data.providers.join(", ") || "no provider";
  return html`<section class="fleet-part" aria-label="Doctor">
    <div class="card-head-line">
      <p class="grow soft">Examined at ${moment(data.at)}: ${examined}, against the records.</p>
      <button class="button button-small" disabled=${reading} onClick=${again}>${reading ? "Examining …" : "Examine again"}</button>
    </div>
    ${data.findings.length === 0
      ? html`<div class="card"><${Empty} icon="check" title="Nothing was found"><p>Every machine has a record, every account answers, and the controller is on time.</p><//></div>`
      : html`<ul class="findings card">${data.findings.map((one) => html`<${Finding} key=${one.id} finding=${one} onFix=${() => ask(one)} />`)}</ul>`}
    ${data.strays.length > 0 && html`<h2>Strays that the deployment paid, because no fleet is known for them</h2><${ReceiptGrid} label="Strays" machines=${data.strays} />`}
    ${asked && html`<${Fix} finding=${asked} onClose=${() => ask(null)} onDone=${again} />`}
  </section>`;
}

function Finding({ finding, onFix }) {
  return html`<li>
    <div class="grow"><${Tag} tone=${finding.code === HARMLESS ? "plain" : "bad"}>${wordsOf(finding)}<//><p>${finding.detail}</p></div>
    ${finding.fix && html`<button class="button button-small" aria-label="Fix ${finding.id}" onClick=${onFix}>Fix</button>`}
  </li>`;
}

const wordsOf = ({ code, provider }) => [code.replaceAll("_", " "), provider].filter(Boolean).join(" · ");

function Fix({ finding, onClose, onDone }) {
  const fix = async () => {
    const { outcomes } = await post("/fleet-doctor/fix", { findings: [finding.id] });
    const [outcome] = outcomes;
    toast(outcome.later ? `Not yet: ${outcome.detail}. Try again in a moment.` : `${outcome.fixed ? "Fixed" : "Not fixed"}: ${outcome.detail}.`, { tone: outcome.fixed ? "plain" : "error" });
    onDone();
  };
  return html`<${Confirm} title="Fix: ${wordsOf(finding)}" action="Fix" danger onConfirm=${fix} onClose=${onClose}>
    <p>${finding.detail}.</p><p>The fix <strong>${finding.fix}</strong>. There is no undo.</p>
  <//>`;
}
