/** Places of the console: `#/jobs/<id>?tab=log`. The fragment never reaches a server or its logs. */
import { signal } from "./signal.js";

export const place = signal(read());

/** Go to a place, such as `/jobs`. `replace`: without a step in the history. */
export function go(path, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", `#${path}`);
  place.value = read();
}

/** Return the address of a place for `href`. */
export const hrefOf = (path, query = {}) => {
  const set = Object.entries(query).filter(([, value]) => value);
  return `#${path}${set.length ? `?${new URLSearchParams(set)}` : ""}`;
};

/** Return true if a part of an address can be the id of a job; a path would name another call. */
export const isJobId = (part) => /^[0-9a-f-]{36}$/.test(part);

/** Take `code` of a sign-in link from the fragment, and remove it from the address and the history; null without one. */
export function takeFromFragment(name) {
  const found = new URLSearchParams(location.hash.slice(1)).get(name);
  if (found) go("/jobs", { replace: true });
  return found;
}

/** Return true if the fragment is the one of a sign-in link or of a shared job's link. */
export const namesSecret = () => /^#(code|share)=/.test(location.hash);

/** Take the key of a shared job's link from the fragment, and go to the job; null without one. */
export function takeShareFromFragment() {
  const found = new URLSearchParams(location.hash.slice(1));
  if (found.get("share")) go(`/jobs/${found.get("job") ?? ""}`, { replace: true });
  return found.get("share");
}

function read() {
  const raw = location.hash.startsWith("#/") ? location.hash.slice(1) : "/jobs";
  const [path, query = ""] = raw.split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decode);
  return { path, parts, query: Object.fromEntries(new URLSearchParams(query)) };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    // A hand-written address with a lone `%`: the part is taken as written.
    return part;
  }
}

addEventListener("hashchange", () => (place.value = read()));
addEventListener("popstate", () => (place.value = read()));
