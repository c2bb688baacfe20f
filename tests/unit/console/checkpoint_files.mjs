/** Reads files of a checkpoint from a store in memory, with the faults of each case; prints one JSON answer per case. */
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [sources, input] = process.argv.slice(2);
const { openCheckpoint } = await import(pathToFileURL(`${sources}/checkpoints/reader.js`));
const { savedName } = await import(pathToFileURL(`${sources}/job/saved-name.js`));
const { parseManifest } = await import(pathToFileURL(`${sources}/checkpoints/manifest.js`));
const { manifest, digest, packs, cases, manifests, paths } = JSON.parse(readFileSync(input, "utf8"));
const { job_id, step, epoch } = JSON.parse(manifest);
const bytesOf = (text) => new Uint8Array(Buffer.from(text, "base64"));

/** Object store and control plane of one case. */
class Store {
  constructor(faults) {
    Object.assign(this, { faults, round: 0, asked: [], read: [], now: 1000 });
  }

  urls(digests) {
    this.round += 1;
    this.asked.push(digests.length);
    const named = digests.length ? digests : Object.keys(packs);
    const urls = Object.fromEntries(named.map((one) => [one, `https://store.example/${one}?round=${this.round}`]));
    const checkpoint = { step, epoch, manifest_url: "https://store.example/manifest", manifest_blake3: digest };
    return { urls, expires_at: this.now + 900, checkpoint };
  }

  async fetch(url, { headers = {}, signal } = {}) {
    signal?.throwIfAborted();
    const { pathname, searchParams } = new URL(url);
    const name = pathname.slice(1);
    if (name === "manifest") return new Response(this.faults.manifest ?? manifest);
    const [begin, end] = headers.range ? headers.range.slice(6).split("-").map(Number) : [0, bytesOf(packs[name]).length - 1];
    this.read.push({ name, begin, size: end - begin + 1 });
    const { answers = [], expired_rounds = 0, cut, gone } = this.faults;
    if (answers.length) {
      const status = answers.shift();
      if (status === "broken") throw new TypeError("terminated");
      return new Response("", { status });
    }
    if (Number(searchParams.get("round")) <= expired_rounds) return new Response("Request has expired", { status: 403 });
    if (gone) return new Response("", { status: 404 });
    const stored = bytesOf(packs[name]).slice(0, cut);
    if (begin >= stored.length) return new Response("", { status: 416 });
    const sent = stored.slice(begin, end + 1);
    if (this.faults.altered-- > 0) sent[sent.length >> 1] ^= 1;
    return new Response(sent, { status: headers.range ? 206 : 200 });
  }
}

async function answerOf({ path, faults = {} }) {
  const store = new Store(faults);
  globalThis.fetch = (url, options) => store.fetch(url, options);
  const stop = new AbortController();
  const progress = [];
  const onProgress = (one) => {
    progress.push(one);
    if (faults.cancel) stop.abort();
    if (faults.late) store.now += 5000;
  };
  try {
    const checkpoint = await openCheckpoint(job_id, step, async (digests) => store.urls(digests), () => store.now, { pause_ms: 1 });
    const file = checkpoint.files.find((one) => one.path === path);
    const blob = await checkpoint.read(file, onProgress, stop.signal);
    const data = Buffer.from(await blob.arrayBuffer()).toString("base64");
    return { data, asked: store.asked, read: store.read, progress: [progress[0], progress.at(-1)] };
  } catch (error) {
    return { error: error.name === "Error" ? error.message : `${error.name}: ${error.message}`, asked: store.asked, read: store.read };
  }
}

function faultOf(text) {
  try {
    parseManifest(text, { job_id, step, epoch });
    return null;
  } catch (error) {
    return error.message;
  }
}

const answers = [];
for (const one of cases) answers.push(await answerOf(one));
// maxRSS would include the peak of the process that started this one, because exec keeps it.
const peak_mib = /VmHWM:\s+(\d+) kB/.exec(readFileSync("/proc/self/status", "utf8"))[1] / 1024;
console.log(JSON.stringify({ answers, faults: manifests.map(faultOf), names: paths.map(savedName), peak_mib }));
