import { useState } from "preact/hooks";
import { Confirm } from "../components/dialog.js";
import { toast } from "../components/toast.js";
import { post } from "../core/api.js";
import { html } from "../core/html.js";
import { refreshAll } from "../core/polling.js";
import { exclusionOf, named } from "./world-data.js";

/** Let an operator remove members without a vote, for instance after a network fell into two halves. */
export function Exclude({ job, world, silent, onClose }) {
  // The dialog keeps the members that the reader saw, also while the world goes on.
  const [seen] = useState(world);
  const [chosen, choose] = useState(silent);
  const members = seen.nodes.filter((node) => node.member);
  const toggle = (seat) => choose(chosen.includes(seat) ? chosen.filter((one) => one !== seat) : [...chosen, seat].sort((one, other) => one - other));
  const exclude = async () => {
    const after = await post(`/job/${job.id}/world/exclude`, { seats: chosen });
    refreshAll();
    toast(`Epoch ${after.epoch} begins without ${named(chosen)}.`);
  };
  return html`<${Confirm} title="Exclude nodes" action="Exclude" danger disabled=${!chosen.length} onConfirm=${exclude} onClose=${onClose}>
    <p>By themselves, nodes exclude others only by a majority, or after the leases of the others have ended.</p>
    <fieldset class="choices"><legend>Go on without</legend>
      ${members.map(
        (node) => html`<label key=${node.node} class="choice-line"><input type="checkbox" checked=${chosen.includes(node.seat)} onChange=${() => toggle(node.seat)} />
          <span><strong>node ${node.seat}</strong> <small>${[node.machine_id, silent.includes(node.seat) ? "does not answer" : "answers"].filter(Boolean).join(", ")}</small></span></label>`,
      )}
    </fieldset>
    <p aria-live="polite">${chosen.length ? html`<strong>${exclusionOf(seen, chosen)}</strong>` : "Choose at least one node."}</p>
  <//>`;
}
