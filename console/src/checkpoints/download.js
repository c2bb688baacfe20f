/** The files of a checkpoint, each with a download that is verified before it is saved. */
import { useEffect, useRef, useState } from "preact/hooks";
import { ProgressBar } from "../components/bar.js";
import { Dialog } from "../components/dialog.js";
import { Icon } from "../components/icon.js";
import { Loading } from "../components/states.js";
import { post } from "../core/api.js";
import { now_s } from "../core/clock.js";
import { bytes, count, counted } from "../core/format.js";
import { html } from "../core/html.js";
import { MAX_VERIFIED_BYTES, save } from "../job/download.js";
import { Copyable } from "../job/files.js";

const FILES_SHOWN = 100;

/** Dialog that lists the files of a checkpoint. The code that joins the stored parts is loaded here, not with the page. */
export function DownloadCheckpoint({ job, checkpoint, onClose }) {
  const { step } = checkpoint;
  const [opened, set] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const stop = useRef(null);
  useEffect(() => {
    stop.current = new AbortController();
    open(job.id, step, stop.current.signal, set).catch((failure) => setError(failure));
    return () => stop.current.abort();
  }, []);
  const files = opened?.checkpoint.files;
  return html`<${Dialog} title="Download step ${count(step)}" onClose=${onClose}>
    ${error && html`<p class="inline-error" role="alert">${error.message}</p>`}
    ${!opened && !error && html`<${Loading} rows=${3} label="Reading the manifest" />`}
    ${files && html`<div class="dialog-text"><p>A download joins the stored parts of a file and compares each with its BLAKE3 before the file is saved.</p></div>
      <ul class="file-list checkpoint-files" aria-label="Files of step ${count(step)}">
        ${files.slice(0, FILES_SHOWN).map((file) => html`<${File} key=${file.path} file=${file} opened=${opened} idle=${!busy} onBusy=${setBusy} />`)}
        ${files.length > FILES_SHOWN && html`<li class="soft">The first ${count(FILES_SHOWN)} of ${count(files.length)} files; the command downloads all.</li>`}
      </ul>`}
    <div class="dialog-text"><p>${files ? `${counted(files.length, "file")}, ${bytes(checkpoint.total_bytes)} together: the command downloads and verifies all, of any size.` : "The command downloads and verifies all files:"}</p></div>
    <${Copyable} text="baton fetch ${job.id} . --checkpoint ${step}" label="Copy the command" />
    <div class="dialog-actions"><button class="button" onClick=${onClose}>Close</button></div>
  <//>`;
}

async function open(id, step, signal, set) {
  const reader = await import("./reader.js").catch(() => {
    throw new Error("A part of this page could not be loaded. Load the page again.");
  });
  const askUrls = (blake3) => post(`/job/${id}/checkpoints/${step}/urls`, { blake3 });
  const checkpoint = await reader.openCheckpoint(id, step, askUrls, now_s, { signal });
  if (!signal.aborted) set({ reader, checkpoint });
}

/** Show a file with its download. `idle`: no other file is read, so that the page holds one file at a time. */
function File({ file, opened, idle, onBusy }) {
  const [state, set] = useState({ kind: "idle" });
  const stop = useRef(null);
  useEffect(() => () => stop.current?.abort(), []);
  const run = async () => {
    const { signal } = (stop.current = new AbortController());
    set({ kind: "reads", done: 0, total: 0, verb: "Reading" });
    onBusy(true);
    try {
      const onProgress = ({ read, checked, total }) =>
        set(read === undefined ? { kind: "reads", done: checked, total, verb: "Comparing" } : { kind: "reads", done: read, total, verb: "Reading" });
      save(await opened.checkpoint.read(file, onProgress, signal), file.path);
      set({ kind: "saved" });
    } catch (failure) {
      if (signal.aborted) set({ kind: "idle" });
      else if (failure instanceof opened.reader.DownloadError || failure.status !== undefined) set({ kind: "failed", message: failure.message });
      else throw failure;
    } finally {
      onBusy(false);
    }
  };
  const tooLarge = file.size_bytes > MAX_VERIFIED_BYTES;
  return html`<li>
    <span class="checkpoint-file">${file.path}</span><span class="soft">${bytes(file.size_bytes)}</span>
    ${tooLarge && html`<span class="soft">above ${bytes(MAX_VERIFIED_BYTES)}: use the command</span>`}
    ${state.kind === "saved" && html`<span class="verified" role="status"><${Icon} name="check" />verified</span>`}
    ${state.kind === "reads"
      ? html`<button class="button button-quiet" onClick=${() => stop.current.abort()} aria-label="Cancel the download of ${file.path}">Cancel</button>
          <span class="checkpoint-progress"><${ProgressBar} share=${state.total ? state.done / state.total : null} label="${state.verb} ${file.path}" />
            <output class="soft">${state.total ? `${state.verb} ${bytes(state.done)} of ${bytes(state.total)}` : state.verb}</output></span>`
      : !tooLarge && html`<button class="button button-quiet" disabled=${!idle} onClick=${run} aria-label="Download and verify ${file.path}">Download</button>`}
    ${state.kind === "failed" && html`<span class="inline-error" role="alert">${state.message}</span>`}
  </li>`;
}
