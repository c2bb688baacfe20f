/** Attempts of the jobs on the screen, and what follows from them: money and remaining time. */
import { getPages } from "../core/api.js";
import { makeDetails } from "./on-screen.js";

const MAX_PAGES = 5;

/** Read the attempts of a job, oldest first: `{attempts, next_cursor}`. A `next_cursor` tells that the job has more than 5,000. */
export const readAttempts = (job) => getPages(`/job/${job.id}/attempts`, "attempts", MAX_PAGES);
/** Return what `readAttempts` reads, null until then. */
export const useAttempts = makeDetails(readAttempts);

/** Return the cost of attempts; null if no worker reported a price. */
export function costOf(attempts, now) {
  const priced = attempts.filter((one) => one.price_usd_per_hour !== null);
  const cost = (one) => (Math.max(0, (one.ended_at ?? now) - one.started_at) * one.price_usd_per_hour) / 3600;
  return priced.length ? priced.reduce((sum, one) => sum + cost(one), 0) : null;
}

/** Return the attempts that run: one, or one for each node of an elastic job, whose seats number their attempts alone. */
export const liveOf = (job, attempts) => (attempts ?? []).filter((one) => one.ended_at === null && (job.nodes || one.epoch === job.epoch));

/**
 * Return `{spent_usd, expected_usd, eta_s}`; null for what is not known. `attempts`: null while not loaded.
 *
 * `overhead_usd`: what the job's machines cost besides its attempts.
 */
export function forecast(job, attempts, now, overhead_usd = 0) {
  const live = liveOf(job, attempts);
  const worked_usd = costOf(attempts ?? [], now);
  const spent_usd = worked_usd === null && !overhead_usd ? null : (worked_usd ?? 0) + overhead_usd;
  const first = live.reduce((least, one) => (least && least.started_at <= one.started_at ? least : one), null);
  const eta_s = first && job.state === "running" ? remaining(job, first) : null;
  const rate = live.reduce((sum, one) => sum + (one.price_usd_per_hour ?? 0), 0);
  return { spent_usd, eta_s, expected_usd: eta_s !== null && rate ? spent_usd + (eta_s * rate) / 3600 : null };
}

/** Return the remaining seconds at the mean speed of the running attempt; null before its first new step. */
function remaining(job, live) {
  const { step, total_steps, reported_at } = job.progress ?? {};
  const done = step - (live.resumed_step ?? 0);
  const took_s = reported_at - live.started_at;
  return total_steps && done > 0 && took_s > 0 ? Math.round(((total_steps - step) * took_s) / done) : null;
}
