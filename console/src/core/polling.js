/**
 * Followed data: one conditional request per resource and interval.
 *
 * The interval begins with 2 s. It grows to 5 s while the data change, to 30 s for a long list and for calls that read
 * much, and to 15 s while the data do not change. A hidden tab asks nothing. While the control plane is away, the last
 * data stay and the requests go on with the same pauses. Views that follow the same path share its requests.
 */
import { useEffect, useMemo, useState } from "preact/hooks";
import { getIfChanged } from "./api.js";
import { session } from "./session.js";
import { signal } from "./signal.js";

export const FIRST_INTERVAL_S = 2;
const BUSY_INTERVAL_S = 5;
export const LAST_INTERVAL_S = 15;
/** Of rings, which read each process of a ring: below the 15 s after which a rate without a sample falls (ring-data.js). */
export const RING_INTERVAL_S = 12;
/** Of parts of a job's page whose data always change, and which read each node or machine (bench/costs/cost_model.py). */
export const PART_INTERVAL_S = 30;
const GROWTH = 1.5;

/** When the control plane stopped answering, by `performance.now()`; null while it answers. */
export const awaySince = signal(null);
const pollers = new Set();

/** Reads again and again while somebody follows. `read` returns true if it changed data, and throws ApiError. */
export class Poller {
  constructor(read) {
    this.read = read;
    this.error = null;
    this.followers = new Set();
    this.interval_s = FIRST_INTERVAL_S;
    this.refresh = this.refresh.bind(this);
  }

  /** Call `tell` after each change until the returned function is called; begins to read with the first follower. */
  follow(tell) {
    this.followers.add(tell);
    pollers.add(this);
    if (this.followers.size === 1) this.refresh();
    return () => {
      this.followers.delete(tell);
      if (this.followers.size > 0) return;
      clearTimeout(this.timer);
      pollers.delete(this);
      this.onEnd?.();
    };
  }

  /** Read now, and begin with the shortest interval again. */
  refresh() {
    this.interval_s = FIRST_INTERVAL_S;
    clearTimeout(this.timer);
    if (this.asking) this.again = true;
    else if (!document.hidden && this.followers.size > 0) this.ask();
  }

  get busyInterval_s() {
    return BUSY_INTERVAL_S;
  }

  tell() {
    for (const tell of [...this.followers]) tell();
  }

  async ask() {
    this.asking = true;
    let changed = false;
    try {
      changed = await this.tryToRead();
    } finally {
      // A fault of the page itself, thrown on from here, ends no view: the next request follows.
      this.asking = false;
      this.goOn(changed);
    }
  }

  goOn(changed) {
    if (this.followers.size === 0) return;
    if (changed) this.tell();
    this.interval_s = Math.min(changed ? this.busyInterval_s : LAST_INTERVAL_S, this.interval_s * GROWTH);
    if (this.again) {
      this.again = false;
      this.refresh();
    } else if (!document.hidden && session.value.state !== "out") {
      this.timer = setTimeout(() => this.ask(), Math.max(this.interval_s, this.pause_s ?? 0) * 1000);
    }
  }

  async tryToRead() {
    this.pause_s = 0;
    try {
      const changed = await this.read();
      awaySince.value = null;
      const recovered = this.error !== null;
      this.error = null;
      return changed || recovered;
    } catch (error) {
      if (error.status === undefined) throw error;
      if (error.passing) {
        // A control plane that asks for a pause is not away.
        if (error.status !== 429) awaySince.value ??= performance.now() / 1000;
        this.pause_s = error.retry_after_s;
        return false;
      }
      const same = this.error?.code === error.code;
      this.error = error;
      return !same;
    }
  }
}

/** Render the component again after each change of a poller, which it follows while it is shown. */
export function useFollowed(poller) {
  const [, render] = useState(0);
  useEffect(() => poller?.follow(() => render((count) => count + 1)), [poller]);
}

const resources = new Map();
const NOTHING = { data: null, error: null, loading: false, refresh() {} };

class PolledResource extends Poller {
  constructor(path, busyInterval_s) {
    super(async () => {
      const answer = await getIfChanged(path, this.etag);
      if (answer.changed) Object.assign(this, { data: answer.data, etag: answer.etag });
      return answer.changed;
    });
    this.data = null;
    this.busy_s = busyInterval_s;
    this.onEnd = () => resources.delete(path);
  }

  get busyInterval_s() {
    return this.busy_s;
  }

  get loading() {
    return this.data === null && this.error === null;
  }
}

/**
 * Follow `path` (null: nothing); returns `{data, error, loading, refresh}` and renders again after each change.
 *
 * `busyInterval_s`: longest interval while the data change.
 */
export function useResource(path, busyInterval_s = BUSY_INTERVAL_S) {
  const followed = useMemo(() => {
    if (!path) return null;
    if (!resources.has(path)) resources.set(path, new PolledResource(path, busyInterval_s));
    return resources.get(path);
  }, [path]);
  useFollowed(followed);
  return followed ?? NOTHING;
}

/** Read all followed data at once, after an action that changes them. */
export function refreshAll() {
  for (const poller of pollers) poller.refresh();
}

document.addEventListener("visibilitychange", () => {
  for (const poller of pollers) {
    if (document.hidden) clearTimeout(poller.timer);
    else poller.refresh();
  }
});
