/** The manifest of a checkpoint: files, chunks and packs, and the ranges of packs that a file needs. Pure. */
import { DownloadError } from "./errors.js";

/** Bound of a manifest, as in the command line. */
export const MAX_MANIFEST_BYTES = 16 * 2 ** 20;
const VERSION = 2;
const MAX_CHUNK_BYTES = 2 ** 30;
const MAX_FILE_BYTES = 2 ** 40;
const MAX_PACK_BYTES = 5 * 2 ** 30;
const WIDTHS = [1, 2, 4, 8];
const DIGEST = /^[0-9a-f]{64}$/;
/** Bound of one request. Only a single chunk may exceed the bound. */
const MAX_RANGE_BYTES = 16 * 2 ** 20;
/** Bytes that one request reads in vain, because another request would cost more. */
const MAX_GAP_BYTES = 2 ** 20;

/**
 * Return `{packs, chunks, files}` of a manifest whose digest is verified, with the defaults filled in.
 *
 * `expected`: `{job_id, step, epoch}`. Throws DownloadError if a file could not be assembled as the manifest says.
 */
export function parseManifest(text, expected) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw bad("it is not JSON");
  }
  if (found?.version !== VERSION) throw new DownloadError(`The manifest has version ${found?.version}; this page reads version ${VERSION}. Load the page again.`);
  for (const name of ["job_id", "step", "epoch"]) require(found[name] === expected[name], `its ${name} is ${found[name]}`);
  for (const name of ["packs", "chunks", "files"]) require(Array.isArray(found[name]), `it has no ${name}`);
  for (const pack of found.packs) require(DIGEST.test(pack.blake3) && within(pack.size_bytes, 0, MAX_PACK_BYTES), "a pack is malformed");
  const chunks = found.chunks.map(filled);
  chunks.forEach((chunk) => checkChunk(chunk, chunks, found.packs));
  for (const file of found.files) {
    require(typeof file.path === "string" && within(file.size_bytes, 0, MAX_FILE_BYTES) && Array.isArray(file.chunks), "a file is malformed");
    require(file.chunks.every((index) => within(index, 0, chunks.length - 1)), "a file names an unknown chunk");
    require(file.chunks.reduce((sum, index) => sum + chunks[index].size_bytes, 0) === file.size_bytes, "the chunks of a file do not add up to its size");
  }
  return { packs: found.packs, chunks, files: found.files };
}

/** Return the stored chunks that a file needs: its own, and the bases of its deltas. */
export function neededBy(file, chunks) {
  const needed = new Set(file.chunks);
  for (const index of file.chunks) if (chunks[index].base !== null) needed.add(chunks[index].base);
  return [...needed].filter((index) => chunks[index].pack !== null);
}

/** Return the ranges of packs that contain the chunks: `[{pack, offset, size, indices}]`. */
export function planRanges(indices, chunks) {
  const ordered = [...indices].sort((a, b) => chunks[a].pack - chunks[b].pack || chunks[a].offset - chunks[b].offset);
  const ranges = [];
  for (const index of ordered) {
    const { pack, offset, length_bytes } = chunks[index];
    const last = ranges.at(-1);
    const end = offset + length_bytes;
    if (last?.pack === pack && offset - (last.offset + last.size) <= MAX_GAP_BYTES && end - last.offset <= MAX_RANGE_BYTES) {
      last.size = Math.max(last.size, end - last.offset);
      last.indices.push(index);
    } else {
      ranges.push({ pack, offset, size: length_bytes, indices: [index] });
    }
  }
  return ranges;
}

/** Return the range of one chunk. */
export const rangeOf = ({ pack, offset, length_bytes }) => ({ pack, offset, size: length_bytes });

function filled({ blake3, size_bytes, pack = null, offset = 0, length_bytes = size_bytes, codec = "raw", width = 1, base = null }) {
  return { blake3, size_bytes, pack, offset, length_bytes: length_bytes ?? size_bytes, codec, width, base };
}

function checkChunk(chunk, chunks, packs) {
  const { codec, pack, base, size_bytes, length_bytes } = chunk;
  require(DIGEST.test(chunk.blake3) && within(size_bytes, 1, MAX_CHUNK_BYTES) && WIDTHS.includes(chunk.width), "a chunk is malformed");
  require(["raw", "zeros", "planes", "delta"].includes(codec), `a chunk has the codec ${codec}`);
  require((codec === "zeros") === (pack === null) && (codec === "delta") === (base !== null), "a chunk does not fit its codec");
  if (pack !== null) {
    const fits = within(pack, 0, packs.length - 1) && within(length_bytes, 1, MAX_CHUNK_BYTES) && within(chunk.offset, 0, packs[pack].size_bytes - length_bytes);
    require(fits && (codec !== "raw" || length_bytes === size_bytes), "a chunk does not lie in its pack");
  }
  if (base !== null) {
    const sound = within(base, 0, chunks.length - 1) && chunks[base].codec !== "delta" && chunks[base].size_bytes === size_bytes;
    require(sound, "a chunk has no fitting base");
  }
}

const within = (value, least, most) => Number.isSafeInteger(value) && value >= least && value <= most;

function require(holds, reason) {
  if (!holds) throw bad(reason);
}

const bad = (reason) => new DownloadError(`The manifest of the checkpoint cannot be used: ${String(reason).slice(0, 100)}.`);
