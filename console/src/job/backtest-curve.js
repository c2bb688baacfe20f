/** The curve of the run that a back-test has replayed, with the steps at which the rules would have fired. */
import { useEffect, useMemo, useState } from "preact/hooks";
import { Failure, Loading } from "../components/states.js";
import { Key, MetricPlot } from "../curves/curves.js";
import { firingsOf, judgedMetricOf, marksOf, repeatedRanges, reportedName } from "../curves/curve-data.js";
import { html } from "../core/html.js";
import { useCurves } from "./data.js";

const WIDTH = 1000;

/** Show the curve. A back-test is of one moment, so the curve does not follow the run. */
export function FiringCurve({ job, attempts, found }) {
  const still = useMemo(() => ({ ...job, state: "complete" }), [found]);
  const [chosen, choose] = useState(null);
  const [range, zoom] = useState(null);
  const [names, setNames] = useState([]);
  const judged = judgedMetricOf(found);
  // Rules call some metrics by another name than the training: the first answer tells the reported names.
  const wanted = chosen ?? (judged && reportedName(names, judged));
  const { data, error } = useCurves(still, { names: wanted, width: WIDTH, from_step: range?.[0], to_step: range?.[1] });
  useEffect(() => {
    if (data) setNames(data.names);
  }, [data]);
  const marks = useMemo(() => marksOf(attempts ?? [], firingsOf(found.rules)), [attempts, found]);
  const ranges = useMemo(() => repeatedRanges(attempts ?? []), [attempts]);
  if (error && !data) return html`<${Failure} error=${error} />`;
  if (!data || attempts === null) return html`<${Loading} rows=${4} label="Loading the curve" />`;
  if (data.names.length === 0) return null;
  const name = wanted ?? data.names[0];
  const view = { smoothing: 0, log: false, range, zoom: (from, to) => zoom(from === null ? null : [from, to]) };
  return html`<section class="curves" aria-label="Firings in the curve">
    ${data.names.length > 1 && html`<div class="chips" role="group" aria-label="Metric">
      ${data.names.map((one) => html`<button type="button" key=${one} class="chip" aria-pressed=${one === name} onClick=${() => choose(one)}>${one}</button>`)}</div>`}
    <${MetricPlot} name=${name} job=${still} data=${data} attempts=${attempts} marks=${marks} ranges=${ranges} view=${view} />
    <${Key} marks=${marks} ranges=${ranges} rule="a rule would have fired" />
  </section>`;
}
