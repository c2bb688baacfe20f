/** The server's time, which does not depend on the clock of this machine. All times in seconds. */

let offset_s = 0;
const origin_s = Date.now() / 1000 - performance.now() / 1000;

/** Take the server's time from an answer's `Date` header, if the answer has one. */
export function learnTime(answer) {
  const said = Date.parse(answer.headers.get("date") ?? "");
  // The header has whole seconds, so smaller differences mean nothing.
  if (Number.isFinite(said) && Math.abs(said / 1000 - now_s()) > 2) offset_s += said / 1000 - now_s();
}

/** Return the server's time; it advances with the monotonic clock, so a changed clock of this machine does not matter. */
export function now_s() {
  return origin_s + performance.now() / 1000 + offset_s;
}
