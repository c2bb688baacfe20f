import { Failure, Loading } from "../components/states.js";
import { html } from "../core/html.js";
import { useResource } from "../core/polling.js";
import { hrefOf } from "../core/router.js";
import { may } from "../core/session.js";
import { Checkpoints } from "./checkpoints.js";
import { Curves, askedOf } from "../curves/curves.js";
import { useEarlyCurves, useList, versionOf } from "./data.js";
import { Files } from "./files.js";
import { Goodput } from "./goodput.js";
import { JobHeader } from "./header.js";
import { Log } from "./log.js";
import { RentedMachines, mayHaveMachines, useOverhead } from "./machines.js";
import { Pictures } from "./pictures.js";
import { Rules } from "./rules.js";
import { World } from "../world/world.js";
import { Timeline } from "./timeline.js";

const TABS = [
  ["", "Curves"],
  ["world", "World"],
  ["machines", "Machines"],
  ["log", "Log"],
  ["timeline", "Timeline"],
  ["checkpoints", "Checkpoints"],
  ["pictures", "Pictures"],
  ["rules", "Rules"],
  ["files", "Files"],
];

/** Show one job: its header, and the view that `tab` of the address names. */
export function JobPage({ parts, query }) {
  const id = parts[1];
  return html`<${Job} key=${id} id=${id} query=${query} />`;
}

function Job({ id, query }) {
  const { data: job, error, refresh } = useResource(`/job/${id}`);
  // Beside the job, not after it.
  useEarlyCurves(id, query.tab ? null : askedOf(query));
  const version = versionOf(job);
  const attempts = useList(`/job/${id}/attempts`, "attempts", version);
  const events = useList(`/job/${id}/events`, "events", version);
  const refusal = attempts.error ?? events.error;
  const overhead_usd = useOverhead(job, version);
  if (error && !job) return html`<div class="page"><${Failure} error=${error} retry=${refresh} /><p class="state"><a href="#/jobs">Show all jobs</a></p></div>`;
  if (!job) return html`<div class="page"><${Loading} rows=${6} label="Loading the job" /></div>`;
  const tab = query.tab ?? "";
  const View = VIEWS[tab] ?? VIEWS[""];
  const shown = { pictures: may("submit"), world: Boolean(job.nodes && may("submit")), machines: mayHaveMachines(job, attempts.items) };
  return html`<div class="page job-page ${tab === "log" ? "page-full" : ""}">
    <${JobHeader} job=${job} attempts=${attempts.items} more=${attempts.more} overhead_usd=${overhead_usd} machines=${shown.machines} />
    <nav class="tabs job-tabs" aria-label="Parts of the job">
      ${TABS.filter(([name]) => shown[name] ?? true).map(([name, label]) => html`<a key=${name} class="tab" href=${hrefOf(`/jobs/${id}`, { ...query, tab: name })} aria-current=${tab === name ? "page" : undefined}>${label}</a>`)}
    </nav>
    ${refusal && html`<${Failure} title="The ${attempts.error ? "attempts" : "events"} did not load" error=${refusal} />`}
    ${(!refusal || (attempts.items && events.items)) && html`<${View} job=${job} attempts=${attempts.items} events=${events.items} more=${events.more} query=${query} version=${version} />`}
  </div>`;
}

function Overview(props) {
  return html`<${Curves} ...${props} /><${Goodput} attempts=${props.attempts} />`;
}

const VIEWS = {
  "": Overview,
  world: World,
  machines: RentedMachines,
  log: Log,
  timeline: Timeline,
  checkpoints: Checkpoints,
  pictures: Pictures,
  rules: Rules,
  files: Files,
};
