/** The world of an elastic job: nodes, quorum, rounds, data, and who waits for whom. */
import { useState } from "preact/hooks";
import { ProgressBar } from "../components/bar.js";
import { Empty, Failure, Loading } from "../components/states.js";
import { useNow } from "../components/time.js";
import { count, counted, duration, number, percent, usd } from "../core/format.js";
import { html } from "../core/html.js";
import { PART_INTERVAL_S, useResource } from "../core/polling.js";
import { may } from "../core/session.js";
import { isEnded } from "../jobs/job-list.js";
import { Exclude } from "./exclude.js";
import { Members } from "./members.js";
import { Nodes } from "./nodes.js";
import { Rounds } from "./rounds.js";
import { quorumOf, rowsOf, waitsOf } from "./world-data.js";

const STATES = { forming: "Forming", training: "Training", ended: "Ended" };

/** Show the world of a job with nodes. */
export function World({ job, attempts, events }) {
  const { data: world, error, refresh } = useResource(`/job/${job.id}/world`, PART_INTERVAL_S);
  const now = useNow();
  const [excluding, exclude] = useState(false);
  if (error && !world) return html`<${Failure} error=${error} retry=${refresh} />`;
  if (!world) return html`<${Loading} rows=${5} label="Loading the world" />`;
  const rows = rowsOf(world, attempts, now);
  const quorum = quorumOf(rows, world);
  const waits = waitsOf(world, rows, job.checkpoint_step);
  const members = rows.filter((one) => one.member);
  if (!world.epoch && !world.nodes.length && !job.counters.attempts) return html`<${NoNode} job=${job} />`;
  return html`<div class="world">
    <dl class="facts world-facts">
      <${Fact} name="World"><b>${STATES[world.state]}</b><span class="soft">${count(members.length)} of ${counted(world.max, "node")}, begins with ${world.min}</span><//>
      <${Fact} name="Quorum"><${Quorum} world=${world} quorum=${quorum} /><//>
      <${Fact} name="Epoch"><b>${world.epoch ? count(world.epoch) : "–"}</b><span class="soft">of the membership</span><//>
      <${Fact} name="Round"><b>${world.epoch ? count(world.round) : "–"}</b><span class="soft">${world.program ? `${world.program.codec}, ${world.program.engine}` : ""}</span><//>
      <${Fact} name="Last round"><${LastRound} last=${world.rounds.at(-1)} /><//>
      <${Fact} name="Cost"><${Cost} rows=${rows} /><//>
    </dl>
    ${waits.length > 0 && html`<ul class="world-waits" aria-label="Who waits">${waits.map((one) => html`<li key=${one.text} class="world-wait world-wait-${one.tone}">${one.text}</li>`)}</ul>`}
    <section aria-label="Nodes">
      <div class="section-head"><h2>Nodes</h2>${may("submit") && !isEnded(job) && members.length > 0 && html`<button class="button" onClick=${() => exclude(true)}>Exclude nodes</button>`}</div>
      <${Nodes} rows=${rows} world=${world} job=${job} />
    </section>
    ${world.shards && html`<${Shards} shards=${world.shards} rows=${rows} />`}
    <${Rounds} rounds=${world.rounds} />
    <${Members} events=${events} world=${world} job=${job} now=${now} />
    ${excluding && html`<${Exclude} job=${job} world=${world} silent=${quorum.silent.map((one) => one.seat)} onClose=${() => exclude(false)} />`}
  </div>`;
}

const Fact = ({ name, children }) => html`<div class="fact"><dt>${name}</dt><dd>${children}</dd></div>`;

const NoNode = ({ job }) => html`<${Empty} icon="fleet" title="No node yet">
  <p>The training begins when ${counted(job.nodes.min, "worker")} ${job.nodes.min === 1 ? "has" : "have"} claimed a seat${job.rent ? "; the machines are being rented" : ` of queue ${job.queue}`}. Start an agent on each machine:</p>
  <pre class="command" tabindex="0" aria-label="Command">BATON_QUEUE=${job.queue} python -m gpu_client.agent</pre>
<//>`;

function Quorum({ world, quorum }) {
  const { voters, answering, holds } = quorum;
  if (world.state !== "training") return html`<b>–</b>`;
  return html`<b class=${holds ? "" : "world-bad"}>${holds ? "Held" : "Lost"}</b><span class="soft">${answering.length} of ${voters.length} answer</span>`;
}

function LastRound({ last }) {
  if (!last) return html`<b>–</b>`;
  return html`<b>${duration(last.round_s)}</b><span class="soft">${percent(last.round_s ? last.reduce_s / last.round_s : 0)} reduce</span>
    <span class="soft">${last.round_s ? `${number(last.tokens / last.round_s)} tokens/s` : ""}</span>`;
}

function Cost({ rows }) {
  const known = rows.filter((one) => one.usd !== null);
  // The attempts of a seat are in each row of the seat.
  const spent = [...new Map(known.map((one) => [one.seat, one.usd])).values()].reduce((sum, one) => sum + one, 0);
  const hourly = rows.reduce((sum, one) => sum + (one.usd_per_hour ?? 0), 0);
  if (!known.length) return html`<span class="soft" title="The workers report no price">not reported</span>`;
  return html`<b>${usd(spent)}</b><span class="soft">${hourly ? `${usd(hourly)} an hour now` : ""}</span>`;
}

/** Show how much of the data is trained, and who holds the shards in work. */
function Shards({ shards, rows }) {
  const present = rows.filter((one) => one.node).map((one) => one.key);
  const held = Object.entries(shards.held);
  const sum = (some) => some.reduce((total, [, many]) => total + many, 0);
  const returning = sum(held.filter(([node]) => !present.includes(node)));
  const free = shards.total === null ? null : Math.max(0, shards.total - shards.finished - sum(held));
  const words = [
    `${count(shards.finished)} trained`,
    `${count(sum(held) - returning)} at nodes`,
    returning && `${count(returning)} of lost nodes return after the next round`,
    free === null ? "endless" : `${count(free)} free`,
  ].filter(Boolean);
  return html`<section aria-label="Data"><h2>Data <span class="soft">${shards.total === null ? "" : `${counted(shards.total, "shard")}: `}${words.join(", ")}</span></h2>
    ${shards.total !== null && html`<${ProgressBar} share=${shards.total ? shards.finished / shards.total : 1} label="Trained shards" tone="good" />`}
  </section>`;
}
