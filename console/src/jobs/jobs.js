import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Icon } from "../components/icon.js";
import { Empty, Failure, Loading } from "../components/states.js";
import { VirtualTable } from "../components/virtual.js";
import { count } from "../core/format.js";
import { html } from "../core/html.js";
import { useFollowed } from "../core/polling.js";
import { go, hrefOf } from "../core/router.js";
import { titleOf } from "./actions.js";
import { JobList } from "./job-list.js";
import { COLUMNS, JobRow } from "./row.js";

const STATES = [
  ["", "All"],
  ["running", "Running"],
  ["pending", "Waiting"],
  ["paused", "Paused"],
  ["complete", "Complete"],
  ["failed", "Failed"],
  ["canceled", "Stopped"],
];
const NARROW = matchMedia("(max-width: 1010px)");
const TYPING_MS = 250;

/** List jobs, live. The address keeps the filters: `status` and `queue` go to the API, `text` selects among loaded jobs. */
export function Jobs({ query }) {
  const { status, queue, text = "" } = query;
  const before = useRef(null);
  const list = useMemo(() => (before.current = new JobList({ status, queue }, before.current?.counts)), [status, queue]);
  useFollowed(list);
  const rowHeight = useRowHeight();
  const rows = useMemo(() => select(list.rows, text), [list.rows, text]);
  const filtered = Boolean(status || queue || text);
  const change = (changed) => go(hrefOf("/jobs", { ...query, ...changed }).slice(1), { replace: true });

  return html`<div class="page page-full">
    <div class="page-head">
      <h1>Jobs</h1>
      <${Search} text=${text} onChange=${(value) => change({ text: value })} />
      <${QueueFilter} queue=${queue} rows=${list.rows} onChange=${(value) => change({ queue: value })} />
    </div>
    <div class="tabs" role="group" aria-label="State">
      ${STATES.map(
        ([value, label]) => html`<button key=${value} class="tab" aria-pressed=${(status ?? "") === value} onClick=${() => change({ status: value })}>${label}${!queue && list.countOf(value) && html` <span class="tab-count">${list.countOf(value)}</span>`}</button>`,
      )}
    </div>
    ${list.error && list.rows.length === 0 && html`<${Failure} error=${list.error} retry=${list.refresh} />`}
    ${list.loading && html`<${Loading} rows=${8} label="Loading jobs" />`}
    ${!list.loading && !list.error && rows.length === 0 && !list.more && html`<${NoJobs} filtered=${filtered} onClear=${() => go("/jobs", { replace: true })} />`}
    ${(rows.length > 0 || list.more) && html`<${VirtualTable}
      label="Jobs"
      columns=${COLUMNS}
      items=${rows}
      keyOf=${(job) => job.id}
      rowHeight=${rowHeight}
      row=${(job) => html`<${JobRow} job=${job} />`}
      loaded=${list.rows.length}
      total=${list.more ? -1 : rows.length + 1}
      onVisible=${(first, last) => list.show(first, last)}
      onEnd=${() => list.loadMore()}
      footer=${html`<${Footer} list=${list} shown=${rows.length} text=${text} />`}
    />`}
  </div>`;
}

function useRowHeight() {
  const [narrow, setNarrow] = useState(NARROW.matches);
  useEffect(() => {
    const change = () => setNarrow(NARROW.matches);
    NARROW.addEventListener("change", change);
    return () => NARROW.removeEventListener("change", change);
  }, []);
  return narrow ? 108 : 64;
}

/** Return the jobs whose title, id, recipe, machine or tags contain each word of the text. */
function select(rows, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 0) return rows;
  return rows.filter((job) => {
    const tags = Object.entries(job.tags).map(([name, value]) => `${name}=${value}`);
    const place = [titleOf(job), job.id, job.recipe, job.machine_id, job.reason?.code, ...tags].join("\n").toLowerCase();
    return words.every((word) => place.includes(word));
  });
}

function Search({ text, onChange }) {
  const [typed, setTyped] = useState(text);
  useEffect(() => setTyped(text), [text]);
  useEffect(() => {
    if (typed === text) return undefined;
    const timer = setTimeout(() => onChange(typed), TYPING_MS);
    return () => clearTimeout(timer);
  }, [typed]);
  return html`<label class="search"><${Icon} name="search" /><span class="visually-hidden">Search jobs</span>
    <input type="search" placeholder="Name, tag, id, machine" value=${typed} onInput=${(event) => setTyped(event.target.value)} />
  </label>`;
}

function QueueFilter({ queue = "", rows, onChange }) {
  const [known, setKnown] = useState([]);
  useEffect(() => {
    const found = new Set([...known, ...rows.map((job) => job.queue), ...(queue ? [queue] : [])]);
    if (found.size !== known.length) setKnown([...found].sort());
  }, [rows, queue]);
  if (known.length < 2 && !queue) return null;
  return html`<label class="choice"><span class="visually-hidden">Queue</span>
    <select value=${queue} onChange=${(event) => onChange(event.target.value)}>
      <option value="">All queues</option>
      ${known.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
    </select>
  </label>`;
}

function NoJobs({ filtered, onClear }) {
  if (filtered) {
    return html`<${Empty} icon="search" title="No job matches"><button class="button" onClick=${onClear}>Show all jobs</button><//>`;
  }
  return html`<${Empty} icon="jobs" title="No jobs yet">
    <p>Jobs appear here as soon as they are submitted. In a terminal:</p>
    <pre class="command"><code>baton submit digits@1</code></pre>
  <//>`;
}

function Footer({ list, shown, text }) {
  const words = text ? `${count(shown)} of ${count(list.rows.length)} jobs match` : `${count(shown)} ${shown === 1 ? "job" : "jobs"}`;
  return html`<div class="table-foot" role="status">${list.loadingMore ? (text ? `Searching: ${words} …` : "Loading more …") : list.more ? words : `${words}, all loaded`}</div>`;
}
