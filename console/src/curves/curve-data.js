/** Curves of the API as columns for a plot: valid and repeated parts of attempts, smoothed. Pure. */

export const MAX_COLORS = 6;

/**
 * Return the last step of each attempt that a later attempt did not repeat, by epoch.
 *
 * A later attempt that began from the start repeats everything.
 */
export function lastValidSteps(attempts) {
  const last = new Map();
  let limit = Infinity;
  for (const one of [...attempts].sort((a, b) => b.epoch - a.epoch)) {
    last.set(one.epoch, limit);
    limit = Math.min(limit, one.resumed_step ?? 0);
  }
  return last;
}

/** Split the curves of one metric into valid and repeated points: `{epoch, step, mean, low, high}`, in order. */
export function splitCurves(curves, attempts) {
  const last = lastValidSteps(attempts);
  const valid = [];
  const repeated = [];
  for (const curve of curves) {
    const limit = last.get(curve.epoch) ?? Infinity;
    curve.steps.forEach((step, index) => {
      const mean = curve.means[index];
      const point = {
        epoch: curve.epoch,
        step,
        mean,
        low: curve.lows ? curve.lows[index] : mean,
        high: curve.highs ? curve.highs[index] : mean,
      };
      (step > limit ? repeated : valid).push(point);
    });
  }
  valid.sort((a, b) => a.step - b.step);
  return { valid, repeated };
}

/** Smooth the means by an exponential moving average without a bias at the start. `weight`: 0 to below 1. */
export function smooth(points, weight) {
  let sum = 0;
  let mass = 0;
  return points.map((point) => {
    if (point.mean === null) return point;
    sum = weight * sum + (1 - weight) * point.mean;
    mass = weight * mass + (1 - weight);
    return { ...point, mean: sum / mass };
  });
}

/**
 * Arrange lines for uPlot: one column of steps, one column of values for each line.
 *
 * `lines`: `[{points, value}]`. Where a line has no point at a step the value is undefined, so the line goes on; null
 * between two attempts makes a gap.
 */
export function toColumns(lines) {
  const steps = [...new Set(lines.flatMap(({ points }) => points.map((point) => point.step)))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const columns = lines.map(({ points, value }) => {
    const column = new Array(steps.length);
    for (const point of points) column[place.get(point.step)] = value(point);
    return column;
  });
  return [steps, ...columns];
}

/**
 * Group points by the color of their attempt, with a gap where another attempt follows.
 *
 * `linked`: each line leads on to the first point of the next attempt.
 */
export function byColor(points, colors = MAX_COLORS, { linked = true } = {}) {
  const groups = Array.from({ length: colors }, () => []);
  points.forEach((point, index) => {
    const group = groups[(point.epoch - 1 + colors) % colors];
    group.push(point);
    const next = points[index + 1];
    if (!next || next.epoch === point.epoch) return;
    if (linked) group.push(next);
    const last = linked ? next : point;
    group.push({ ...last, step: last.step + 0.5, mean: null });
  });
  return groups;
}

/** Return the marks of attempts and rules on the axis of steps: `{step, kind, text}`. */
export function marksOf(attempts, decisions) {
  const marks = [];
  for (const one of attempts) {
    const where = one.machine_id ?? one.worker_id ?? "its machine";
    if (one.epoch > 1 && one.resumed_step) {
      marks.push({ step: one.resumed_step, kind: "resume", text: `Attempt ${one.epoch} goes on from step ${one.resumed_step} on ${where}` });
    }
    if (["interrupted", "failed"].includes(one.end) && one.progress) {
      const reason = one.reason?.message || one.reason?.code?.replaceAll("_", " ") || "";
      const what = one.end === "failed" ? "failed" : "was lost";
      marks.push({
        step: one.progress.step,
        kind: one.end === "failed" ? "failure" : "kill",
        text: `Attempt ${one.epoch} ${what} at step ${one.progress.step} on ${where}${reason ? `: ${reason}` : ""}`,
      });
    }
  }
  for (const one of decisions) marks.push({ step: one.step, kind: one.kind, text: one.text });
  return marks;
}

/** Return the marks of the firings that a back-test has found: `{step, kind, text}`. */
export const firingsOf = (rules) =>
  rules.flatMap((one) =>
    one.steps.map((step) => ({ step, kind: "rule", text: `${one.rule} would have fired at step ${step}: ${one.actions.join(", ")}` })),
  );

/** Return the metric that a back-test's first firing rests on, else the metric that judges the run, else undefined. */
export function judgedMetricOf({ rules, goal }) {
  const operands = rules.filter((one) => one.fires > 0).flatMap((one) => Object.keys(one.operands));
  // A name that is followed by a bracket is a function.
  const names = operands.flatMap((text) => text.match(/[A-Za-z_][\w.]*(?![\w.(])/g) ?? []);
  return names.find((name) => name !== "step") ?? goal?.metric;
}

/** Names that training loops report, and their names in rules (contract/rules/metrics.py). */
const ALIASES = { learning_rate: "lr", eval_loss: "eval.loss", num_input_tokens_seen: "tokens" };
const nameInRules = (reported) => (ALIASES[reported] ?? reported).replaceAll("-", "_").split(/[/.]+/).filter(Boolean).join(".");

/** Return the reported name that rules call `name`, else the first one; `name` while none is known. */
export const reportedName = (names, name) => (names.includes(name) ? name : (names.find((one) => nameInRules(one) === name) ?? names[0] ?? name));

/** Return the ranges of steps that were trained again: `[{from, to}]`. */
export function repeatedRanges(attempts) {
  const ranges = [];
  const ordered = [...attempts].sort((a, b) => a.epoch - b.epoch);
  for (let index = 1; index < ordered.length; index += 1) {
    const reached = Math.max(...ordered.slice(0, index).map((one) => one.progress?.step ?? 0));
    const from = ordered[index].resumed_step ?? 0;
    if (reached > from) ranges.push({ from, to: reached });
  }
  return ranges;
}
