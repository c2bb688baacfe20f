/** The output of a training, live, with search. */
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { Empty, Failure, Loading } from "../components/states.js";
import { get } from "../core/api.js";
import { count, fullMoment } from "../core/format.js";
import { html } from "../core/html.js";
import { Poller, useFollowed } from "../core/polling.js";
import { go, hrefOf } from "../core/router.js";
import { isEnded } from "../jobs/job-list.js";

const PAGE = 1000;
const PAGES_AT_ONCE = 5;
const MAX_LINES = 100_000;
const LINE_PX = 20;
const MARGIN_LINES = 30;
const NEAR_END_PX = 40;
// Colors and cursor moves of terminals.
const ESCAPES = /\x1b\[[0-9;?]*[A-Za-z]|\r/g;

/** Lines from the begin of an attempt on; each read continues behind the last line. */
class LogFeed extends Poller {
  constructor(id, attempt, seat) {
    super(() => this.readOn());
    Object.assign(this, { id, attempt, seat, lines: [], cursor: null, full: false, loaded: false });
  }

  async readOn() {
    let changed = !this.loaded;
    // Lines that come before the end of the job may follow this read, if the end follows its begin.
    const { ended } = this;
    for (let page = 0; page < PAGES_AT_ONCE && !this.full; page += 1) {
      const query = { limit: PAGE, cursor: this.cursor, from_attempt: this.cursor ? null : this.attempt, seat: this.seat };
      const { lines, next_cursor } = await get(`/job/${this.id}/logs`, query);
      this.cursor = next_cursor ?? this.cursor;
      if (!lines.length) break;
      this.lines = [...this.lines, ...lines.map((line) => ({ ...line, text: line.text.replace(ESCAPES, "") }))];
      this.full = this.lines.length >= MAX_LINES;
      changed = true;
      this.again ||= page === PAGES_AT_ONCE - 1;
    }
    this.loaded = true;
    if (ended && !this.again) this.pause_s = 600;
    return changed;
  }
}

/** Show the log from the attempt on that the address names, else from the newest. */
export function Log({ job, attempts, query }) {
  const elastic = Boolean(job.nodes);
  const seat = elastic ? Number(query.node ?? 0) : null;
  const epochs = (attempts ?? []).filter((one) => !elastic || one.seat === seat).map((one) => one.epoch);
  // The first shown attempt of a node stays: a new attempt continues the same log. Each node numbers its attempts alone.
  const first = useMemo(() => epochs.at(-1) ?? (elastic ? 1 : job.epoch), [seat, attempts === null]);
  const attempt = query.attempt ? Number(query.attempt) : first;
  const feed = useMemo(() => (attempts === null ? null : new LogFeed(job.id, attempt, seat)), [job.id, attempt, seat, attempts === null]);
  useEffect(() => {
    if (!feed) return;
    feed.ended = isEnded(job);
    if (feed.loaded) feed.refresh();
  }, [feed, job.state]);
  useFollowed(feed);
  const change = (changed) => go(hrefOf(`/jobs/${job.id}`, { ...query, ...changed }).slice(1), { replace: true });
  const [text, setText] = useState("");
  const words = text.toLowerCase();
  const found = useMemo(() => (feed ? (words ? feed.lines.filter((line) => line.text.toLowerCase().includes(words)) : feed.lines) : []), [feed?.lines, words]);

  return html`<section class="log" aria-label="Log">
    <div class="curve-tools">
      <input type="search" class="log-search" placeholder="Search in the log" aria-label="Search in the log" value=${text} onInput=${(event) => setText(event.target.value)} />
      ${words && html`<output class="soft">${count(found.length)} of ${count(feed?.lines.length ?? 0)} lines</output>`}
      <label class="tool"><span>From attempt</span>
        <select value=${String(attempt)} onChange=${(event) => change({ attempt: event.target.value })}>
          ${[...new Set([...epochs, attempt])].sort((a, b) => a - b).map((epoch) => html`<option key=${epoch} value=${String(epoch)}>${epoch}</option>`)}
        </select></label>
      ${elastic && html`<label class="tool"><span>Node</span><select value=${String(seat)} onChange=${(event) => change({ node: event.target.value, attempt: "" })}>
          ${Array.from({ length: job.nodes.max }, (_, index) => html`<option key=${index} value=${String(index)}>${index}</option>`)}
        </select></label>`}
    </div>
    ${feed?.error && html`<${Failure} error=${feed.error} retry=${feed.refresh} />`}
    ${(!feed || !feed.loaded) && !feed?.error && html`<${Loading} rows=${8} label="Loading the log" />`}
    ${feed?.loaded && feed.lines.length === 0 && html`<${Empty} title="No output yet"><p>${isEnded(job) ? "The training printed nothing." : "Lines appear here as the training prints them."}</p><//>`}
    ${feed?.lines.length > 0 && html`<${Lines} lines=${found} words=${words} />`}
    ${feed?.full && html`<p class="soft">The first ${count(MAX_LINES)} lines are shown; <code>baton logs ${job.id}</code> prints all of them.</p>`}
  </section>`;
}

/** Show lines; only those on the screen are in the document. While the end is in view, new lines move it. */
function Lines({ lines, words }) {
  const scroller = useRef(null);
  const following = useRef(true);
  const [range, setRange] = useState({ first: 0, last: 120 });
  const measure = () => {
    if (!scroller.current) return;
    const { scrollTop, clientHeight, scrollHeight } = scroller.current;
    following.current = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    const first = Math.max(0, Math.floor(scrollTop / LINE_PX) - MARGIN_LINES);
    const last = Math.ceil((scrollTop + clientHeight) / LINE_PX) + MARGIN_LINES;
    setRange((old) => (old.first === first && old.last === last ? old : { first, last }));
  };
  useLayoutEffect(() => {
    if (following.current) scroller.current.scrollTop = scroller.current.scrollHeight;
    measure();
  }, [lines]);
  useEffect(() => {
    const observer = new ResizeObserver(measure);
    observer.observe(scroller.current);
    return () => observer.disconnect();
  }, []);
  return html`<div class="log-lines" ref=${scroller} onScroll=${measure} tabindex="0" role="log" aria-label="Lines" aria-live="off">
    <div class="log-space" style=${{ height: `${lines.length * LINE_PX}px` }}>
      ${lines.slice(range.first, range.last).map((line, offset) => {
        const index = range.first + offset;
        return html`<div class="log-line" key=${`${line.epoch}-${line.line}`} style=${{ transform: `translateY(${index * LINE_PX}px)` }} title=${fullMoment(line.at)}>
          <span class="log-epoch" aria-hidden="true">${line.epoch}</span><span class="log-number" aria-hidden="true">${line.line + 1}</span><span class="log-text"><${Marked} text=${line.text} words=${words} /></span>
        </div>`;
      })}
    </div>
  </div>`;
}

function Marked({ text, words }) {
  if (!words) return text;
  const parts = [];
  const lower = text.toLowerCase();
  let done = 0;
  for (let at = lower.indexOf(words); at >= 0; at = lower.indexOf(words, at + words.length)) {
    parts.push(text.slice(done, at), html`<mark key=${at}>${text.slice(at, at + words.length)}</mark>`);
    done = at + words.length;
  }
  return [...parts, text.slice(done)];
}
