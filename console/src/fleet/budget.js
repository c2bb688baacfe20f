/** The money of a fleet against its bounds, and what the present machines add. Pure. */

const HOUR_S = 3600;

/** Return the price in USD per hour of all machines that the providers may bill. */
export const usdPerHour = (machines) => machines.reduce((sum, one) => sum + (one.state === "planned" ? 0 : one.usd_per_hour), 0);

/** Return what is neither spent nor reserved of a bound in USD. */
export const leftOf = (bound) => Math.max(0, bound.cap_usd - bound.spent_usd - bound.reserved_usd);

/** Return the bound of the fleet's own document with the least room. */
export const tightest = (bounds) =>
  bounds.filter((one) => one.scope === "fleet").reduce((least, one) => (least && leftOf(least) <= leftOf(one) ? least : one), null);

/** Return the end of a bound's day or month (UTC) in seconds; null for a bound without a period. */
export function endOf(period) {
  const [year, month, day] = period.split("-").map(Number);
  if (!year) return null;
  return (day ? Date.UTC(year, month - 1, day + 1) : Date.UTC(year, month, 1)) / 1000;
}

/** Return the time until the first bound of the fleet's own is used up at this price; null if none is, or nothing is spent. */
export function lastsFor(bounds, usd_per_hour, now) {
  const times = bounds.filter((one) => one.scope === "fleet").map((one) => forecast(one, usd_per_hour, now).lasts_s);
  return times.reduce((least, one) => (one === null || (least !== null && least <= one) ? least : one), null);
}

/**
 * Return what the present machines spend of a bound at their present price, all rented on:
 * `expected_usd` until the end of the period (null without a period or a price), never more than the bound permits, and
 * `lasts_s`, the time until the bound is used up (null if the period ends before, or nothing is spent).
 */
export function forecast(bound, usd_per_hour, now) {
  const room = Math.max(0, bound.cap_usd - bound.spent_usd);
  const end = endOf(bound.period);
  const lasts_s = usd_per_hour > 0 ? (room / usd_per_hour) * HOUR_S : null;
  if (end === null) return { expected_usd: null, lasts_s };
  const rest_s = Math.max(0, end - now);
  const spends = (usd_per_hour * rest_s) / HOUR_S;
  return {
    expected_usd: usd_per_hour > 0 ? Math.min(bound.cap_usd, bound.spent_usd + spends) : null,
    lasts_s: lasts_s !== null && lasts_s < rest_s ? lasts_s : null,
  };
}
