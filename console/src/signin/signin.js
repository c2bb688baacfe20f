import { useEffect, useState } from "preact/hooks";
import { session, signIn, token } from "../core/session.js";
import { useSignal } from "../core/signal.js";
import { html } from "../core/html.js";

const REPEAT_S = 3;

/** Sign in: by the code of a link, by the cookie of an earlier sign-in, or with a pasted key. */
export function SignIn({ code }) {
  const { state } = useSignal(session);
  const [waits, setWaits] = useState(true);
  const [refusal, setRefusal] = useState(null);
  const [away, setAway] = useState(false);

  useEffect(() => {
    if (state === "out") return undefined;
    let timer;
    let unused = code;
    const attempt = async () => {
      try {
        await (unused ? signIn({ code: unused }) : token());
      } catch (error) {
        if (error.status === undefined) throw error;
        setAway(error.passing);
        if (error.passing) {
          timer = setTimeout(attempt, REPEAT_S * 1000);
          return;
        }
        if (unused) {
          // The link is over; a session of an earlier sign-in may still be there.
          setRefusal(error);
          unused = null;
          await attempt();
          return;
        }
      }
      setWaits(false);
    };
    attempt();
    return () => clearTimeout(timer);
  }, []);

  if (waits && state === "unknown") {
    return html`<main class="signin"><div class="signin-wait" role="status">
      <span class="brand-mark" aria-hidden="true"></span>
      ${away ? "The control plane does not answer. Trying again …" : "Signing in …"}
    </div></main>`;
  }
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
