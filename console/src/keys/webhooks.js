/** Webhooks with their deliveries and replay, for admins. */
import { useEffect, useState } from "preact/hooks";
import { Tag } from "../components/badge.js";
import { Confirm } from "../components/dialog.js";
import { FormDialog } from "../components/form-dialog.js";
import { Grid } from "../components/grid.js";
import { SecretDialog } from "../components/secret.js";
import { Empty, Failure, Loading } from "../components/states.js";
import { Age } from "../components/time.js";
import { toast } from "../components/toast.js";
import { get, post, remove } from "../core/api.js";
import { counted } from "../core/format.js";
import { html } from "../core/html.js";
import { refreshAll, useResource } from "../core/polling.js";

const PAGE = 50;
const TONES = { delivered: "good", failed: "bad", waiting: "warn" };
const ENDS = ["job.completed", "job.failed", "job.canceled"];

/** List webhooks; each opens to its deliveries. */
export function Webhooks() {
  const { data, error, loading, refresh } = useResource("/webhooks");
  const [asked, ask] = useState(null);
  const hooks = data?.webhooks ?? [];
  return html`<div class="page page-narrow">
    <div class="page-head"><h1>Webhooks</h1><button class="button button-primary" onClick=${() => ask({ name: "create" })}>New webhook</button></div>
    ${error && html`<${Failure} error=${error} retry=${refresh} />`}
    ${loading && html`<${Loading} rows=${3} label="Loading webhooks" />`}
    ${data && hooks.length === 0 && html`<${Empty} icon="webhooks" title="No webhooks"><p>A webhook receives the events of jobs, signed: a job completed, failed, lost its machine.</p><//>`}
    ${hooks.map((hook) => html`<${Webhook} key=${hook.id} hook=${hook} onDelete=${() => ask({ name: "delete", hook })} />`)}
    ${asked?.name === "create" && html`<${CreateWebhook} onClose=${() => ask(null)} onCreated=${(hook) => ask({ name: "created", hook })} />`}
    ${asked?.name === "created" && html`<${SecretDialog} title="Secret of the webhook" secret=${asked.hook.secret} onClose=${() => ask(null)}>
      <p>Deliveries to <strong>${asked.hook.url}</strong> are signed with this secret. It is shown only now.</p>
    <//>`}
    ${asked?.name === "delete" && html`<${DeleteWebhook} hook=${asked.hook} onClose=${() => ask(null)} />`}
  </div>`;
}

function Webhook({ hook, onDelete }) {
  const [open, setOpen] = useState(false);
  return html`<section class="card">
    <div class="card-head card-head-line">
      <div class="grow"><h2 class="wrap">${hook.url}</h2>
        <div class="soft">${hook.types.length ? hook.types.join(", ") : "all events of jobs"}${hook.every_job ? "" : ", only of jobs that name the webhook"} · created <${Age} at=${hook.created_at} suffix=" ago" /></div>
      </div>
      <button class="button button-small" aria-expanded=${open} onClick=${() => setOpen(!open)}>${open ? "Hide deliveries" : "Deliveries"}</button>
      <button class="button button-small" aria-label="Delete ${hook.url}" onClick=${onDelete}>Delete</button>
    </div>
    ${open && html`<${Deliveries} hook=${hook} />`}
  </section>`;
}

function Deliveries({ hook }) {
  const path = `/webhooks/${hook.id}/deliveries`;
  const { data, error, loading, refresh } = useResource(`${path}?limit=${PAGE}`);
  const [older, setOlder] = useState({ deliveries: [], cursor: undefined });
  const [asked, ask] = useState(null);
  useEffect(() => setOlder({ deliveries: [], cursor: undefined }), [data]);
  const cursor = older.cursor === undefined ? data?.next_cursor : older.cursor;
  const more = async () => {
    try {
      const page = await get(path, { limit: PAGE, cursor });
      setOlder({ deliveries: [...older.deliveries, ...page.deliveries], cursor: page.next_cursor });
    } catch (failure) {
      if (failure.status === undefined) throw failure;
      toast(failure.message, { tone: "error" });
    }
  };
  const all = [...(data?.deliveries ?? []), ...older.deliveries];
  const replay = (one) => jobOf(one) && html`<button class="button button-small" aria-label="Replay ${one.event_id}" onClick=${() => ask(one)}>Replay</button>`;
  const columns = [
    { name: "state", label: "State", cell: (one) => html`<${Tag} tone=${TONES[one.state]}>${one.state}<//>` },
    { name: "event", label: "Event", cell: (one) => html`${one.type}<div class="soft code">${one.event_id.slice(0, 8)} #${one.event_id.split("#")[1] ?? ""}</div>` },
    { name: "answer", label: "Last answer", cell: (one) => html`${one.status ?? "none"}${one.problem && html`<div class="soft wrap">${one.problem}</div>`}` },
    { name: "tries", label: "Tries", right: true, cell: (one) => one.attempts },
    { name: "at", label: "Last try", right: true, cell: (one) => html`<${Age} at=${one.last_at} suffix=" ago" />` },
    { name: "replay", label: html`<span class="visually-hidden">Replay</span>`, right: true, cell: replay },
  ];
  if (loading) return html`<${Loading} rows=${3} label="Loading deliveries" />`;
  if (error) return html`<${Failure} error=${error} retry=${refresh} />`;
  if (all.length === 0) return html`<${Empty} title="No deliveries"><p>No event of the last 30 days was for this webhook.</p><//>`;
  return html`<${Grid} label="Deliveries to ${hook.url}" columns=${columns} items=${all} keyOf=${(one) => one.event_id} />
    ${cursor && html`<div class="card-foot"><button class="button button-small" onClick=${more}>Show older</button></div>`}
    ${asked && html`<${Replay} hook=${hook} delivery=${asked} onClose=${() => ask(null)} />`}`;
}

/** Return `{job_id, from_seq}` of a job's event, null for an event of a fleet. */
function jobOf({ event_id, type }) {
  const [job_id, seq] = event_id.split("#");
  return seq && !type.startsWith("fleet") && !type.startsWith("machine") ? { job_id, from_seq: Number(seq) } : null;
}

function Replay({ hook, delivery, onClose }) {
  const job = jobOf(delivery);
  const replay = async () => {
    const { queued } = await post(`/webhooks/${hook.id}/replay`, job);
    refreshAll();
    toast(`${counted(queued, "event")} of job ${job.job_id.slice(0, 8)} queued again.`);
  };
  return html`<${Confirm} title="Replay from ${delivery.type}" action="Replay" onConfirm=${replay} onClose=${onClose}>
    <p>This event of job ${job.job_id.slice(0, 8)} and all later ones are delivered to <strong>${hook.url}</strong> again, with the same ids, so a receiver that knows an id ignores the event.</p>
  <//>`;
}

function CreateWebhook({ onClose, onCreated }) {
  const create = async (form) => {
    const ends = form.get("events") === "ends";
    onCreated(await post("/webhooks", { url: form.get("url").trim(), types: ends ? ENDS : [], every_job: form.get("jobs") === "every" }));
    refreshAll();
  };
  return html`<${FormDialog} title="New webhook" action="Create webhook" onSubmit=${create} onClose=${onClose}>
    <label class="field"><span>Address</span><input name="url" type="url" required placeholder="https://hooks.example.com/baton" autofocus /><small>https, on a public machine</small></label>
    <label class="field"><span>Events</span><select name="events"><option value="all">All events of jobs</option><option value="ends">A job completed, failed or was stopped</option></select></label>
    <label class="field"><span>Jobs</span><select name="jobs"><option value="every">Every job</option><option value="named">Only jobs that name the webhook</option></select></label>
  <//>`;
}

function DeleteWebhook({ hook, onClose }) {
  const erase = async () => {
    await remove(`/webhooks/${hook.id}`);
    refreshAll();
    toast("The webhook is deleted.");
  };
  return html`<${Confirm} title="Delete the webhook" action="Delete" danger onConfirm=${erase} onClose=${onClose}>
    <p>Events that wait for <strong>${hook.url}</strong> are dropped, and its secret is void. This cannot be undone.</p>
  <//>`;
}
