import { useEffect } from "preact/hooks";
import { Toasts } from "./components/toast.js";
import { Empty } from "./components/states.js";
import { html } from "./core/html.js";
import { place } from "./core/router.js";
import { session } from "./core/session.js";
import { useSignal } from "./core/signal.js";
import { Layout } from "./layout/layout.js";
import { PLACES } from "./layout/places.js";
import { SignIn } from "./signin/signin.js";

/** Show the sign-in page, or the view of the address inside the layout. `code`: from a sign-in link. */
export function App({ code }) {
  const { state } = useSignal(session);
  const { path, parts, query } = useSignal(place);
  const view = PLACES.find((one) => one.matches(parts));
  useEffect(() => {
    document.title = state === "in" && view ? `${view.title(parts)} · Baton` : "Baton";
  }, [state, path]);
  if (state !== "in") return html`<${SignIn} code=${code} />`;
  return html`<${Layout} parts=${parts}>
      ${view
        ? html`<${view.View} key=${view.name} parts=${parts} query=${query} />`
        : html`<${Empty} title="No such page"><p>Nothing is at <code>${path}</code>. <a href="#/jobs">Show all jobs</a></p><//>`}
    <//><${Toasts} />`;
}
