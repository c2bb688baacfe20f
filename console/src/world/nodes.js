import { Tag } from "../components/badge.js";
import { ProgressBar } from "../components/bar.js";
import { Grid } from "../components/grid.js";
import { Age } from "../components/time.js";
import { count, number, percent, usd } from "../core/format.js";
import { html } from "../core/html.js";
import { hrefOf } from "../core/router.js";

const dash = html`<span class="soft none">–</span>`;
const BRAND = /^(NVIDIA |AMD )?(GeForce |Radeon )?/;

/** Show the nodes and free seats of a world. */
export function Nodes({ rows, world, job }) {
  const columns = [
    { name: "node", label: "Node", cell: (one) => html`<a href=${hrefOf(`/jobs/${job.id}`, { tab: "log", node: String(one.seat) })} title="Log of node ${one.seat}"><strong>${one.seat}</strong></a>` },
    {
      name: "state",
      label: "State",
      cell: (one) => html`<span class="tags"><${Tag} tone=${one.tone}>${one.word}<//>${one.node?.relay && html`<span title="Exchanges bytes with a peer through the object store"><${Tag} tone="warn">relay<//></span>`}</span>${one.detail && html`<small class="world-detail">${one.detail}</small>`}`,
    },
    { name: "machine", label: "Machine", cell: (one) => (one.machine ? html`<span class="wrap">${one.machine}</span><small class="world-detail">${one.place.replace(BRAND, "")}</small>` : dash) },
    {
      name: "tokens",
      label: "Tokens in the round",
      cell: (one) => (one.share === null ? dash : html`<span class="world-share">${count(one.node.tokens)}<span class="soft">${percent(one.share)}</span><${ProgressBar} share=${one.share} label="Share of node ${one.seat} in the round" /></span>`),
    },
    { name: "loss", label: "Loss", right: true, cell: (one) => number(one.loss) || dash },
    { name: "waits", label: "Waits", right: true, cell: (one) => (one.stall === null ? dash : percent(one.stall / 100)) },
    { name: "link", label: "Link", right: true, cell: (one) => (Number.isFinite(one.node?.link_mbit_s) ? `${count(Math.round(one.node.link_mbit_s))} Mbit/s` : dash) },
    world.shards && { name: "shards", label: "Shards", right: true, cell: (one) => (one.held ? count(one.held) : dash) },
    { name: "joined", label: "Joined", right: true, cell: (one) => (one.node?.joined_at ? html`<${Age} at=${one.node.joined_at} suffix=" ago" />` : dash) },
    { name: "cost", label: "Cost", right: true, cell: (one) => (one.usd === null ? dash : html`${usd(one.usd)}${one.usd_per_hour !== null && html`<small class="world-detail">${usd(one.usd_per_hour)}/h</small>`}`) },
  ].filter(Boolean);
  return html`<div class="card labeled world-nodes"><${Grid} label="Nodes" columns=${columns} items=${rows} keyOf=${(one) => one.key} /></div>`;
}
