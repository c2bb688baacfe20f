/** Records of a ring in numbers: fill, counts, processes, rates, and why a side waits. Pure. */
import { count, counted, duration, number } from "../core/format.js";

const WINDOW_S = 30;
const MAX_SAMPLES = 120;
const LATE_S = 15;
const DEAD_AFTER_LEASES = 1.5;

/** Return the content of a record; empty for a damaged record, as all programs of a ring read records. */
function contentOf({ data }) {
  try {
    return JSON.parse(atob(data));
  } catch {
    return {};
  }
}

const sum = (items, valueOf) => items.reduce((total, one) => total + valueOf(one), 0);

/** Return the state of a ring from records of the API. A list of rings lacks the records of writers and readers. */
export function readRing(records) {
  const found = new Map(records.map((record) => [record.key, { version: record.version, ...contentOf(record) }]));
  const below = (prefix) =>
    [...found].filter(([key]) => key.startsWith(prefix)).map(([key, content]) => ({ key, name: key.slice(prefix.length), ...content }));
  const { cap = 0, mode = "rolling", min_size = 1, max_ahead, samples_per_insert, pack = 1, lease_s = 15, max_bytes, ...rest } = found.get("ring.json") ?? {};
  const pointer = found.get("pointer") ?? {};
  const flow = found.get("publisher");
  const { samples: departed = 0, left = {} } = found.get("read") ?? {};
  const seen = found.get("watched")?.seen ?? {};
  const readers = below("readers/");
  const writers = below("writers/").map((one) => {
    const [version, unchanged_s] = seen[one.key] ?? [];
    return { ...one, silent_s: version === one.version && unchanged_s > lease_s ? unchanged_s : 0 };
  });
  // A departing reader's count moves to the total before its record is deleted.
  const still = sum(readers, (one) => Math.max(0, (one.read ?? 0) - (left[one.mark] ?? 0)));
  return {
    settings: { cap, mode, min_size, max_ahead, samples_per_insert, pack, lease_s, max_bytes, ...rest },
    ahead: Math.max(max_ahead ?? cap, pack),
    flow: flow ?? null,
    manifest: pointer.manifest ?? 0,
    readable: pointer.readable ?? 0,
    inserted: pointer.inserted ?? 0,
    oldest_at: pointer.oldest_ms ? pointer.oldest_ms / 1000 : null,
    newest_at: pointer.newest_ms ? pointer.newest_ms / 1000 : null,
    finished: flow?.finished ?? 0,
    read: Math.max(flow?.read ?? 0, departed + still),
    damaged: below("quarantine/").length,
    writers,
    readers,
    /** Newest sign of life with a time: claims of samples and renewals of writers. */
    sign_at: Math.max(0, pointer.at_ms ?? 0, ...writers.map((one) => one.at_ms ?? 0)) / 1000,
  };
}

/** Return the limits `[least, most]` of the mean number of reads of a sample; null without limits. */
function readsPerInsert({ samples_per_insert: given }) {
  if (given === null || given === undefined) return null;
  return Array.isArray(given) ? given : [given, given];
}

/** Return why writers wait, as the writers decide; "" if no writer has to wait. */
export function whyWritersWait({ settings, flow, finished, readable, inserted, read, ahead }) {
  if (!flow) return "";
  if (finished >= ahead) return `${counted(finished, "finished sample")} wait to become readable; ${count(ahead)} is the limit`;
  const bounds = readsPerInsert(settings);
  if (!bounds || readable < settings.min_size || flow.starved) return "";
  const { mode, cap, pack, min_size } = settings;
  const taken = Math.max(1, flow.wanted ?? 0);
  const allowed = mode === "generation" ? taken + bounds[0] * cap : Math.max(taken, bounds[0] * pack);
  if ((inserted + finished - min_size) * bounds[0] - read <= allowed) return "";
  return `${count(read)} reads of ${counted(inserted, "sample")}; each is to be read ${number(bounds[0])} times first`;
}

/** Return why readers wait; "" if no reader has to wait. */
export function whyReadersWait({ settings, flow, readable, inserted, read }) {
  if (readable < settings.min_size) return `${count(readable)} of ${count(settings.min_size)} samples are readable, which the first read needs`;
  if (flow?.starved) return `every readable sample is too old or used up for ${counted(flow.starved, "reader")}`;
  const bounds = readsPerInsert(settings);
  if (!bounds || read + Math.max(1, flow?.wanted ?? 0) <= inserted * bounds[1]) return "";
  return `${count(read)} reads of ${counted(inserted, "sample")}; each may be read ${number(bounds[1])} times`;
}

/** Return the sample of one moment, for rates. */
export const sampleOf = (ring, at) => ({
  at,
  turns: ring.flow?.count ?? null,
  inserted: ring.inserted,
  read: ring.read,
  writers: Object.fromEntries(ring.writers.map((one) => [one.name, one])),
  readers: Object.fromEntries(ring.readers.map((one) => [one.name, one])),
});

/** Append a sample; a ring that was made anew begins a new series. */
export function addSample(samples, sample) {
  const last = samples.at(-1);
  if (last && sample.inserted < last.inserted) return [sample];
  return [...samples, sample].slice(-MAX_SAMPLES);
}

/** Return the growth per second of `valueOf(sample)` over the last half minute; null before the second sample. */
export function rateOf(all, now, valueOf) {
  // A writer or reader that came later has no value in earlier samples.
  const samples = all.filter((one) => valueOf(one) !== undefined);
  const last = samples.at(-1);
  if (!last) return null;
  const first = samples.findLast((one) => one.at <= last.at - WINDOW_S) ?? samples[0];
  const until = now - last.at > LATE_S ? now : last.at;
  return until - first.at < 1 ? null : Math.max(0, valueOf(last) - valueOf(first)) / (until - first.at);
}

/** Return the rates between successive samples: `[at, per second]`. */
export function ratesOf(samples, name) {
  return samples.slice(1).map((one, index) => [one.at, Math.max(0, one[name] - samples[index][name]) / Math.max(0.1, one.at - samples[index].at)]);
}

/** Return the mean reads of a sample now; null without new samples. */
export function reuseOf(samples) {
  const [first, last] = [samples.at(-WINDOW_S) ?? samples[0], samples.at(-1)];
  return last && last.inserted > first.inserted ? (last.read - first.read) / (last.inserted - first.inserted) : null;
}

/** Return whether processes work on the ring: "live", "silent", or "unknown" before the page can know. */
export function lifeOf(ring, samples, now) {
  if (!ring.flow) return "silent";
  const limit_s = DEAD_AFTER_LEASES * ring.settings.lease_s;
  const moved = samples.findLast((one, index) => index > 0 && one.turns !== samples[index - 1].turns);
  if (now - Math.max(ring.sign_at, moved?.at ?? 0) <= limit_s) return "live";
  return samples.length && now - samples[0].at > limit_s ? "silent" : "unknown";
}

/** Return a rate with its unit: `12.4/s`, `0.2/s`. */
export const perSecond = (rate) => (rate === null ? "" : `${rate >= 100 ? count(Math.round(rate)) : number(Number(rate.toFixed(1)))}/s`);

/** Return the state of a writer in words. */
export function writerState(writer) {
  if (writer.dead) return "dead";
  return writer.silent_s ? `silent for ${duration(writer.silent_s)}` : "works";
}
