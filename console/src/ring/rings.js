/** Rings of the control plane: the list. */
import { Tag } from "../components/badge.js";
import { ProgressBar } from "../components/bar.js";
import { Grid } from "../components/grid.js";
import { Empty, Failure, Loading } from "../components/states.js";
import { Age, useNow } from "../components/time.js";
import { age, count, number, percent } from "../core/format.js";
import { html } from "../core/html.js";
import { withQuery } from "../core/api.js";
import { RING_INTERVAL_S, useResource } from "../core/polling.js";
import { hrefOf } from "../core/router.js";
import { lifeOf, perSecond, rateOf, readRing, whyReadersWait, whyWritersWait } from "./ring-data.js";
import { useTrends } from "./trend.js";

const LISTED = 50;
const RECORDS = "ring.json,pointer,publisher,read";

/** List the rings, live: fill, rates, reuse and age of each. */
export function Rings({ query }) {
  const { data, error, loading, refresh } = useResource(withQuery("/rings", { limit: LISTED, records: RECORDS, cursor: query.after }), RING_INTERVAL_S);
  const now = useNow();
  const rings = (data?.rings ?? []).map((one) => ({ ...one, ring: readRing(one.records) }));
  // The list reads fewer records of a ring than the ring's page, therefore each has a series of its own.
  const seriesOf = (one) => `list ${one.id}`;
  const samples = useTrends(rings.map((one) => ({ id: seriesOf(one), ring: one.ring })), data);
  const item = (one) => ({ ...one, samples: samples(seriesOf(one)), now });
  return html`<div class="page">
    <div class="page-head"><h1>Rings</h1></div>
    ${error && !data && html`<${Failure} error=${error} retry=${refresh} />`}
    ${loading && html`<${Loading} label="Loading rings" />`}
    ${data && rings.length === 0 && html`<${NoRings} />`}
    ${rings.length > 0 && html`
      <section class="card labeled"><${Grid} label="Rings" columns=${COLUMNS} items=${rings.map(item)} keyOf=${(one) => one.id} /></section>
      <p class="soft">Rates come from what this page has seen. A ring in a directory or a bucket is not here: <code>baton ring watch PLACE</code> shows it.</p>`}
    ${(query.after || data?.next_cursor) && html`<p class="ring-pages">
      ${query.after && html`<a class="button" href="#/rings">First rings</a>`}
      ${data?.next_cursor && html`<a class="button" href=${hrefOf("/rings", { after: data.next_cursor })}>Next rings</a>`}
    </p>`}
  </div>`;
}

const NoRings = () => html`<${Empty} icon="rings" title="No rings">
  <p>A ring is a circular cache of generated samples between generators and a training. Make one, and let generators of a job fill it:</p>
  <pre class="command" tabindex="0" aria-label="Commands">baton ring make baton:shapes --set cap=1000
baton submit --recipe generator@1 --input code/ \\
    --set function=shapes:make --set ring=baton:shapes</pre>
  <p>A ring in a directory or a bucket is not here: <code>baton ring watch PLACE</code> shows it.</p>
<//>`;

const LIVES = { live: ["good", "live"], silent: ["plain", "no process"], unknown: ["plain", "checking"] };

/** Show whether processes work on a ring. */
export function LifeTag({ ring, samples, now, removing }) {
  const [tone, word] = removing ? ["warn", "being removed"] : LIVES[lifeOf(ring, samples, now)];
  return html`<${Tag} tone=${tone}>${word}<//>`;
}

/** Return `2 s to 14 min`, the ages of the newest and the oldest readable sample. */
export function agesOf(ring, now) {
  if (!ring.newest_at) return "";
  const [newest, oldest] = [now - ring.newest_at, now - ring.oldest_at].map(short);
  return newest === oldest ? newest : `${newest} to ${oldest}`;
}
const short = (seconds) => (seconds < 5 ? "0 s" : age(seconds));

/** Show how many of the places of a ring are filled. */
export const Fill = ({ name, ring }) => html`<div class="ring-fill">
  <span>${count(ring.readable)}<span class="soft"> of ${count(ring.settings.cap)}</span></span><span class="soft">${percent(ring.readable / ring.settings.cap)}</span>
  <${ProgressBar} share=${ring.readable / (ring.settings.cap || 1)} label="Fill of ${name}" />
</div>`;

const dash = (text) => text || html`<span class="soft none">–</span>`;

const COLUMNS = [
  {
    name: "ring",
    label: "Ring",
    cell: (one) => html`<a class="ring-name" href="#/rings/${one.name}"><strong>${one.name}</strong></a>
      <div class="tags"><${LifeTag} ...${one} /><${Tag}>${one.ring.settings.mode}<//></div>`,
  },
  { name: "fill", label: "Fill", cell: (one) => html`<${Fill} ...${one} />` },
  { name: "put", label: "Put", right: true, cell: ({ samples, now }) => dash(perSecond(rateOf(samples, now, (at) => at.inserted))) },
  { name: "read", label: "Read", right: true, cell: ({ samples, now }) => dash(perSecond(rateOf(samples, now, (at) => at.read))) },
  { name: "reuse", label: "Reads per sample", right: true, cell: ({ ring }) => dash(ring.inserted ? number(Number((ring.read / ring.inserted).toFixed(2))) : "") },
  { name: "age", label: "Age of samples", right: true, cell: ({ ring, now }) => dash(agesOf(ring, now)) },
  { name: "waits", label: "Waits", cell: ({ ring }) => dash([whyWritersWait(ring) && "writers", ring.flow?.wanted > 0 && whyReadersWait(ring) && "readers"].filter(Boolean).join(", ")) },
  { name: "made", label: "Made", right: true, cell: (one) => html`<${Age} at=${one.created_at} suffix=" ago" />` },
];
