/**
 * Jobs of one query, newest first, in pages by cursor.
 *
 * `loadMore` appends pages. The poller reads the first page again, and the pages in view that have live jobs: ended jobs
 * change only by an action of a user. An answer replaces all jobs of its range, so jobs that left the state disappear.
 *
 * The first page also brings the number of all jobs by state: once a minute, and after a listed job has changed its state.
 */
import { get, getIfChanged, withQuery } from "../core/api.js";
import { Poller } from "../core/polling.js";

const FIRST_PAGE = 50;
const NEXT_PAGE = 250;
const COUNTS_S = 60;
/** The API counts no further: `COUNTED_UP_TO` of functions/api/jobs/job_calls.py. */
const COUNTED_UP_TO = 100;
const ENDED = new Set(["complete", "failed", "canceled"]);

export const isEnded = (job) => ENDED.has(job.state);

/** Order of the API: by creation, then by id, the newest first. */
function compare(one, other) {
  if (one.created_at !== other.created_at) return other.created_at - one.created_at;
  return one.id === other.id ? 0 : one.id < other.id ? 1 : -1;
}

export class JobList extends Poller {
  /** `counts`: those of an earlier list, shown until the first answer. */
  constructor(query, counts = null) {
    super(() => this.readVisible());
    this.query = query;
    this.pages = [];
    this.rows = [];
    this.visible = { first: 0, last: FIRST_PAGE };
    this.loadingMore = false;
    this.counts = counts;
    this.countAfter_ms = 0;
  }

  /** Return the number of jobs in a state as a text, such as `7` or `99+`; "" while unknown. */
  countOf(state) {
    const known = this.counts?.[state];
    return known >= COUNTED_UP_TO ? `${COUNTED_UP_TO - 1}+` : String(known ?? "");
  }

  get loading() {
    return this.pages.length === 0 && this.error === null;
  }

  /** True while the API has jobs after the last row. */
  get more() {
    return this.pages.length > 0 && this.pages.at(-1).next !== null;
  }

  /** Each live job costs read units and changes with its heartbeats, every 30 s: 50 of them are read that often. */
  get busyInterval_s() {
    const live = this.rows.filter((job) => !isEnded(job)).length;
    return Math.min(30, Math.max(super.busyInterval_s, live * 0.6));
  }

  /** Tell which rows the reader sees. */
  show(first, last) {
    this.visible = { first, last };
  }

  /** Append the next page. */
  async loadMore() {
    if (!this.more || this.loadingMore) return;
    this.loadingMore = true;
    this.tell();
    try {
      const before = this.pages.at(-1);
      const page = { cursor: before.next, after: this.rows.at(-1) ?? null, limit: NEXT_PAGE };
      const answer = await get("/jobs", this.request(page));
      this.pages.push(page);
      this.absorb(page, answer);
    } catch (error) {
      if (error.status === undefined) throw error;
      this.wantsMore = error.passing;
      if (!error.passing) this.error = error;
    }
    this.loadingMore = false;
    this.tell();
  }

  request({ cursor, limit }, counts = null) {
    return { ...this.query, order: "desc", limit, cursor, counts };
  }

  async readVisible() {
    if (this.pages.length === 0) this.pages.push({ cursor: null, after: null, limit: FIRST_PAGE });
    let changed = false;
    for (const page of this.pages.filter((one, index) => index === 0 || this.isLiveInView(one))) {
      const counts = page === this.pages[0] && !this.query.queue && performance.now() >= this.countAfter_ms;
      const path = withQuery("/jobs", this.request(page, counts || null));
      const answer = await getIfChanged(path, page.etags?.[path]);
      if (answer.changed) {
        // An earlier answer of the path with or without counts is no longer what the rows show.
        page.etags = { [path]: answer.etag };
        if (this.absorb(page, answer.data)) this.countAfter_ms = 0;
        this.counts = answer.data.counts ?? this.counts;
        changed = true;
      } else {
        page.etags[path] = answer.etag;
      }
      if (counts) this.countAfter_ms = performance.now() + COUNTS_S * 1000;
    }
    if (this.wantsMore) {
      this.wantsMore = false;
      this.loadMore();
    }
    return changed;
  }

  isLiveInView(page) {
    const seen = this.rows.slice(this.visible.first, this.visible.last);
    return seen.some((job) => !isEnded(job) && inRange(job, page));
  }

  /** Put an answer in place of the jobs of its range; return true if jobs came, left or changed their states. */
  absorb(page, { jobs, next_cursor }) {
    const last = next_cursor === null ? null : jobs.at(-1);
    const range = { after: page.after, last };
    const old = new Map(this.rows.map((job) => [job.id, job]));
    const kept = next_cursor !== null && !last ? this.rows : this.rows.filter((job) => !inRange(job, range));
    const listed = new Set(kept.map((job) => job.id));
    // An unchanged job stays the same object, so its row is not rendered again.
    const fresh = jobs.filter((job) => !listed.has(job.id)).map((job) => same(old.get(job.id), job));
    this.rows = [...kept, ...fresh].sort(compare);
    page.last = last;
    // New jobs move the end of the first page up; the cursor of the page after it stays valid.
    if (this.pages.at(-1) === page) page.next = next_cursor;
    return this.rows.length !== old.size || fresh.some((job) => old.get(job.id)?.state !== job.state);
  }
}

function inRange(job, { after, last }) {
  return (!after || compare(after, job) < 0) && (!last || compare(job, last) <= 0);
}

function same(old, job) {
  return old && JSON.stringify(old) === JSON.stringify(job) ? old : job;
}
