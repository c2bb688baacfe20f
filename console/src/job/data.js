/** Data of one job. A running job costs one request per interval; lists are read again only after the job has changed. */
import { useEffect, useMemo, useState } from "preact/hooks";
import { getIfChanged, getPages, withQuery } from "../core/api.js";
import { now_s } from "../core/clock.js";
import { Poller, useFollowed } from "../core/polling.js";

const MAX_PAGES = 20;
const RETRY_MS = 5000;
const ENDED_INTERVAL_S = 600;
const UNREAD = { items: null, more: false, error: null };

/** Return a text that changes whenever attempts, events or checkpoints of the job may have changed. */
export const versionOf = (job) =>
  job ? [job.state, job.epoch, job.rev, job.updated_at, job.checkpoint_step, job.counters.attempts].join(" ") : null;

/**
 * Read all pages of a list again after each change of `version`; returns `{items, more, error}`.
 *
 * `name`: field of the answer with the items. `items` is null until they are read, and keeps the last items after a
 * refusal. `more`: the list has more than the 20,000 items that are read.
 */
export function useList(path, name, version) {
  const [found, set] = useState(UNREAD);
  useEffect(() => {
    if (version === null) return undefined;
    let current = true;
    let timer;
    const read = async () => {
      try {
        const page = await getPages(path, name, MAX_PAGES);
        if (current) set({ path, items: page[name], more: Boolean(page.next_cursor), error: null });
      } catch (error) {
        if (error.status === undefined) throw error;
        if (current && error.passing) timer = setTimeout(read, RETRY_MS);
        else if (current) set((old) => ({ ...(old.path === path ? old : UNREAD), path, error }));
      }
    };
    read();
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [path, name, version]);
  return found.path === path ? found : UNREAD;
}

/** Curves of a job for one query. While the server still summarizes, the next request follows at once. */
class CurveFeed extends Poller {
  constructor(id, query) {
    super(() => this.readAll());
    this.path = withQuery(`/job/${id}/curves`, query);
    this.data = null;
  }

  async readAll() {
    let changed = false;
    do {
      const answer = await getIfChanged(this.path, this.etag);
      if (answer.changed) {
        Object.assign(this, { data: answer.data, etag: answer.etag });
        if (!this.data.complete) this.tell();
        changed = true;
      }
    } while (!this.data.complete && this.followers.size > 0);
    const { next_at } = this.data;
    this.pause_s = next_at === null ? 0 : Math.max(0, next_at - now_s());
    if (this.ended) this.pause_s = ENDED_INTERVAL_S;
    return changed;
  }
}

const feeds = new Map();

function feedOf(id, query) {
  const key = `${id} ${JSON.stringify(query)}`;
  if (!feeds.has(key)) {
    const feed = new CurveFeed(id, query);
    feed.onEnd = () => feeds.delete(key);
    feeds.set(key, feed);
  }
  return feeds.get(key);
}

/** Ask for curves before the job itself is known; `useCurves` with the same query shares the answer. */
export function useEarlyCurves(id, query) {
  useFollowed(useMemo(() => (query ? feedOf(id, query) : null), [id, JSON.stringify(query)]));
}

/** Follow the curves of a job; returns `{data, error}`, where `data` are the last curves also while others load. */
export function useCurves(job, query) {
  const key = JSON.stringify(query);
  const feed = useMemo(() => (job ? feedOf(job.id, query) : null), [job?.id, key]);
  useFollowed(feed);
  const ended = Boolean(job && ["complete", "failed", "canceled"].includes(job.state));
  useEffect(() => {
    if (!feed) return;
    feed.ended = ended;
    if (feed.data) feed.refresh();
  }, [feed, ended]);
  const [last, setLast] = useState(null);
  useEffect(() => {
    if (feed?.data) setLast({ id: job.id, data: feed.data });
  }, [feed?.data]);
  return { data: feed?.data ?? (last?.id === job?.id ? last?.data : null) ?? null, error: feed?.error ?? null };
}
