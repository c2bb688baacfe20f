/** Entry of the console: sign in by the link's code, then show the place of the address. */
import "./core/locale.js"; // before uPlot
import { render } from "preact";
import { App } from "./app.js";
import { html } from "./core/html.js";
import { namesSecret, takeFromFragment, takeShareFromFragment } from "./core/router.js";
import { openShare } from "./core/session.js";

const share = takeShareFromFragment();
if (share) openShare(share);
// A link that is pasted into this tab changes the fragment alone; the page begins anew with the secret of the link.
addEventListener("hashchange", () => namesSecret() && location.reload());
render(html`<${App} code=${takeFromFragment("code")} />`, document.getElementById("app"));
