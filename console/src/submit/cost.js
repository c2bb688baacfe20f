/** What a job would cost, and the price that this rests on. Where no estimate is possible, the reason. */
import { useEffect, useState } from "preact/hooks";
import { get, post } from "../core/api.js";
import { counted, duration, usd } from "../core/format.js";
import { html } from "../core/html.js";
import { Loading } from "../components/states.js";
import { readAttempts } from "../jobs/attempts.js";

const QUIET_MS = 900;
const EARLIER = 3;
const NEWEST = 100;
const DISK_GIB = 40;
const NAME = "estimate";

/** Show the estimate for a document that the control plane accepts. `requirements`: with those of the recipe. */
export function Cost({ document, requirements }) {
  const [hours, setHours] = useState("");
  const [found, set] = useState(null);
  const { recipe, command, queue, rent, nodes, tags } = document;
  const key = JSON.stringify([recipe ?? command, queue, rent, nodes, tags, requirements, hours]);
  useEffect(() => {
    let current = true;
    const timer = setTimeout(async () => {
      try {
        const estimate = await estimated(document, requirements, Number(hours) > 0 ? Number(hours) : undefined);
        if (current) set({ key, ...estimate });
      } catch (error) {
        if (error.status === undefined) throw error;
        if (current) set({ key, none: error.message });
      }
    }, QUIET_MS);
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [key]);
  return html`<section class="cost" aria-label="Expected cost"><h2>Expected cost</h2>
    <div role="status" aria-busy=${found?.key !== key}>${found === null ? html`<${Loading} rows=${1} label="Loading the estimate" />` : html`<${Estimate} found=${found} />`}</div>
    ${found?.given && html`<label class="field">Hours of work<input type="number" min="0" step="any" value=${hours} placeholder=${found.hours?.toFixed(1)} onInput=${(event) => setHours(event.target.value)} /></label>`}
  </section>`;
}

function Estimate({ found }) {
  if (found.none) return html`<p class="cost-none">No estimate: ${found.none}</p>`;
  return html`<p class="cost-usd"><b>${usd(found.usd)}</b>${found.range && html`<span class="soft"> ${found.range}</span>`}</p>
    <ul class="cost-basis">${found.basis.map((one, at) => html`<li key=${at}>${one}</li>`)}</ul>`;
}

/** Return `{usd, range, basis, hours, given}`, or `{none}` with the reason. */
async function estimated(document, requirements, hours) {
  if (document.rent) return planned(document, rentedFleet(document, requirements), "the job's own machine", hours);
  const { fleets } = await get("/fleets");
  const serving = fleets.find(({ stopped, spec }) => !stopped && spec.queues.includes(document.queue));
  if (serving) return planned(document, { ...serving.spec, min: 0, max: document.nodes?.max ?? 1 }, `fleet ${serving.spec.name}`, hours);
  return earlier(document);
}

/** Return the fleet that a submission would make of `rent`. */
const rentedFleet = ({ rent, nodes }, needs) => ({
  providers: rent.providers,
  gpu_models: needs.gpu_models,
  min_vram_gib: needs.min_vram_gib || (needs.min_gpus ? 1 : 0),
  disk_gib: Math.max(1, needs.min_disk_gib || DISK_GIB),
  image: needs.image,
  max: nodes?.max ?? 1,
  max_usd_per_hour: rent.max_usd_per_hour ?? rent.budget_usd,
  budget: { total_usd: rent.budget_usd },
});

/** Ask for the plan of a fleet of this job alone, so that waiting jobs and present machines do not count. */
async function planned(document, fleet, whose, hours) {
  const { rent, ...job } = { ...document, queue: NAME };
  const plan = await post(`/fleets/${NAME}/plan`, { fleet: { ...fleet, name: NAME, queues: [NAME] }, job, hours });
  const named = (text) => text.replaceAll(`fleet ${NAME}`, whose);
  const [unservable] = plan.unservable;
  if (unservable) return { none: `${named(unservable.reason)}.` };
  if (!plan.usd) {
    const silent = plan.silent.map((one) => ` ${one.provider}: ${one.reason}.`).join("");
    return { none: `no machine can be rented now: ${named(plan.why)}.${silent}` };
  }
  const first = plan.offers.find((one) => one.taken) ?? plan.offers[0];
  const work = plan.works[0];
  return {
    usd: plan.usd.expected,
    range: `expected, ${usd(plan.usd.low)} to ${usd(plan.usd.high)}`,
    hours: work?.hours,
    given: true,
    basis: [
      `${plan.start === 1 ? "" : `${plan.start} × `}${first.gpu_model ?? "machine without a GPU"} of ${first.provider} at ${usd(first.usd_per_hour)} an hour, the price of the moment (${whose})`,
      `${duration((work?.hours ?? 0) * 3600)} of work: ${FROM[work?.hours_from] ?? ""}`,
      "boot, interruptions and the idle end of the machine included",
      ...(rent ? [`never more than the budget of ${usd(rent.budget_usd)}`] : []),
    ],
  };
}

const FROM = {
  given: "as you say",
  history: "as long as earlier jobs of this recipe took",
  assumed: "assumed, as no earlier job tells; give the hours below",
};

/** Return what the last jobs like this cost on machines whose price nobody knows before a claim. */
async function earlier({ recipe, command, queue }) {
  const { jobs } = await get("/jobs", { status: "complete", order: "desc", limit: NEWEST, queue });
  const same = jobs.filter((job) => (recipe ? job.recipe === recipe : !job.recipe && job.command.join("\0") === command.join("\0")));
  const costs = [];
  for (const job of same.slice(0, EARLIER)) {
    const { attempts, next_cursor } = await readAttempts(job);
    if (attempts.length === 0 || next_cursor || attempts.some((one) => one.price_usd_per_hour === null || one.ended_at === null)) continue;
    const cost = (one) => ((one.ended_at - one.started_at) * one.price_usd_per_hour) / 3600;
    costs.push({ usd: attempts.reduce((sum, one) => sum + cost(one), 0), ran_s: job.counters.runtime_s, price: attempts.at(-1).price_usd_per_hour });
  }
  if (costs.length === 0) {
    return { none: `no fleet serves queue ${queue}, and no earlier job like this tells a price. Your own workers tell theirs when they claim the job.` };
  }
  const mean = (name) => costs.reduce((sum, one) => sum + one[name], 0) / costs.length;
  return {
    usd: mean("usd"),
    range: "as earlier jobs cost",
    basis: [
      `mean of the last ${counted(costs.length, "complete job")} like this in queue ${queue}, with other parameters perhaps`,
      `${duration(mean("ran_s"))} of work at ${usd(mean("price"))} an hour, as the workers told`,
    ],
  };
}
