import { useEffect, useState } from "preact/hooks";
import { previewOf, session, signIn, token } from "../core/session.js";
import { useSignal } from "../core/signal.js";
import { html } from "../core/html.js";

const REPEAT_S = 3;
const PERMITS = { submit: "see and steer jobs", admin: "manage keys and webhooks" };

/** Sign in: by the code of a link, by the cookie of an earlier sign-in, or with a pasted key. */
export function SignIn({ code }) {
  const { state, reason = null } = useSignal(session);
  const [waits, setWaits] = useState(state !== "out");
  // The code of a link, until it is used, refused or declined.
  const [unused, setUnused] = useState(state === "out" ? null : code);
  const [offer, setOffer] = useState(null);
  // The end of the session that the reader has seen, not the lack of one on a first visit.
  const [refusal, setRefusal] = useState(reason);
  const [away, setAway] = useState(false);

  useEffect(() => {
    if (!waits) return undefined;
    let timer;
    const attempt = async () => {
      try {
        if (unused) setOffer(await previewOf(unused));
        else await token();
      } catch (error) {
        if (error.status === undefined) throw error;
        setAway(error.passing);
        if (error.passing) {
          timer = setTimeout(attempt, REPEAT_S * 1000);
          return;
        }
        if (unused) {
          leaveLink(error);
          return;
        }
      }
      setWaits(false);
    };
    attempt();
    return () => clearTimeout(timer);
  }, [waits, unused]);

  /** Forget the link; a session of an earlier sign-in may still be there. */
  const leaveLink = (error = null) => {
    setRefusal(error);
    setOffer(null);
    setUnused(null);
    setWaits(true);
  };
  if (waits) {
    return html`<main class="signin"><div class="signin-wait" role="status">
      <span class="brand-mark" aria-hidden="true"></span>
      ${away ? "The control plane does not answer. Trying again …" : "Signing in …"}
    </div></main>`;
  }
  if (offer) return html`<${Consent} code=${unused} offer=${offer} onLeave=${leaveLink} />`;
  return html`<main class="signin">
    <div class="signin-card">
      <div class="brand"><span class="brand-mark" aria-hidden="true"></span>Baton</div>
      <h1>Sign in</h1>
      ${refusal && html`<p class="inline-error" role="alert">${refusal.message}</p>`}
      <p>In a terminal where <code>baton</code> has your key:</p>
      <pre class="command"><code>baton console</code></pre>
      <p class="soft">The command opens this page by a link that works once, for a minute.</p>
      <div class="or"><span>or</span></div>
      <${KeyForm} />
    </div>
  </main>`;
}

/**
 * Ask before a link signs in: a link that somebody else sent would sign the reader in to the sender's tenant, where the
 * sender sees all that the reader submits.
 */
function Consent({ code, offer, onLeave }) {
  const [busy, setBusy] = useState(false);
  const [refusal, setRefusal] = useState(null);
  const accept = async () => {
    setBusy(true);
    try {
      await signIn({ code });
    } catch (error) {
      if (error.status === undefined) throw error;
      if (!error.passing) return onLeave(error);
      setRefusal(error);
      setBusy(false);
    }
  };
  return html`<main class="signin">
    <div class="signin-card">
      <div class="brand"><span class="brand-mark" aria-hidden="true"></span>Baton</div>
      <h1>Sign in to tenant ${offer.tenant}?</h1>
      <dl>
        <dt>Key</dt><dd>${offer.key_name}<br /><code>${offer.key_id}</code></dd>
        <dt>Permits</dt><dd>${offer.scopes.map((scope) => PERMITS[scope]).join("; ")}</dd>
      </dl>
      <p class="soft">Sign in if you asked for this link with <code>baton console</code>. With a link from somebody else you work in the
        sender's tenant, and the sender sees what you submit.</p>
      ${refusal && html`<p class="inline-error" role="alert">${refusal.message}</p>`}
      <button class="button button-primary button-wide" disabled=${busy} onClick=${accept}>${busy ? "Signing in …" : "Sign in"}</button>
      <button class="button button-wide" disabled=${busy} onClick=${() => onLeave()}>Stay out</button>
    </div>
  </main>`;
}

function KeyForm() {
  const [key, setKey] = useState("");
  const [busy, setBusy] = useState(false);
  const [refusal, setRefusal] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setRefusal(null);
    try {
      await signIn({ key: key.trim() });
    } catch (error) {
      if (error.status === undefined) throw error;
      setRefusal(error);
      setBusy(false);
    }
  };
  return html`<form onSubmit=${submit}>
    <label class="field"><span>API key</span>
      <input type="password" autocomplete="off" spellcheck="false" placeholder="baton_…" required value=${key}
        aria-describedby="key-note" aria-invalid=${refusal ? "true" : undefined} onInput=${(event) => setKey(event.target.value)} />
    </label>
    ${refusal && html`<p class="inline-error" role="alert">${refusal.message}</p>`}
    <button class="button button-primary button-wide" disabled=${busy || !key.trim()}>${busy ? "Signing in …" : "Sign in"}</button>
    <p class="soft" id="key-note">The key is sent once, for a session of 12 hours, and is not kept in this browser.</p>
  </form>`;
}
