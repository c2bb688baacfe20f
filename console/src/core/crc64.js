/** CRC-64/NVME, the checksum that S3 keeps of each object. Two 32-bit halves: 64-bit numbers of JavaScript are slow. */

const LOW = 0xac4bc9b5;
const HIGH = 0x9a6c9329;
const table = makeTable();

/** Checksum of bytes that come in pieces. */
export class Crc64 {
  constructor() {
    this.low = this.high = 0xffffffff;
  }

  /** Add the bytes of a Uint8Array. */
  add(bytes) {
    let { low, high } = this;
    for (let at = 0; at < bytes.length; at += 1) {
      const place = ((low ^ bytes[at]) & 0xff) * 2;
      low = ((low >>> 8) | (high << 24)) ^ table[place];
      high = (high >>> 8) ^ table[place + 1];
    }
    Object.assign(this, { low, high });
  }

  /** Return the checksum in the form of S3: base64 of eight bytes. */
  get base64() {
    const view = new DataView(new ArrayBuffer(8));
    view.setUint32(0, ~this.high);
    view.setUint32(4, ~this.low);
    return btoa(String.fromCharCode(...new Uint8Array(view.buffer)));
  }
}

function makeTable() {
  const made = new Uint32Array(512);
  for (let byte = 0; byte < 256; byte += 1) {
    let low = byte;
    let high = 0;
    for (let bit = 0; bit < 8; bit += 1) {
      const odd = low & 1;
      low = (low >>> 1) | (high << 31);
      high >>>= 1;
      if (odd) {
        low ^= LOW;
        high ^= HIGH;
      }
    }
    made[byte * 2] = low;
    made[byte * 2 + 1] = high;
  }
  return made;
}
