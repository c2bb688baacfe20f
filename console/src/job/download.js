/** Downloads that are compared with the checksum of the control plane before they are saved. */
import { useEffect, useRef, useState } from "preact/hooks";
import { Icon } from "../components/icon.js";
import { call } from "../core/api.js";
import { Crc64 } from "../core/crc64.js";
import { bytes, percent } from "../core/format.js";
import { html } from "../core/html.js";
import { savedName } from "./saved-name.js";

/** The page holds a file in memory until the file is verified. */
export const MAX_VERIFIED_BYTES = 256 * 2 ** 20;

/** Return `{url, crc64nvme}` of a stored object, by a token for one download. Throws ApiError. */
export async function locate(bucket, key) {
  const { token, crc64nvme } = await call("GET", "/download/token", { query: { bucket, key } });
  const path = `/download/${bucket}/${key.split("/").map(encodeURIComponent).join("/")}`;
  const { url } = await call("GET", path, { query: { as: "url" }, headers: { "x-download-token": token } });
  return { url, crc64nvme };
}

/** Read a file with its checksum; `onProgress` receives the number of bytes so far. Throws a DownloadError. */
async function readVerified({ url, crc64nvme }, onProgress, signal) {
  const received = async (promise, message) => {
    try {
      return await promise;
    } catch (cause) {
      throw signal.aborted ? cause : new DownloadError(message);
    }
  };
  // An earlier answer of the cache may lack the store's permission for this page.
  const asked = fetch(url, { credentials: "omit", cache: "no-store", signal });
  const answer = await received(asked, "The object store did not answer, or does not permit this page to read its objects (CORS).");
  if (!answer.ok) throw new DownloadError(`The object store answered ${answer.status}.`);
  const crc = new Crc64();
  const pieces = [];
  let read = 0;
  for (const reader = answer.body.getReader(); ; ) {
    const { done, value } = await received(reader.read(), `The connection broke after ${bytes(read)}. Nothing was saved.`);
    if (done) break;
    crc.add(value);
    pieces.push(value);
    read += value.length;
    onProgress(read);
  }
  if (crc.base64 !== crc64nvme) {
    throw new DownloadError(`The bytes have the checksum ${crc.base64}, not the stored ${crc64nvme}. Nothing was saved.`);
  }
  return new Blob(pieces);
}

class DownloadError extends Error {}

/** Save bytes under the last part of `path`. */
export function save(blob, path) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = savedName(path);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/**
 * Button that downloads a file, verifies the file, and saves it.
 *
 * `find`: returns `{url, crc64nvme}`. `command`: verifies a file that is too large for the page.
 */
export function VerifiedDownload({ path, size_bytes, find, command }) {
  const [state, set] = useState({ kind: "idle" });
  const stop = useRef(null);
  useEffect(() => () => stop.current?.abort(), []);
  const run = async () => {
    stop.current = new AbortController();
    set({ kind: "reads", read: 0 });
    try {
      const found = await find();
      if (!found.crc64nvme) throw new DownloadError("The store has no checksum of this file.");
      const blob = await readVerified(found, (read) => set({ kind: "reads", read }), stop.current.signal);
      save(blob, path);
      set({ kind: "saved", crc64nvme: found.crc64nvme });
    } catch (error) {
      if (stop.current.signal.aborted) return;
      if (!(error instanceof DownloadError) && error.status === undefined) throw error;
      set({ kind: "failed", message: error.message });
    }
  };
  if (size_bytes > MAX_VERIFIED_BYTES) return html`<span class="soft">above ${bytes(MAX_VERIFIED_BYTES)}: <code>${command}</code> verifies</span>`;
  if (state.kind === "reads") return html`<output class="soft">${percent(size_bytes ? state.read / size_bytes : 1)}</output>`;
  return html`${state.kind === "saved" && html`<span class="verified" role="status" title="CRC-64/NVME ${state.crc64nvme}"><${Icon} name="check" />verified</span>`}
    ${state.kind === "failed" && html`<span class="inline-error" role="alert">${state.message}</span>`}
    <button class="button button-quiet" onClick=${run} aria-label="Download and verify ${path}">Download</button>`;
}
