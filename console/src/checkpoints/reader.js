/**
 * Files of a committed checkpoint, verified in the browser: a module of its own, loaded with the first download.
 *
 * The manifest is compared with the digest of the control plane, each chunk with its digest in the manifest before use,
 * and at the end the assembled file, place by place. Imports nothing of the page, which would load both in two requests.
 */
import { decode, digestOf } from "./chunks.js";
import { DownloadError } from "./errors.js";
import { MAX_MANIFEST_BYTES, neededBy, parseManifest, planRanges, rangeOf } from "./manifest.js";
import { PackStore } from "./store.js";

export { DownloadError };

/** Read the manifest of a checkpoint; see PackStore for `askUrls` and `now_s`. Throws DownloadError, ApiError. */
export async function openCheckpoint(job_id, step, askUrls, now_s, { signal, pause_ms } = {}) {
  const store = new PackStore(askUrls, now_s, pause_ms);
  const checkpoint = await store.open();
  const bytes = await store.readManifest(checkpoint.manifest_url, MAX_MANIFEST_BYTES, signal);
  if ((await digestOf(bytes, signal)) !== checkpoint.manifest_blake3) {
    throw new DownloadError("The manifest of the checkpoint does not match its digest.");
  }
  const text = new TextDecoder().decode(bytes);
  return new Checkpoint(store, parseManifest(text, { job_id, step, epoch: checkpoint.epoch }));
}

class Checkpoint {
  constructor(store, manifest) {
    Object.assign(this, { store, ...manifest });
  }

  /**
   * Return a file of `files` as a Blob. Throws DownloadError, ApiError, and the reason of `signal`.
   *
   * Beside the verified chunks, which the browser keeps as Blobs, one range and one decoded chunk with its base are in
   * memory. `onProgress({read, total})`: stored bytes; `onProgress({checked, total})`: bytes of the file.
   */
  async read(file, onProgress, signal) {
    const ranges = planRanges(neededBy(file, this.chunks), this.chunks);
    const total = ranges.reduce((sum, range) => sum + range.size, 0);
    this.store.wanted = [...new Set(ranges.map(({ pack }) => this.packs[pack].blake3))];
    const parts = new Map();
    const deltas = new Map();
    let before = 0;
    for (const range of ranges) {
      const bytes = await this.#fetch(range, (read) => onProgress({ read: before + read, total }), signal);
      before += range.size;
      for (const index of range.indices) {
        const { codec, offset, length_bytes } = this.chunks[index];
        const stored = bytes.subarray(offset - range.offset, offset - range.offset + length_bytes);
        if (codec === "delta") deltas.set(index, new Blob([stored]));
        else parts.set(index, new Blob([await this.#verified(index, stored, null, signal)]));
      }
    }
    for (const index of file.chunks) if (this.chunks[index].codec === "zeros" && !parts.has(index)) parts.set(index, await this.#zeros(index, signal));
    for (const [index, stored] of deltas) {
      const { base } = this.chunks[index];
      if (!parts.has(base)) parts.set(base, await this.#zeros(base, signal));
      parts.set(index, new Blob([await this.#verified(index, await bytesOf(stored), await bytesOf(parts.get(base)), signal)]));
      deltas.set(index, null);
    }
    const whole = new Blob(file.chunks.map((index) => parts.get(index)));
    await this.#check(file, whole, onProgress, signal);
    return whole;
  }

  /** Return the decoded bytes of a chunk. Bytes that do not match are read once more: a network alters bytes, too. */
  async #verified(index, stored, base, signal) {
    const chunk = this.chunks[index];
    const bytes = await decode(chunk, stored, base, signal);
    if (bytes) return bytes;
    const again = chunk.pack === null ? null : await decode(chunk, await this.#fetch(rangeOf(chunk), () => {}, signal), base, signal);
    if (again) return again;
    throw new DownloadError(`Chunk ${chunk.blake3.slice(0, 12)} does not match its BLAKE3: the checkpoint is damaged.`);
  }

  async #zeros(index, signal) {
    return new Blob([await this.#verified(index, null, null, signal)]);
  }

  #fetch(range, onBytes, signal) {
    return this.store.read(this.packs[range.pack], range, onBytes, signal);
  }

  /** Compare the bytes that will be saved with the manifest. Throws DownloadError. */
  async #check(file, whole, onProgress, signal) {
    let at = 0;
    for (const index of file.chunks) {
      const { size_bytes, blake3 } = this.chunks[index];
      const bytes = await bytesOf(whole.slice(at, at + size_bytes));
      if (bytes.length !== size_bytes || (await digestOf(bytes, signal)) !== blake3) {
        throw new DownloadError("The browser did not keep the file as it was read.");
      }
      at += size_bytes;
      onProgress({ checked: at, total: file.size_bytes });
    }
    if (whole.size !== file.size_bytes) throw new DownloadError(`The file has ${whole.size} bytes in place of ${file.size_bytes}.`);
  }
}

const bytesOf = async (blob) => new Uint8Array(await blob.arrayBuffer());
