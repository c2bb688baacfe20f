import { Icon } from "../components/icon.js";
import { useNow } from "../components/time.js";
import { toast } from "../components/toast.js";
import { duration } from "../core/format.js";
import { html } from "../core/html.js";
import { awaySince } from "../core/polling.js";
import { may, session, signOut } from "../core/session.js";
import { useSignal } from "../core/signal.js";
import { PLACES } from "./places.js";
import { nextTheme, theme } from "./theme.js";

const MENTIONED_S = 5;

/** Frame of all views: navigation, the notice that the control plane is away, and the view. */
export function Layout({ parts, children }) {
  const { shared } = useSignal(session);
  const places = shared ? [] : PLACES.filter((one) => one.label && (!one.scope || may(one.scope)));
  return html`<div class="layout">
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <header class="side">
      <a class="brand" href=${shared ? undefined : "#/jobs"}><span class="brand-mark" aria-hidden="true"></span>Baton</a>
      <nav aria-label="Places">
        ${places.map(
          (one) => html`<a key=${one.name} href=${one.href} aria-current=${parts[0] === one.name ? "page" : undefined}>
            <${Icon} name=${one.icon} />${one.label}
          </a>`,
        )}
      </nav>
      <${Account} />
    </header>
    <div class="stage"><${Away} /><main id="main" tabindex="-1">${children}</main></div>
  </div>`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function Account() {
  const { tenant, key_id, shared } = useSignal(session);
  const shown = useSignal(theme);
  const leave = () =>
    signOut().catch((failure) => {
      if (failure.status === undefined) throw failure;
      toast(failure.message, { tone: "error" });
    });
  return html`<div class="account">
    ${shared
      ? html`<div class="account-who"><strong>Shared job</strong><span>read only</span></div>`
      : html`<div class="account-who" title="Key ${key_id}"><strong>${tenant}</strong><span>key ${key_id?.slice(0, 8)}</span></div>`}
    <button class="icon-button" onClick=${nextTheme} aria-label="Colors: ${shown}" title="Colors: ${shown}">
      <${Icon} name=${shown === "dark" ? "moon" : "sun"} />
    </button>
    ${!shared && html`<button class="icon-button" onClick=${leave} aria-label="Sign out" title="Sign out"><${Icon} name="out" /></button>`}
  </div>`;
}

function Away() {
  const since = useSignal(awaySince);
  return since === null ? null : html`<${AwayNotice} since=${since} />`;
}

/** Tell that the control plane does not answer, and how old the shown data are. */
function AwayNotice({ since }) {
  useNow();
  const away_s = performance.now() / 1000 - since;
  return html`<div class="away" role="status">
    <span class="dot" aria-hidden="true"></span>
    <span><strong>The control plane does not answer</strong>${away_s < MENTIONED_S ? "" : ` for ${duration(away_s)}`}. Trainings go on without it; this page
    shows the last state and keeps trying.</span>
  </div>`;
}
