/** The files that a job's attempts have stored, with addresses that stay valid while the view is shown. */
import { useEffect, useState } from "preact/hooks";
import { getPages } from "../core/api.js";
import { count } from "../core/format.js";
import { html } from "../core/html.js";
import { isEnded } from "../jobs/job-list.js";

const MAX_PAGES = 5;
const RENEW_BEFORE_S = 60;
const LIVE_MS = 30_000;

/** Return `{artifacts, final, more, error}`; `artifacts` is null until the first answer. `more`: the job has further files. */
export function useArtifacts(job, version) {
  const [found, set] = useState({ artifacts: null, final: false, more: false, error: null });
  useEffect(() => {
    let timer;
    let current = true;
    const read = async () => {
      let wait_ms = LIVE_MS;
      try {
        const { artifacts, final, expires_in_s, next_cursor } = await getPages(`/job/${job.id}/artifacts`, "artifacts", MAX_PAGES);
        if (current) set((old) => ({ artifacts: keepAddresses(old.artifacts, artifacts, expires_in_s), final, more: Boolean(next_cursor), error: null }));
        if (isEnded(job)) wait_ms = (expires_in_s - RENEW_BEFORE_S) * 1000;
      } catch (error) {
        if (error.status === undefined) throw error;
        if (current && !error.passing) set((old) => ({ ...old, error }));
      }
      if (current) timer = setTimeout(due, wait_ms);
    };
    const due = () => (document.hidden ? document.addEventListener("visibilitychange", due, { once: true }) : read());
    read();
    return () => {
      current = false;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", due);
    };
  }, [job.id, version]);
  return found;
}

/** Say that a job has stored more files than the view knows. `found`: what `useArtifacts` returned. */
export const Unlisted = ({ job, found: { artifacts, final, more } }) =>
  more &&
  html`<p class="soft" role="status">The first ${count(artifacts.length)} files are known here, by attempt and name, so later ones are missing. All of them: <code>baton fetch ${job.id} result${final ? "" : " --so-far"}</code></p>`;

/** Keep the address of a known file until half of its life, so that the browser does not load its picture again. */
function keepAddresses(old, artifacts, life_s) {
  const now = performance.now() / 1000;
  const known = new Map((old ?? []).map((one) => [`${one.key} ${one.size_bytes}`, one]));
  return artifacts.map((one) => {
    const before = known.get(`${one.key} ${one.size_bytes}`);
    return before && before.valid_until > now ? { ...one, url: before.url, valid_until: before.valid_until } : { ...one, valid_until: now + life_s / 2 };
  });
}
