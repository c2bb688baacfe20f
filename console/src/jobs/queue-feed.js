/** The queue and the fleets of a waiting job, followed while its page is open. */
import { useMemo } from "preact/hooks";
import { getIfChanged, withQuery } from "../core/api.js";
import { html } from "../core/html.js";
import { PART_INTERVAL_S, Poller, useFollowed } from "../core/polling.js";
import { offsetOf } from "../fleet/data.js";
import { waitingFor } from "./waiting.js";

/** Jobs in an answer. With as many a working day of the page costs a cent (bench/costs/cost_model.py). */
const LISTED = 40;

/** Reads each answer once, and then one of them per interval in turn. */
class QueueFeed extends Poller {
  constructor({ id, queue }) {
    super(() => this.readNext());
    const listed = (status) => withQuery("/jobs", { status, queue, limit: LISTED });
    this.paths = { machines: `/job/${id}/machines`, pending: listed("pending"), running: listed("running") };
    this.etags = {};
    this.data = {};
    this.turn = 0;
  }

  /** Running jobs tell whether workers are busy; a fleet tells so itself. */
  get names() {
    return this.data.machines?.fleets.length === 0 ? ["machines", "pending", "running"] : ["machines", "pending"];
  }

  async readNext() {
    this.pause_s = PART_INTERVAL_S;
    const unread = () => (document.hidden ? undefined : this.names.find((name) => !this.data[name]));
    let changed = false;
    for (let name = unread() ?? this.names[this.turn++ % this.names.length]; name; name = unread()) {
      const answer = await getIfChanged(this.paths[name], this.etags[name]);
      this.etags[name] = answer.etag;
      if (!answer.changed) continue;
      this.data[name] = answer.data;
      changed = true;
    }
    return changed;
  }
}

/** Show what else delays a job that a worker may claim. `attempts`: null until they are loaded. */
export function QueueNote({ job, now, attempts }) {
  const feed = useMemo(() => new QueueFeed(job), [job.id]);
  useFollowed(feed);
  const { machines } = feed.data;
  const sentences = waitingFor(job, now, attempts, feed.data, machines && now + offsetOf(machines));
  if (feed.error) return html`<p class="inline-error">${feed.error.message}</p>`;
  if (!sentences.length) return null;
  return html`<p>${sentences.map(([before, fleet, after]) => html`${before}${fleet && html`<a href="#/fleets/${fleet}">${fleet}</a>`}${after} `)}</p>`;
}
