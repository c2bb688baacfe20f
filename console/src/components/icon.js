import { html } from "../core/html.js";

const PATHS = {
  jobs: "M4 6h16M4 12h16M4 18h10",
  submit: "M12 5v14M5 12h14",
  fleet: "M4 5h16v6H4zM4 13h16v6H4zM8 8h.01M8 16h.01",
  rings: "M12 4a8 8 0 1 1-7.4 5M4 4v5h5",
  keys: "M8 11a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM10.9 12.1 20 3M16.5 6.5 19 9M13.5 9.5l1.8 1.8",
  webhooks: "M3 12h11m-4-4 4 4-4 4M18 5v14M21 8v8",
  alert: "M12 8v5m0 3.5h.01M10.3 4 2.6 17.5A2 2 0 0 0 4.3 20.5h15.4a2 2 0 0 0 1.7-3L13.7 4a2 2 0 0 0-3.4 0z",
  inbox: "M4 13h4l1.5 3h5L16 13h4M5.5 5.5h13L21 13v6H3v-6z",
  search: "M11 5a6 6 0 1 0 0 12 6 6 0 0 0 0-12zm4.5 10.5L20 20",
  close: "M6 6l12 12M18 6 6 18",
  stop: "M7 7h10v10H7z",
  pause: "M9 6v12M15 6v12",
  play: "M8 5.5v13l10.5-6.5z",
  retry: "M19 12a7 7 0 1 1-2-4.9L19 9m0-5v5h-5",
  more: "M6 12h.01M12 12h.01M18 12h.01",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  out: "M14 5H6v14h8M11 12h9m-3-3 3 3-3 3",
  moon: "M19 14.5A7.5 7.5 0 0 1 9.5 5a7.5 7.5 0 1 0 9.5 9.5z",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 3v1.5M12 19.5V21M3 12h1.5M19.5 12H21M5.6 5.6l1 1M17.4 17.4l1 1M18.4 5.6l-1 1M6.6 17.4l-1 1",
};

/** Draw an icon in the color of the text. The icon is silent: the element around it has the name. */
export const Icon = ({ name }) => html`
  <svg class="icon" viewBox="0 0 24 24" aria-hidden="true" focusable="false"><path d=${PATHS[name]} /></svg>
`;
