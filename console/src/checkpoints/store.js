/** Ranges of packs from the object store, by presigned URLs that are asked for again when they run out. */
import { DownloadError } from "./errors.js";

/** Digests of one call, the bound of the API. */
const MAX_URLS = 1000;
/** A URL is used until so long before its end. */
const EXPIRY_MARGIN_S = 30;
const MAX_TRIES = 4;
const REFUSED_URL = [400, 401, 403];

/**
 * Reader of a checkpoint's packs.
 *
 * `askUrls(digests)`: makes the call `POST /job/{id}/checkpoints/{step}/urls`. `now_s()`: the server's time.
 */
export class PackStore {
  constructor(askUrls, now_s, pause_ms = 1000) {
    Object.assign(this, { askUrls, now_s, pause_ms, urls: {}, expires_at: 0, wanted: [] });
  }

  /** Ask for URLs; returns the checkpoint `{step, epoch, manifest_url, manifest_blake3}`. Throws ApiError. */
  async open() {
    return (await this.#ask([])).checkpoint;
  }

  /**
   * Return the bytes of a range `{offset, size}` of a pack `{blake3, size_bytes}`. Throws DownloadError, ApiError.
   *
   * `onBytes(number)`: called with the bytes so far.
   */
  async read(pack, { offset, size }, onBytes, signal) {
    const name = `Pack ${pack.blake3.slice(0, 12)}`;
    const headers = size === pack.size_bytes ? {} : { range: `bytes=${offset}-${offset + size - 1}` };
    let refused = 0;
    const find = async () => {
      if (!this.urls[pack.blake3] || this.now_s() > this.expires_at - EXPIRY_MARGIN_S) await this.#renew(pack.blake3);
      if (!this.urls[pack.blake3]) throw new DownloadError(`${name} is missing in the store.`);
      return this.urls[pack.blake3];
    };
    return this.#retry(name, signal, async () => {
      const answer = await fetch(await find(), { headers, credentials: "omit", cache: "no-store", signal });
      if (REFUSED_URL.includes(answer.status) && (refused += 1) < MAX_TRIES) {
        // An expired URL; the next one is good, unless the store refuses for another reason.
        this.urls = {};
        return null;
      }
      if (answer.status === 416) throw truncated(name, pack);
      if (answer.ok && headers.range && answer.status !== 206) throw new DownloadError("The object store sends whole packs in place of ranges.");
      return readBody(answer, name, size, onBytes, () => truncated(name, pack));
    });
  }

  /** Return the bytes of the manifest, `limit` at most. Throws DownloadError. */
  readManifest(url, limit, signal) {
    return this.#retry("The manifest", signal, async () => {
      const answer = await fetch(url, { credentials: "omit", cache: "no-store", signal });
      return readBody(answer, "The manifest", null, () => {}, null, limit);
    });
  }

  /** Try until `attempt` returns bytes; null: at once again. A broken connection and an overloaded store: after a pause. */
  async #retry(name, signal, attempt) {
    for (let tries = 1; ; tries += 1) {
      try {
        const bytes = await attempt();
        if (bytes) return bytes;
      } catch (cause) {
        signal?.throwIfAborted();
        const passing = cause instanceof TypeError || cause instanceof Overloaded;
        if (!passing) throw cause;
        if (tries >= MAX_TRIES) throw new DownloadError(`${name}: ${cause instanceof Overloaded ? cause.message : "the object store did not answer, or does not permit this page to read its objects (CORS)"}.`);
        await new Promise((done) => setTimeout(done, this.pause_ms * 2 ** (tries - 1)));
        signal?.throwIfAborted();
      }
    }
  }

  async #renew(digest) {
    const at = Math.max(0, this.wanted.indexOf(digest));
    await this.#ask(this.wanted.length ? this.wanted.slice(at, at + MAX_URLS) : [digest]);
  }

  async #ask(digests) {
    const answer = await this.askUrls(digests);
    Object.assign(this, { urls: answer.urls, expires_at: answer.expires_at });
    return answer;
  }
}

class Overloaded extends Error {}

const truncated = (name, pack) => new DownloadError(`${name} is shorter than the ${pack.size_bytes} bytes that its manifest says: it is damaged.`);

/** Read a body of exactly `size` bytes, or of `limit` at most, and hold no more. */
async function readBody(answer, name, size, onBytes, short, limit = size) {
  if (answer.status === 429 || answer.status >= 500) throw new Overloaded(`the object store answered ${answer.status}`);
  if (answer.status === 404) throw new DownloadError(`${name} is missing in the store.`);
  if (!answer.ok) throw new DownloadError(`${name}: the object store answered ${answer.status}.`);
  const bytes = new Uint8Array(limit);
  let read = 0;
  for (const reader = answer.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    if (read + value.length > limit) {
      await reader.cancel();
      throw new DownloadError(`${name} has more than the expected ${limit} bytes.`);
    }
    bytes.set(value, read);
    read += value.length;
    onBytes(read);
  }
  if (size !== null && read < size) throw short();
  return bytes.subarray(0, read);
}
