/** One ring: fill, rates, who writes and reads, and why a side waits. */
import { Tag } from "../components/badge.js";
import { Grid } from "../components/grid.js";
import { Failure, Loading } from "../components/states.js";
import { Age, useNow } from "../components/time.js";
import { withQuery } from "../core/api.js";
import { bytes, count, counted, number, percent } from "../core/format.js";
import { html } from "../core/html.js";
import { RING_INTERVAL_S, useResource } from "../core/polling.js";
import { Copyable } from "../job/files.js";
import { RateChart } from "./rate-chart.js";
import { perSecond, rateOf, readRing, reuseOf, whyReadersWait, whyWritersWait, writerState } from "./ring-data.js";
import { Fill, LifeTag, agesOf } from "./rings.js";
import { useTrends } from "./trend.js";

const KEYS = "ring.json,pointer,publisher,read,watched";
const PREFIXES = "writers/,readers/,quarantine/";
const STARVED_SHARE = 0.05;

/** Show the ring that the address names. */
export const RingPage = ({ parts }) => html`<${Ring} key=${parts[1]} name=${parts[1]} />`;

function Ring({ name }) {
  const path = withQuery(`/rings/${encodeURIComponent(name)}/records`, { keys: KEYS, prefixes: PREFIXES });
  const { data, error, refresh } = useResource(path, RING_INTERVAL_S);
  const now = useNow();
  const ring = readRing(data?.records ?? []);
  const id = data?.records.find((one) => one.key === "ring.json")?.version;
  const samples = useTrends(id ? [{ id, ring }] : [], data)(id);
  if (error) return html`<div class="page"><${Failure} error=${error} retry=${refresh} /><p class="state"><a href="#/rings">Show all rings</a></p></div>`;
  if (!data) return html`<div class="page"><${Loading} rows=${6} label="Loading the ring" /></div>`;
  const { settings } = ring;
  const [put, read] = [(one) => one.inserted, (one) => one.read].map((value) => rateOf(samples, now, value));
  const reuse = reuseOf(samples);
  return html`<div class="page job-page ring-page">
    <header class="job-head">
      <div class="job-title">
        <p class="crumbs"><a href="#/rings">Rings</a> <span aria-hidden="true">/</span> <code>baton:${name}</code></p>
        <h1>${name}</h1>
        <div class="job-sub"><${LifeTag} ring=${ring} samples=${samples} now=${now} /><span>${MODES[settings.mode]}</span><span>manifest ${count(ring.manifest)}</span></div>
      </div>
      <dl class="facts">
        <${Fact} name="Fill" wide><${Fill} name=${name} ring=${ring} /><//>
        <${Fact} name="Put"><b>${perSecond(put) || "–"}</b><span class="soft">${count(ring.inserted)} so far</span><//>
        <${Fact} name="Read"><b>${perSecond(read) || "–"}</b><span class="soft">${count(ring.read)} so far</span><//>
        <${Fact} name="Reads per sample"><b>${reuse === null ? "–" : number(Number(reuse.toFixed(2)))}</b><span class="soft">${ring.inserted ? `${number(Number((ring.read / ring.inserted).toFixed(2)))} in total` : ""}</span><//>
        <${Fact} name="Age of samples"><b>${agesOf(ring, now) || "–"}</b><//>
        <${Fact} name="Not yet readable"><b>${count(ring.finished)}</b><span class="soft">of at most ${count(ring.ahead)}</span><//>
      </dl>
    </header>
    <${Waits} ring=${ring} samples=${samples} now=${now} />
    ${ring.damaged > 0 && html`<p class="inline-error">${counted(ring.damaged, "damaged object")} ${ring.damaged === 1 ? "is" : "are"} left out. To list and repair: <code>baton ring verify baton:${name} --repair</code></p>`}
    ${data.incomplete.length > 0 && html`<p class="inline-warning">Shown are the first records of ${data.incomplete.join(", ")} only; <code>baton ring status baton:${name}</code> shows all.</p>`}
    <section aria-label="Rates"><h2>Rates</h2><${RateChart} samples=${samples} /></section>
    <section aria-label="Writers"><h2>Writers</h2>
      ${ring.writers.length ? html`<div class="card labeled"><${Grid} label="Writers" columns=${writerColumns(samples, now)} items=${ring.writers} keyOf=${(one) => one.name} /></div>`
        : html`<p class="soft">No generator writes. A generator is a job of the recipe <code>generator@1</code>, or any program with a <code>RingWriter</code>.</p>`}
    </section>
    <section aria-label="Readers"><h2>Readers</h2>
      ${ring.readers.length ? html`<div class="card labeled"><${Grid} label="Readers" columns=${readerColumns(samples, now)} items=${ring.readers} keyOf=${(one) => one.name} /></div>`
        : html`<p class="soft">No training reads. A training reads with <code>RingLoader("baton:${name}", batch_size=64)</code>.</p>`}
    </section>
    <section aria-label="Settings"><h2>Settings</h2>
      <dl class="ring-settings">${Object.entries(settings).filter(([key, value]) => isSet(key, value)).map(
        ([key, value]) => html`<div key=${key}><dt><code>${key}</code></dt><dd>${valueOf(value)}</dd></div>`,
      )}</dl>
      <${Copyable} label="Copy the command" text=${`baton ring watch baton:${name}`} />
    </section>
  </div>`;
}

const MODES = { rolling: "new samples replace the oldest", generation: "a full generation replaces all samples" };
const HIDDEN = new Set(["version", "digest"]);
const isSet = (key, value) => !HIDDEN.has(key) && value !== undefined && value !== null && (typeof value !== "object" || Object.keys(value).length > 0);
const valueOf = (value) => (Array.isArray(value) ? value.map(number).join(" to ") : typeof value === "object" ? JSON.stringify(value) : String(value));

const Fact = ({ name, wide, children }) => html`<div class="fact ${wide ? "fact-wide" : ""}"><dt>${name}</dt><dd>${children}</dd></div>`;

/** Tell which side waits for the other, and what ends the wait. */
function Waits({ ring, samples, now }) {
  const [writers, readers] = [whyWritersWait(ring), ring.flow && ring.readers.length > 0 && whyReadersWait(ring)];
  const starved = meanShare(ring.readers, "readers", samples, now);
  return html`<section class="ring-waits" aria-label="Waits">
    ${!ring.flow && html`<p class="ring-wait">No process works on the ring. Its samples stay; the next generator or training goes on with them.</p>`}
    ${writers && html`<p class="ring-wait ring-wait-warn"><b>Writers wait</b> for the readers: ${writers}.</p>`}
    ${readers && html`<p class="ring-wait ring-wait-warn"><b>Readers wait</b> for the writers: ${readers}.</p>`}
    ${ring.flow && !writers && !readers && html`<p class="ring-wait">${
      starved > STARVED_SHARE ? html`<b>Readers waited ${percent(starved)} of the time</b> for new samples; more generators would help.` : "No side has to wait for the other."
    }</p>`}
  </section>`;
}

const shareOf = (kind, name, samples, now) => {
  const share = rateOf(samples, now, (one) => one[kind][name]?.waited_s);
  return share === null ? null : Math.min(1, share);
};

function meanShare(items, kind, samples, now) {
  const shares = items.map((one) => shareOf(kind, one.name, samples, now)).filter((share) => share !== null);
  return shares.length ? shares.reduce((total, one) => total + one, 0) / shares.length : 0;
}

const tone = (state) => (state === "works" ? "good" : state === "dead" ? "bad" : "warn");
const alert = (value) => (value ? html`<b class="ring-bad">${count(value)}</b>` : html`<span class="soft">0</span>`);

const writerColumns = (samples, now) => [
  { name: "writer", label: "Writer", cell: (one) => html`<strong>${one.name}</strong>` },
  { name: "state", label: "State", cell: (one) => html`<${Tag} tone=${tone(writerState(one))}>${writerState(one)}<//>` },
  { name: "rate", label: "Put", right: true, cell: (one) => perSecond(rateOf(samples, now, (at) => at.writers[one.name]?.put)) || "–" },
  { name: "bytes", label: "Bytes", right: true, cell: (one) => rated(rateOf(samples, now, (at) => at.writers[one.name]?.bytes)) },
  { name: "total", label: "So far", right: true, cell: (one) => count(one.put ?? 0) },
  { name: "refused", label: "Refused", right: true, cell: (one) => alert(one.refused) },
  { name: "waits", label: "Waits", right: true, cell: (one) => percent(shareOf("writers", one.name, samples, now)) || "–" },
  { name: "renewed", label: "Reported", right: true, cell: (one) => html`<${Age} at=${one.at_ms && one.at_ms / 1000} suffix=" ago" />` },
];

const readerColumns = (samples, now) => [
  { name: "reader", label: "Reader", cell: (one) => html`<strong>${one.name}</strong>` },
  { name: "group", label: "Training", cell: (one) => one.group || html`<span class="soft">–</span>` },
  { name: "rate", label: "Read", right: true, cell: (one) => perSecond(rateOf(samples, now, (at) => at.readers[one.name]?.read)) || "–" },
  { name: "total", label: "So far", right: true, cell: (one) => count(one.read ?? 0) },
  { name: "damaged", label: "Damaged", right: true, cell: (one) => alert(one.damaged) },
  { name: "waits", label: "Waits", right: true, cell: (one) => percent(shareOf("readers", one.name, samples, now)) || "–" },
  { name: "keeps", label: "Keeps", right: true, cell: (one) => counted((one.manifests ?? []).length, "manifest") },
];

const rated = (rate) => (rate === null ? "–" : `${bytes(rate)}/s`);
