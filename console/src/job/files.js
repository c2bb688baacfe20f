/** Inputs, outputs and the document of a job. */
import { useState } from "preact/hooks";
import { Icon } from "../components/icon.js";
import { Failure, Loading } from "../components/states.js";
import { bytes, count, counted } from "../core/format.js";
import { html } from "../core/html.js";
import { useResource } from "../core/polling.js";
import { get } from "../core/api.js";
import { may } from "../core/session.js";
import { documentOf, submitCommand } from "../submit/document.js";
import { Unlisted, useArtifacts } from "./artifacts.js";
import { locate, VerifiedDownload } from "./download.js";

const INPUTS_SHOWN = 100;

/** Show what the job reads, what it has stored, and how to submit it again. */
export function Files({ job, version }) {
  const found = useArtifacts(job, version);
  const { artifacts, final, error } = found;
  const checksums = new Map(job.artifacts.map((one) => [one.path, one.crc64nvme]));
  const some = Object.keys(job.environment).length;
  const variables = some ? counted(some, "environment variable") : "";
  const { data: rules, loading } = useResource(`/job/${job.id}/rules`);
  return html`<div class="files">
    ${may("submit") && html`<section aria-label="Outputs"><h2>Outputs</h2>
      ${error && html`<${Failure} error=${error} />`}
      ${artifacts !== null && html`<p class="soft">${
        artifacts.length === 0
          ? "Nothing is stored yet."
          : final
            ? html`The control plane has verified size and checksum of each, and a download compares them before it is saved. All of them: <code>baton fetch ${job.id} result</code>`
            : "These are files of attempts so far; they become outputs when the job completes."
      }</p>`}
      <${Unlisted} job=${job} found=${found} />
      ${artifacts?.length > 0 && html`<ul class="file-list">${artifacts.map(
        (one) => html`<li key=${one.key}><a href=${one.url} download target="_blank" rel="noreferrer">${one.path}</a><span class="soft">${bytes(one.size_bytes)}</span><span class="soft">attempt ${one.epoch}</span>
          ${final && html`<${VerifiedDownload} path=${one.path} size_bytes=${one.size_bytes} find=${() => ({ url: one.url, crc64nvme: checksums.get(one.path) })} command="baton fetch ${job.id} result" />`}</li>`,
      )}</ul>`}
    </section>`}
    <section aria-label="Inputs"><h2>Inputs</h2>
      ${job.inputs.length === 0 ? html`<p class="soft">The job reads no stored files.</p>` : html`<ul class="file-list">${job.inputs.map(
        (one, index) => html`<li key=${index}><code>${one.prefix}</code>${one.into && html`<span class="soft">into ${one.into}</span>`}${may("submit") && html`<${InputFiles} prefix=${one.prefix} />`}</li>`,
      )}</ul>`}
    </section>
    <section aria-label="Document"><h2>Document</h2>
      <p class="soft">Submits the same job again${variables && (may("submit") ? `, with its ${variables}` : `; a shared link leaves out the values of its ${variables}`)}.</p>
      ${loading ? html`<${Loading} rows=${3} label="Loading the rules" />` : html`<${Copyable} text=${submitCommand(documentOf(job, rules?.newest?.text))} label="Copy the command" />`}
    </section>
  </div>`;
}

/** List the objects of an input, on demand: a listing costs a request of the store. */
function InputFiles({ prefix }) {
  const [found, set] = useState(null);
  const read = async () => {
    try {
      set(await get("/data", { prefix, limit: INPUTS_SHOWN }));
    } catch (error) {
      if (error.status === undefined) throw error;
      set({ error });
    }
  };
  if (!found) return html`<button class="button button-quiet" onClick=${read} aria-label="List the files of ${prefix}">List files</button>`;
  if (found.error) return html`<${Failure} error=${found.error} />`;
  return html`<ul class="file-list file-list-inner" aria-label="Files of ${prefix}">
    ${found.objects.map((one) => html`<li key=${one.key}><code>${one.key}</code><span class="soft">${bytes(one.size_bytes)}</span>
      <${VerifiedDownload} path=${one.key} size_bytes=${one.size_bytes} find=${() => locate("training-data", one.key)} command="baton data prefetch ${prefix}" /></li>`)}
    ${found.objects.length === 0 && html`<li class="soft">No file is stored below this prefix.</li>`}
    ${found.next_cursor && html`<li class="soft">The first ${count(INPUTS_SHOWN)} files; <code>baton data ls ${prefix}</code> lists all.</li>`}
  </ul>`;
}

/** Show a text with a button that copies it. */
export function Copyable({ text, label, name = "Command" }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 2000);
  };
  return html`<div class="copyable"><pre class="command" tabindex="0" aria-label=${name}>${text}</pre>
    ${navigator.clipboard && html`<button class="button" onClick=${copy}><${Icon} name=${copied ? "check" : "copy"} />${copied ? "Copied" : label}</button>`}
  </div>`;
}
