/** Views by place. A place without a view is not in the table, so no link leads to it. */
import { isJobId } from "../core/router.js";
import { FleetPage } from "../fleet/fleet.js";
import { Fleets } from "../fleet/fleets.js";
import { JobPage } from "../job/job.js";
import { Jobs } from "../jobs/jobs.js";
import { Keys } from "../keys/keys.js";
import { Webhooks } from "../keys/webhooks.js";
import { RingPage } from "../ring/ring.js";
import { Rings } from "../ring/rings.js";
import { Submit } from "../submit/submit.js";

export const PLACES = [
  {
    name: "jobs",
    label: "Jobs",
    icon: "jobs",
    href: "#/jobs",
    scope: "submit",
    matches: (parts) => parts[0] === "jobs" && parts.length === 1,
    title: () => "Jobs",
    View: Jobs,
  },
  {
    name: "job",
    matches: (parts) => parts[0] === "jobs" && parts.length === 2 && isJobId(parts[1]),
    title: (parts) => `Job ${parts[1].slice(0, 8)}`,
    View: JobPage,
  },
  {
    name: "submit",
    label: "Submit",
    icon: "submit",
    href: "#/submit",
    scope: "submit",
    matches: (parts) => parts[0] === "submit" && parts.length === 1,
    title: () => "Submit a job",
    View: Submit,
  },
  {
    name: "fleets",
    label: "Fleets",
    icon: "fleet",
    href: "#/fleets",
    scope: "submit",
    matches: (parts) => parts[0] === "fleets" && parts.length === 1,
    title: () => "Fleets",
    View: Fleets,
  },
  {
    name: "fleet",
    matches: (parts) => parts[0] === "fleets" && parts.length === 2,
    title: (parts) => `Fleet ${parts[1]}`,
    View: FleetPage,
  },
  {
    name: "rings",
    label: "Rings",
    icon: "rings",
    href: "#/rings",
    scope: "submit",
    matches: (parts) => parts[0] === "rings" && parts.length === 1,
    title: () => "Rings",
    View: Rings,
  },
  {
    name: "ring",
    matches: (parts) => parts[0] === "rings" && parts.length === 2,
    title: (parts) => `Ring ${parts[1]}`,
    View: RingPage,
  },
  {
    name: "keys",
    label: "Keys",
    icon: "keys",
    href: "#/keys",
    scope: "admin",
    matches: (parts) => parts[0] === "keys" && parts.length === 1,
    title: () => "Keys",
    View: Keys,
  },
  {
    name: "webhooks",
    label: "Webhooks",
    icon: "webhooks",
    href: "#/webhooks",
    scope: "admin",
    matches: (parts) => parts[0] === "webhooks" && parts.length === 1,
    title: () => "Webhooks",
    View: Webhooks,
  },
];
