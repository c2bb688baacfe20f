// Moves directories as Kelpie's worker does, on the same SDK: `node mirror.mjs ENDPOINT`.
//
// Each line of standard input is a command in JSON, {"act": "save" or "fetch", "directory", "bucket", "prefix"}; each is
// answered by one line with the wall and CPU seconds that it took and the bytes, or with the error. The first line says
// that it is ready. No compression, and whatever else the SDK does by itself (CRC-32 and SHA-256 of each part).
import { createReadStream, createWriteStream } from "node:fs";
import { mkdir, readdir, stat } from "node:fs/promises";
import path from "node:path";
import { createInterface } from "node:readline";
import { pipeline } from "node:stream/promises";

import { GetObjectCommand, ListObjectsV2Command, S3Client } from "@aws-sdk/client-s3";
import { Upload } from "@aws-sdk/lib-storage";

const PART_BYTES = 10 * 1024 * 1024;
const PARTS_IN_FLIGHT = 8;
const FILES_AT_ONCE = 20;

const client = new S3Client({
  endpoint: process.argv[2],
  region: "us-east-1",
  forcePathStyle: true,
  credentials: { accessKeyId: "bench", secretAccessKey: "bench" },
});

async function inBatches(items, act) {
  for (let at = 0; at < items.length; at += FILES_AT_ONCE) {
    await Promise.all(items.slice(at, at + FILES_AT_ONCE).map(act));
  }
}

async function save({ directory, bucket, prefix }) {
  const entries = await readdir(directory, { recursive: true, withFileTypes: true });
  const files = entries.filter((entry) => entry.isFile()).map((entry) => path.join(entry.parentPath, entry.name));
  let bytes = 0;
  await inBatches(files, async (file) => {
    bytes += (await stat(file)).size;
    const key = prefix + path.relative(directory, file);
    await new Upload({
      client,
      params: { Bucket: bucket, Key: key, Body: createReadStream(file) },
      queueSize: PARTS_IN_FLIGHT,
      partSize: PART_BYTES,
    }).done();
  });
  return bytes;
}

async function fetchAll({ directory, bucket, prefix }) {
  const keys = [];
  let token;
  do {
    const page = await client.send(
      new ListObjectsV2Command({ Bucket: bucket, Prefix: prefix, ContinuationToken: token }),
    );
    keys.push(...(page.Contents ?? []).map((entry) => entry.Key));
    token = page.NextContinuationToken;
  } while (token);
  let bytes = 0;
  await inBatches(keys, async (key) => {
    const file = path.join(directory, key.slice(prefix.length));
    await mkdir(path.dirname(file), { recursive: true });
    const answer = await client.send(new GetObjectCommand({ Bucket: bucket, Key: key }));
    bytes += answer.ContentLength;
    await pipeline(answer.Body, createWriteStream(file));
  });
  return bytes;
}

const acts = { save, fetch: fetchAll };
console.log(JSON.stringify({ ready: true }));
for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line);
  const cpuBefore = process.cpuUsage();
  const began = process.hrtime.bigint();
  try {
    const bytes = await acts[command.act](command);
    const wall = process.hrtime.bigint() - began;
    const cpu = process.cpuUsage(cpuBefore);
    console.log(JSON.stringify({ wall_s: Number(wall) / 1e9, cpu_s: (cpu.user + cpu.system) / 1e6, bytes }));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error.stack ?? error) }));
  }
}
