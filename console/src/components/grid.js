import { html } from "../core/html.js";

/** Show a short table. `columns`: `{name, label, cell(item), right}`. A narrow screen shows the first columns' labels above each value. */
export const Grid = ({ label, columns, items, keyOf }) => html`
  <div class="grid-frame"><table class="grid" aria-label=${label}>
    <thead><tr>${columns.map((one) => html`<th key=${one.name} scope="col" class=${one.right ? "right" : ""}>${one.label}</th>`)}</tr></thead>
    <tbody>${items.map(
      (item) => html`<tr key=${keyOf(item)}>
        ${columns.map((one) => html`<td key=${one.name} class="grid-${one.name} ${one.right ? "right" : ""}" data-label=${one.name}>${one.cell(item)}</td>`)}
      </tr>`,
    )}</tbody>
  </table></div>
`;
