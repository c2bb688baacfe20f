/** Decoding of a chunk's stored bytes, and their comparison with the chunk's BLAKE3. docs/checkpoints.md has the codecs. */
import { blake3 } from "@noble/hashes/blake3.js";
import { decompress } from "fzstd";

/** The page answers its reader between pieces of this size. */
const PIECE_BYTES = 2 ** 20;

/** Return the BLAKE3 of bytes in hex, without keeping the page busy. */
export async function digestOf(bytes, signal) {
  const hasher = blake3.create();
  for (let at = 0; at < bytes.length; at += PIECE_BYTES) {
    if (at) await rest();
    signal?.throwIfAborted();
    hasher.update(bytes.subarray(at, at + PIECE_BYTES));
  }
  return Array.from(hasher.digest(), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Return the decoded bytes of a chunk, null if they do not match its digest.
 *
 * `base`: decoded bytes of the base of a `delta`. Allocates the chunk's size, whatever the stored bytes claim.
 */
export async function decode(chunk, stored, base, signal) {
  const bytes = decoded(chunk, stored, base);
  return bytes && (await digestOf(bytes, signal)) === chunk.blake3 ? bytes : null;
}

function decoded({ codec, size_bytes, width }, stored, base) {
  if (codec === "zeros") return new Uint8Array(size_bytes);
  if (codec === "raw") return stored;
  const bytes = fromPlanes(decompressed(stored, size_bytes), width);
  if (bytes && base) for (let at = 0; at < size_bytes; at += 1) bytes[at] ^= base[at];
  return bytes;
}

/** Return the content of a zstd frame, null for other bytes. The package throws errors of several classes for these. */
function decompressed(stored, size_bytes) {
  try {
    const bytes = decompress(stored, new Uint8Array(size_bytes));
    return bytes.length === size_bytes ? bytes : null;
  } catch {
    return null;
  }
}

function fromPlanes(planes, width) {
  if (width === 1 || !planes) return planes;
  const bytes = new Uint8Array(planes.length);
  const elements = Math.floor(planes.length / width);
  for (let plane = 0; plane < width; plane += 1) {
    const from = plane * elements;
    for (let index = 0; index < elements; index += 1) bytes[index * width + plane] = planes[from + index];
  }
  bytes.set(planes.subarray(elements * width), elements * width);
  return bytes;
}

const rest = () => globalThis.scheduler?.yield?.() ?? new Promise((done) => setTimeout(done));
