/** Numbers with units and times in the reader's zone. Each function returns a text, "" for an unknown value. */
import { now_s } from "./clock.js";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
const MINUTE_S = 60;
const HOUR_S = 3600;
const DAY_S = 86400;

/** Format a count: `12,480`. */
export const count = (value) => (known(value) ? value.toLocaleString("en-US") : "");

/** Format a count with its noun: `1 job`, `3 jobs`. */
export const counted = (value, noun, plural = `${noun}s`) => `${count(value)} ${value === 1 ? noun : plural}`;

/** Format a metric with four significant digits: `0.3127`, `1.2e-7`. */
export function number(value) {
  if (!known(value)) return "";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

/** Format a share from 0 to 1: `42%`. Only the whole is 100%. */
export const percent = (share) => (known(share) ? `${share >= 1 ? 100 : Math.min(99, Math.round(share * 100))}%` : "");

/** Smallest amount that is shown as a number. */
export const MIN_USD = 0.01;

/** Format an amount of money: `$0.31`, `$1,204.00`, `<$0.01`. */
export function usd(amount) {
  if (!known(amount)) return "";
  if (amount > 0 && amount < MIN_USD) return "<$0.01";
  return amount.toLocaleString("en-US", { style: "currency", currency: "USD" });
}

/** Format a length of time with its two largest units: `2 h 05 min`, `3 d 4 h`. */
export function duration(seconds) {
  if (!known(seconds)) return "";
  const total = Math.max(0, Math.round(seconds));
  if (total < MINUTE_S) return `${total} s`;
  if (total < HOUR_S) return `${Math.floor(total / MINUTE_S)} min${total < 600 ? ` ${pad(total % MINUTE_S)} s` : ""}`;
  if (total < DAY_S) return `${Math.floor(total / HOUR_S)} h ${pad(Math.floor((total % HOUR_S) / MINUTE_S))} min`;
  return `${Math.floor(total / DAY_S)} d ${Math.floor((total % DAY_S) / HOUR_S)} h`;
}

/** Format an age with one unit: `now`, `5 min`, `3 d`. */
export function age(seconds) {
  if (!known(seconds)) return "";
  if (seconds < 5) return "now";
  const [size, unit] = [[DAY_S, "d"], [HOUR_S, "h"], [MINUTE_S, "min"], [1, "s"]].find(([one]) => seconds >= one);
  return `${Math.floor(seconds / size)} ${unit}`;
}

/** Format bytes with decimal units: `1.4 GB`. */
export function bytes(value) {
  if (!known(value)) return "";
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, value < 1 ? 0 : Math.floor(Math.log10(value) / 3));
  const shown = value / 1000 ** power;
  return `${shown.toLocaleString("en-US", { maximumFractionDigits: power && shown < 100 ? 1 : 0 })} ${units[power]}`;
}

/** Format an instant for a list: the time today, else the date. */
export function moment(at_s) {
  if (!known(at_s)) return "";
  const at = new Date(at_s * 1000);
  const clock = at.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" });
  if (at.toDateString() === new Date(now_s() * 1000).toDateString()) return clock;
  return `${at.toLocaleDateString(undefined, { day: "numeric", month: "short" })}, ${clock}`;
}

/** Format an instant in full with the reader's zone. */
export const fullMoment = (at_s) =>
  known(at_s) ? new Date(at_s * 1000).toLocaleString(undefined, { dateStyle: "full", timeStyle: "long" }) : "";

const pad = (value) => String(value).padStart(2, "0");
