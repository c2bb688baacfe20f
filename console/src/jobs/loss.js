/** The loss of the jobs on the screen: a thin curve of the past, to which the list of jobs adds the newest steps. */
import { useRef } from "preact/hooks";
import { get } from "../core/api.js";
import { makeDetails } from "./on-screen.js";

const WIDTH = 40;
const METRIC = "loss";

const usePast = makeDetails(async (job) => {
  if (job.progress?.metrics?.[METRIC] === undefined) return [];
  const { curves } = await get(`/job/${job.id}/curves`, { names: METRIC, width: WIDTH });
  return curves.reduce((points, curve) => {
    // A later attempt repeats steps: its readings stand.
    const before = points.filter(([step]) => step < curve.steps[0]);
    return [...before, ...curve.steps.map((step, index) => [step, curve.means[index]])];
  }, []);
});

/** Return the points `[step, loss]` of a job. */
export function useLoss(job) {
  const past = usePast(job);
  const seen = useRef([]);
  const { step, metrics } = job.progress ?? {};
  const loss = metrics?.[METRIC];
  const last = seen.current.at(-1);
  if (loss !== undefined && last?.[0] !== step) {
    seen.current = [...seen.current.filter(([earlier]) => earlier < step).slice(-WIDTH), [step, loss]];
  }
  const end = past?.at(-1)?.[0] ?? -1;
  return [...(past ?? []).filter(([earlier]) => earlier <= step), ...seen.current.filter(([later]) => later > end)];
}
