/** Fields with their documentation beside them, and the faults that the control plane finds in them. */
import { Icon } from "../components/icon.js";
import { html } from "../core/html.js";

/** Show a labelled control. `faults`: sentences; `help`: text or elements; `children(props)` draws the control. */
export function Field({ id, label, required, help, faults = [], children }) {
  const notes = [help && `${id}-help`, faults.length > 0 && `${id}-fault`].filter(Boolean).join(" ");
  const control = { id, "aria-describedby": notes || undefined, "aria-invalid": faults.length > 0 || undefined, "aria-required": required || undefined };
  return html`<div class="line ${faults.length ? "line-faulty" : ""}">
    <label for=${id}>${label}${required && html`<span class="needed" aria-hidden="true">required</span>`}</label>
    <div class="line-control">${children(control)}<${Faults} id="${id}-fault" faults=${faults} /></div>
    <div class="line-help" id="${id}-help">${help}</div>
  </div>`;
}

const Faults = ({ id, faults }) =>
  faults.length > 0 && html`<div id=${id} class="line-fault">${faults.map((fault, at) => html`<p key=${at}>${fault}</p>`)}</div>`;

/** Show a field of one line, or of `rows` lines. `onInput(text)`. */
export function TextField({ value, onInput, rows, type = "text", placeholder, list, mono, ...field }) {
  return html`<${Field} ...${field}>${(control) => {
    const props = { ...control, value, placeholder, spellcheck: false, class: mono ? "mono" : "", onInput: (event) => onInput(event.target.value) };
    return rows ? html`<textarea rows=${rows} ...${props}></textarea>` : html`<input type=${type} list=${list} autocomplete="off" ...${props} />`;
  }}<//>`;
}

/** Show a parameter of a recipe by its type. `value`: text of the form, undefined for the default. */
export function ParameterField({ name, spec, value, faults, onInput }) {
  const field = { id: `parameters.${name}`, label: name, required: spec.required, faults };
  const help = html`${spec.description} <span class="expected">${expected(spec)}</span>`;
  const byDefault = textOf(spec.default);
  const text = value ?? "";
  if (spec.type === "boolean" || spec.choices) {
    const choices = spec.choices ?? ["true", "false"];
    const unset = spec.default === null ? (spec.required ? "choose one" : "not set") : `${words(byDefault)} (default)`;
    return html`<${Field} ...${field} help=${help}>${(control) => html`<select ...${control} value=${text} onChange=${(event) => onInput(event.target.value)}>
      <option value="">${unset}</option>${choices.map((one) => html`<option key=${one} value=${one}>${words(one)}</option>`)}
    </select>`}<//>`;
  }
  const list = spec.type === "strings";
  return html`<${TextField} ...${field} help=${help} value=${text} onInput=${onInput} rows=${list ? 3 : spec.type === "string" && spec.max_length > 512 ? 2 : 0} placeholder=${value === "" ? "empty" : byDefault || (list ? "one each line" : "")} />`;
}

const words = (text) => ({ true: "yes", false: "no" })[text] ?? text;
const textOf = (value) => (value === null ? "" : Array.isArray(value) ? value.join("\n") : String(value));

/** Say which values a number may have; other types say so by their control. */
function expected({ type, minimum, maximum, exclusive_minimum: above, exclusive_maximum: below, multiple_of: multiple }) {
  const known = (value) => value !== null && value !== undefined;
  const said = (value) => value.toLocaleString("en-US", { maximumSignificantDigits: 15 });
  const bounds = [
    known(minimum) && `at least ${said(minimum)}`,
    known(above) && `more than ${said(above)}`,
    known(maximum) && `at most ${said(maximum)}`,
    known(below) && `less than ${said(below)}`,
    known(multiple) && `a multiple of ${multiple}`,
  ].filter(Boolean);
  if (type !== "integer" && type !== "number") return "";
  return [type === "integer" ? "Whole number" : "Number", ...bounds].join(", ") + ".";
}

/** Show rows of a name and a value that can be added and removed. `rows`: `{name, value}`. */
export function Rows({ id, label, help, faults = [], rows, names, onChange }) {
  const [name, value] = names;
  const put = (at, changed) => onChange(rows.map((row, place) => (place === at ? { ...row, ...changed } : row)));
  return html`<div class="line ${faults.length ? "line-faulty" : ""}" role="group" aria-label=${label}>
    <span class="line-label">${label}</span>
    <div class="line-control">
      ${rows.map(
        (row, at) => html`<div key=${at} class="pair">
          <input aria-label="${label} ${at + 1}: ${name}" placeholder=${name} value=${row.name} readonly=${row.fixed} spellcheck=${false} autocomplete="off" onInput=${(event) => put(at, { name: event.target.value })} />
          <input aria-label="${label} ${at + 1}: ${value}" placeholder=${value} value=${row.value} spellcheck=${false} autocomplete="off" onInput=${(event) => put(at, { value: event.target.value })} />
          <button type="button" class="icon-button" aria-label="Remove ${label.toLowerCase()} ${at + 1}" onClick=${() => onChange(rows.filter((_, place) => place !== at))}><${Icon} name="close" /></button>
        </div>`,
      )}
      <button type="button" class="button button-small" onClick=${() => onChange([...rows, { name: "", value: "" }])}>Add<span class="visually-hidden"> to ${label.toLowerCase()}</span></button>
      <${Faults} id="${id}-fault" faults=${faults} />
    </div>
    <div class="line-help">${help}</div>
  </div>`;
}
