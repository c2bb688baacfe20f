/** The files that a job's attempts have stored, with addresses that stay valid while the view is shown. */
import { useEffect, useState } from "preact/hooks";
import { get } from "../core/api.js";
import { isEnded } from "../jobs/job-list.js";

const LIMIT = 1000;
const MAX_PAGES = 5;
const RENEW_BEFORE_S = 60;
const LIVE_MS = 30_000;

/** Return `{artifacts, final, error}`; `artifacts` is null until the first answer. */
export function useArtifacts(job, version) {
  const [found, set] = useState({ artifacts: null, final: false, error: null });
  useEffect(() => {
    let timer;
    let current = true;
    const read = async () => {
      let wait_ms = LIVE_MS;
      try {
        const { artifacts, final, expires_in_s } = await readAll(job.id);
        if (current) set((old) => ({ artifacts: keepAddresses(old.artifacts, artifacts, expires_in_s), final, error: null }));
        if (isEnded(job)) wait_ms = (expires_in_s - RENEW_BEFORE_S) * 1000;
      } catch (error) {
        if (error.status === undefined) throw error;
        if (current && !error.passing) set((old) => ({ ...old, error }));
      }
      if (current) timer = setTimeout(() => (document.hidden ? (timer = setTimeout(read, wait_ms)) : read()), wait_ms);
    };
    read();
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [job.id, version]);
  return found;
}

async function readAll(id) {
  const artifacts = [];
  let cursor = null;
  let page;
  for (let number = 0; number < MAX_PAGES; number += 1) {
    page = await get(`/job/${id}/artifacts`, { limit: LIMIT, cursor });
    artifacts.push(...page.artifacts);
    cursor = page.next_cursor;
    if (!cursor) break;
  }
  return { ...page, artifacts };
}

/** Keep the address of a known file until half of its life, so that the browser does not load its picture again. */
function keepAddresses(old, artifacts, life_s) {
  const now = performance.now() / 1000;
  const known = new Map((old ?? []).map((one) => [`${one.key} ${one.size_bytes}`, one]));
  return artifacts.map((one) => {
    const before = known.get(`${one.key} ${one.size_bytes}`);
    return before && before.valid_until > now ? { ...one, url: before.url, valid_until: before.valid_until } : { ...one, valid_until: now + life_s / 2 };
  });
}
