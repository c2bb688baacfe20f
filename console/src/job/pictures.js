import { useEffect, useMemo, useState } from "preact/hooks";
import { Empty, Failure, Loading } from "../components/states.js";
import { count } from "../core/format.js";
import { html } from "../core/html.js";
import { isEnded } from "../jobs/job-list.js";
import { Unlisted, useArtifacts } from "./artifacts.js";

const PICTURE = /\.(png|jpe?g|webp|gif|avif)$/i;

/** Group the pictures of a job by step, in the order of steps; those without a step come last. Pure. */
export function picturesByStep(artifacts) {
  const groups = new Map();
  for (const one of artifacts.filter((item) => PICTURE.test(item.path))) {
    const key = one.step ?? Infinity;
    groups.set(key, [...(groups.get(key) ?? []), one]);
  }
  return [...groups.entries()].sort(([a], [b]) => a - b).map(([step, items]) => ({ step, items: items.sort((a, b) => (a.path < b.path ? -1 : 1)) }));
}

/** Show the pictures of one step, and a slider over the steps. */
export function Pictures({ job, version }) {
  const found = useArtifacts(job, version);
  const { artifacts, error } = found;
  const groups = useMemo(() => picturesByStep(artifacts ?? []), [artifacts]);
  const [place, setPlace] = useState(null);
  const shown = groups[Math.min(place ?? groups.length - 1, groups.length - 1)];
  useEffect(() => {
    // The neighbors are loaded before the reader asks for them, so the slider does not flicker.
    const index = groups.indexOf(shown);
    for (const one of [...(groups[index - 1]?.items ?? []), ...(groups[index + 1]?.items ?? [])]) new Image().src = one.url;
  }, [shown]);
  if (error) return html`<${Failure} error=${error} />`;
  if (artifacts === null) return html`<${Loading} rows=${5} label="Loading the pictures" />`;
  if (!shown) {
    return html`<${Unlisted} job=${job} found=${found} /><${Empty} title="No pictures${found.more ? " among these" : isEnded(job) ? "" : " yet"}"><p>Pictures that a training writes into its output directory appear here, by the step in their names (<code>validation/step-000500-0.png</code>).</p><//>`;
  }
  const name = (step) => (step === Infinity ? "without a step" : `step ${count(step)}`);
  const index = groups.indexOf(shown);
  return html`<section class="pictures" aria-label="Pictures">
    <${Unlisted} job=${job} found=${found} />
    ${groups.length > 1 && html`<div class="curve-tools">
      <label class="tool tool-wide"><span>Step</span>
        <input type="range" min="0" max=${groups.length - 1} value=${index} aria-valuetext=${name(shown.step)} onInput=${(event) => setPlace(Number(event.target.value))} /></label>
      <output><b>${name(shown.step)}</b> <span class="soft">${index + 1} of ${groups.length}</span></output>
    </div>`}
    <div class="picture-grid">
      ${shown.items.map((one) => html`<figure key=${one.path.replace(/[0-9]+/, "")}><a href=${one.url} target="_blank" rel="noreferrer"><img src=${one.url} alt="${one.path}, ${name(shown.step)}" loading="lazy" /></a><figcaption class="clip" title=${one.path}>${one.path}</figcaption></figure>`)}
    </div>
  </section>`;
}
