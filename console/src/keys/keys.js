/** API keys and the sessions of browsers, for admins. */
import { useMemo, useState } from "preact/hooks";
import { Tag } from "../components/badge.js";
import { Confirm } from "../components/dialog.js";
import { FormDialog } from "../components/form-dialog.js";
import { Grid } from "../components/grid.js";
import { SecretDialog } from "../components/secret.js";
import { Empty, Failure, Loading } from "../components/states.js";
import { Age, useNow } from "../components/time.js";
import { toast } from "../components/toast.js";
import { getIfChanged, post, remove, withQuery } from "../core/api.js";
import { duration, fullMoment, moment } from "../core/format.js";
import { html } from "../core/html.js";
import { Poller, refreshAll, useFollowed } from "../core/polling.js";
import { session } from "../core/session.js";

const DAY_S = 86_400;
const LIMIT = 1000;
const SCOPES = [
  ["submit", "Submit and steer jobs, read everything about them"],
  ["worker", "Claim jobs and report on them: for GPU machines"],
  ["ring", "Read and write rings, nothing else"],
  ["admin", "Keys, webhooks, accounts at providers and registries"],
];
const LIVES = [
  ["30 days", 30],
  ["90 days", 90],
  ["1 year", 365],
  ["No end", 0],
];
const KINDS = { session: "Browser", share: "Shared job", link: "Sign-in link", token: "Token" };

const isOver = (key, now) => key.revoked_at !== null || (key.expires_at !== null && key.expires_at <= now);

/** All keys of the tenant. The API lists the oldest first, therefore a new key is on the last page. */
class KeyFeed extends Poller {
  constructor() {
    super(() => this.readPages());
    this.pages = [];
    this.keys = null;
  }

  async readPages() {
    const pages = [];
    let cursor = null;
    do {
      const path = withQuery("/keys", { limit: LIMIT, cursor });
      const before = this.pages.find((one) => one.path === path);
      const answer = await getIfChanged(path, before?.etag);
      pages.push(answer.changed ? { path, ...answer } : { ...before, changed: false });
      cursor = pages.at(-1).data.next_cursor;
    } while (cursor);
    const changed = pages.some((one) => one.changed) || pages.length !== this.pages.length;
    this.pages = pages;
    if (changed) this.keys = pages.flatMap(({ data }) => data.keys);
    return changed;
  }
}

/** List keys and sessions, with what creates and revokes them. */
export function Keys() {
  const feed = useMemo(() => new KeyFeed(), []);
  useFollowed(feed);
  const { error, refresh } = feed;
  const [asked, ask] = useState(null);
  const now = useNow();
  const all = [...(feed.keys ?? [])].sort((one, other) => other.created_at - one.created_at);
  const valid = all.filter((key) => !isOver(key, now));
  const keys = valid.filter((key) => !key.kind);
  const sessions = valid.filter((key) => key.kind);
  const over = all.filter((key) => isOver(key, now));
  const revoke = (key) => ask({ name: "revoke", key });

  return html`<div class="page page-narrow">
    <div class="page-head"><h1>Keys</h1><button class="button button-primary" onClick=${() => ask({ name: "create" })}>New key</button></div>
    ${error && html`<${Failure} error=${error} retry=${refresh} />`}
    ${!feed.keys && !error && html`<${Loading} label="Loading keys" />`}
    ${feed.keys && html`
      <section class="card"><h2 class="card-head">API keys</h2>
        ${keys.length ? html`<${KeyGrid} label="API keys" keys=${keys} onRevoke=${revoke} />` : html`<${Empty} icon="keys" title="No API keys"><p>Programs and machines call the API with a key.</p><//>`}
      </section>
      <section class="card"><h2 class="card-head">Sessions and links</h2>
        ${sessions.length ? html`<${KeyGrid} label="Sessions and links" keys=${sessions} onRevoke=${revoke} />` : html`<${Empty} title="No sessions" />`}
      </section>
      ${over.length > 0 && html`<details class="card"><summary class="card-head">Revoked and expired (${over.length})</summary>
        <${KeyGrid} label="Revoked and expired" keys=${over} />
      </details>`}
    `}
    ${asked?.name === "create" && html`<${CreateKey} onClose=${() => ask(null)} onCreated=${(key) => ask({ name: "created", key })} />`}
    ${asked?.name === "created" && html`<${SecretDialog} title="Key ${asked.key.name}" secret=${asked.key.key} onClose=${() => ask(null)}>
      <p>Copy the key now: it is not stored, and no one can show it again.</p>
    <//>`}
    ${asked?.name === "revoke" && html`<${RevokeKey} key_=${asked.key} onClose=${() => ask(null)} />`}
  </div>`;
}

function KeyGrid({ label, keys, onRevoke }) {
  const columns = [
    { name: "name", label: "Name", cell: (key) => html`<strong>${key.name}</strong><div class="soft code">${key.id.slice(0, 8)}</div>` },
    { name: "may", label: "May", cell: (key) => html`<span class="tags">${tagsOf(key)}</span>` },
    { name: "created", label: "Created", cell: (key) => html`<${Age} at=${key.created_at} suffix=" ago" />` },
    { name: "ends", label: "Ends", cell: (key) => html`<${End} of=${key} />` },
  ];
  if (onRevoke) {
    const revoke = (key) => html`<button class="button button-small" aria-label="Revoke ${key.name} ${key.id.slice(0, 8)}" onClick=${() => onRevoke(key)}>Revoke</button>`;
    columns.push({ name: "revoke", label: html`<span class="visually-hidden">Revoke</span>`, right: true, cell: revoke });
  }
  return html`<${Grid} label=${label} columns=${columns} items=${keys} keyOf=${(key) => key.id} />`;
}

function tagsOf(key) {
  const own = key.id === session.value.key_id;
  return [
    own && html`<${Tag} key="own" tone="accent">this browser<//>`,
    key.kind && !own && html`<${Tag} key="kind">${KINDS[key.kind] ?? key.kind}<//>`,
    ...key.scopes.map((scope) => html`<${Tag} key=${scope} tone=${scope === "admin" ? "warn" : "plain"}>${scope}<//>`),
  ].filter(Boolean);
}

function End({ of: key }) {
  const now = useNow();
  if (key.revoked_at !== null) return html`<span title=${fullMoment(key.revoked_at)}>revoked ${moment(key.revoked_at)}</span>`;
  if (key.expires_at === null) return html`<span class="soft">no end</span>`;
  if (key.expires_at <= now) return html`<span title=${fullMoment(key.expires_at)}>expired</span>`;
  return html`<span title=${fullMoment(key.expires_at)}>in ${duration(key.expires_at - now)}</span>`;
}

function CreateKey({ onClose, onCreated }) {
  const create = async (form) => {
    const days = Number(form.get("days"));
    const body = { name: form.get("name").trim(), scopes: form.getAll("scope"), ...(days && { expires_in_s: days * DAY_S }) };
    onCreated(await post("/keys", body));
    refreshAll();
  };
  return html`<${FormDialog} title="New key" action="Create key" onSubmit=${create} onClose=${onClose}>
    <label class="field"><span>Name</span><input name="name" required maxlength="64" placeholder="laptop" autofocus /></label>
    <fieldset class="choices"><legend>The key may</legend>
      ${SCOPES.map(
        ([scope, meaning], index) => html`<label key=${scope} class="choice-line"><input type="checkbox" name="scope" value=${scope} defaultChecked=${index === 0} />
          <span><strong>${scope}</strong><small>${meaning}</small></span></label>`,
      )}
    </fieldset>
    <label class="field"><span>Ends after</span><select name="days">
      ${LIVES.map(([label, days]) => html`<option key=${days} value=${days} selected=${days === 90}>${label}</option>`)}
    </select></label>
  <//>`;
}

function RevokeKey({ key_: key, onClose }) {
  const own = key.id === session.value.key_id;
  const revoke = async () => {
    await remove(`/keys/${key.id}`);
    refreshAll();
    toast(`${key.name} is revoked.`);
  };
  return html`<${Confirm} title="Revoke: ${key.name}" action="Revoke" danger onConfirm=${revoke} onClose=${onClose}>
    <p>Calls with it are refused within a minute${key.kind ? "" : ", and sessions that it opened end"}. Trainings that run go on${key.scopes.includes("worker") ? ", but a worker with this key cannot report any more and loses its job" : ""}. A revoked key cannot be restored.</p>
    ${own && html`<p><strong>This is the session of this browser: you will be signed out.</strong></p>`}
  <//>`;
}
