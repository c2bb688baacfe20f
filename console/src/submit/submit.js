/** Submit a job: a recipe as a form, or a command. The control plane checks the document while the reader types. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Failure, Loading } from "../components/states.js";
import { toast } from "../components/toast.js";
import { call, get, post } from "../core/api.js";
import { counted } from "../core/format.js";
import { html } from "../core/html.js";
import { go, hrefOf } from "../core/router.js";
import { Copyable } from "../job/files.js";
import { titleOf } from "../jobs/actions.js";
import { needs } from "../jobs/why.js";
import { Cost } from "./cost.js";
import { documentOf as documentOfJob, submitCommand } from "./document.js";
import { ParameterField, Rows, TextField } from "./fields.js";
import { documentOf, formOf } from "./form.js";

const TYPING_MS = 400;
const RETRY_MS = 5000;
const MANY = 12;
const PAGE = 1000;
const ON_FORM = ["recipe", "command", "parameters", "name", "queue", "priority", "outputs", "requirements", "rent", "rules", "inputs", "environment", "tags", "policy"];

/** Show the form. Query: `recipe` chooses one, `from` fills in the document of a job. */
export function Submit({ query }) {
  return html`<${Filled} key=${query.from ?? ""} from=${query.from} chosen=${query.recipe} />`;
}

function Filled({ from, chosen }) {
  const [found, set] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    const load = async () => {
      const [page, job, rules] = await Promise.all([
        get("/recipes", { limit: PAGE }),
        from && get(`/job/${encodeURIComponent(from)}`),
        from && get(`/job/${encodeURIComponent(from)}/rules`),
      ]);
      set({ recipes: page.recipes, job, document: job ? documentOfJob(job, rules.newest?.text) : {} });
    };
    load().catch((failure) => {
      if (failure.status === undefined) throw failure;
      setError(failure);
    });
  }, []);
  if (error) return html`<div class="page"><${Failure} error=${error} /></div>`;
  if (!found) return html`<div class="page"><${Loading} rows=${6} label="Loading the recipes" /></div>`;
  return html`<${Form} ...${found} chosen=${chosen} />`;
}

/** Follow the schema of a recipe; `{recipe: null}` while it loads, and for a command. */
function useRecipe(id) {
  const [found, set] = useState({ id: "", recipe: null });
  useEffect(() => {
    if (!id) return undefined;
    let current = true;
    get(`/recipes/${encodeURIComponent(id)}`).then(
      ({ recipe }) => current && set({ id, recipe }),
      (error) => {
        if (error.status === undefined) throw error;
        if (current) set({ id, recipe: null, error });
      },
    );
    return () => (current = false);
  }, [id]);
  return found.id === id ? found : { recipe: null };
}

/** Check a document after a pause of typing; returns `{key, ok, faults, warnings}` of the newest check. */
function useCheck(document, key, ready) {
  const [checked, set] = useState({ faults: [] });
  useEffect(() => {
    if (!ready) return undefined;
    let current = true;
    const check = async () => {
      try {
        const ok = await post("/jobs/check", document);
        if (current) set({ key, ok, faults: [] });
      } catch (error) {
        if (error.status === undefined) throw error;
        if (current && error.passing) timer = setTimeout(check, RETRY_MS);
        else if (current) set({ key, ok: null, faults: faultsIn(error) });
      }
    };
    let timer = setTimeout(check, TYPING_MS);
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [key, ready]);
  return [checked, set];
}

/** Return `{field, text}` for each problem of a refusal. */
function faultsIn(error) {
  const text = ({ reason, remedy, line }) => `${line ? `Line ${line}: ` : ""}${reason[0].toUpperCase()}${reason.slice(1)}.${remedy ? ` ${remedy}` : ""}`;
  const about = (field) => (error.code === "invalid_rules" ? `rules.${field}` : field);
  if (error.problems?.length) return error.problems.map((one) => ({ field: about(one.field), text: text(one) }));
  return [{ field: error.field ?? "", text: error.message }];
}

function Form({ recipes, job, document: given, chosen }) {
  const [form, setForm] = useState(() => ({ ...formOf(given), ...(!job && { recipe: chosen ?? recipes[0]?.id ?? "" }) }));
  const [touched, touch] = useState(() => new Set());
  const [tried, setTried] = useState(false);
  const [busy, setBusy] = useState(false);
  const element = useRef(null);
  const { recipe, error } = useRecipe(form.recipe);
  const document = useMemo(() => documentOf(form, recipe), [form, recipe]);
  const key = JSON.stringify(document);
  const [checked, setChecked] = useCheck(document, key, !form.recipe || recipe !== null);
  const idempotency = useMemo(() => Array.from(crypto.getRandomValues(new Uint8Array(16)), (one) => one.toString(16).padStart(2, "0")).join(""), [key]);

  const put = (name, changed) => {
    touch(new Set(touched).add(name));
    setForm((before) => ({ ...before, ...changed }));
  };
  const within = (group, name) => (value) => put(`${group}.${name}`, { [group]: { ...form[group], [name]: value } });
  const concerns = (field, name) => field === name || field.startsWith(`${name}.`);
  const shown = (name) => tried || [...touched].some((one) => concerns(one, name));
  const faultsOf = (...names) => checked.faults.filter(({ field }) => names.some((name) => shown(name) && concerns(field, name))).map(({ text }) => text);
  const field = (name, label, help) => ({ id: name, label, help, value: form[name], faults: faultsOf(name), onInput: (value) => put(name, { [name]: value }) });
  const sub = (group, name, label, help) => ({ id: `${group}.${name}`, label, help, value: form[group][name], faults: faultsOf(`${group}.${name}`), onInput: within(group, name) });
  const elsewhere = checked.faults.filter(({ field: name }) => !ON_FORM.some((one) => concerns(name, one)));

  const submit = async (event) => {
    event.preventDefault();
    setTried(true);
    if (checked.key === key && checked.faults.length > 0 && !checked.passing) {
      setTimeout(() => element.current?.querySelector("[aria-invalid=true], .line-faulty input")?.focus());
      return;
    }
    setBusy(true);
    try {
      const made = await call("POST", "/job", { body: document, headers: { "idempotency-key": idempotency } });
      toast(`${titleOf(made)} is submitted.`);
      go(`/jobs/${made.id}`);
    } catch (failure) {
      if (failure.status === undefined) throw failure;
      setChecked({ key, ok: null, faults: faultsIn(failure), passing: failure.passing });
      setBusy(false);
    }
  };

  return html`<form class="page submit" ref=${element} onSubmit=${submit} novalidate>
    <div class="page-head"><div><h1>${job ? "Submit again" : "Submit a job"}</h1>
      ${job && html`<p class="soft">Filled in from <a href=${hrefOf(`/jobs/${job.id}`)}>${titleOf(job)}</a>. Change what should differ; the submission makes a new job.</p>`}</div></div>
    <div class="submit-columns">
      <div class="submit-fields">
        <section aria-label="What runs"><h2>What runs</h2>
          <${Choice} recipes=${recipes} value=${form.recipe} onChange=${(id) => put("recipe", { recipe: id, parameters: {} })} about=${recipe?.description} faults=${faultsOf("recipe")} />
          ${!form.recipe && html`<${TextField} ...${field("command", "Command", "The program and its arguments. Quotes work as in a shell; no shell runs, so variables and pipes need sh -c '…'.")} required mono rows=${3} placeholder="python train.py --lr 1e-4" />`}
          <${TextField} ...${field("name", "Name", "Shown in the list of jobs.")} placeholder=${form.recipe || "optional"} />
        </section>
        ${error && html`<${Failure} error=${error} title="The recipe did not load" />`}
        ${form.recipe && !recipe && !error && html`<${Loading} rows=${4} label="Loading the recipe" />`}
        ${recipe && html`<${Parameters} key=${form.recipe} recipe=${recipe} form=${form} faultsOf=${faultsOf} put=${within} />`}
        <section aria-label="Files"><h2>Files</h2>
          <${Inputs} recipe=${recipe} rows=${form.inputs} faults=${faultsOf("inputs")} onChange=${(inputs) => put("inputs", { inputs })} />
          <${TextField} ...${field("outputs", "Outputs", form.recipe ? "Paths below the output directory, one each line. Empty: the outputs of the recipe." : "Files or directories below $BATON_OUTPUT_DIR, one each line. The job is complete when they are stored and verified.")} mono rows=${2} placeholder=${checked.ok?.outputs.join("\n") || "model.safetensors"} />
        </section>
        <section aria-label="Machine"><h2>Machine</h2>
          <${Where} form=${form} onChange=${(rented) => put("rented", { rented })} />
          ${form.rented
            ? html`<${TextField} ...${sub("rent", "budget_usd", "Budget in USD", "Upper bound of all machines of the job. They are given back before the money ends.")} required type="text" placeholder="5" />
                <${TextField} ...${sub("rent", "max_usd_per_hour", "Price cap in USD an hour", "Of each machine. Empty: the budget is the only bound.")} placeholder="0.50" />
                <${TextField} ...${sub("rent", "providers", "Providers", "Any of vast, salad, runpod, ec2, ssh and loopback, with commas between.")} required placeholder="vast, runpod" />`
            : html`<${TextField} ...${field("queue", "Queue", "Workers and fleets ask for jobs of a queue.")} />`}
          <${TextField} ...${sub("requirements", "min_gpus", "GPUs", "At least so many. Empty: as the recipe says, or none.")} placeholder=${asked(checked, "min_gpus", "any")} />
          <${TextField} ...${sub("requirements", "min_vram_gib", "GPU memory in GiB", "At least, on each GPU.")} placeholder=${asked(checked, "min_vram_gib", "any")} />
          <${TextField} ...${sub("requirements", "gpu_models", "GPU models", "Any of these, with commas between.")} placeholder=${asked(checked, "gpu_models", "RTX 4090, A100")} />
          <${TextField} ...${sub("requirements", "min_disk_gib", "Disk in GiB", "At least, for inputs, outputs and checkpoints.")} placeholder=${asked(checked, "min_disk_gib", "any")} />
          <${TextField} ...${sub("requirements", "image", "Image", "Container image that the worker must have declared.")} mono placeholder=${asked(checked, "image", "any")} />
        </section>
        <section aria-label="Limits and environment"><h2>Limits and environment</h2>
          <${TextField} ...${field("priority", "Priority", "0 to 100; higher runs first.")} />
          <${TextField} ...${field("max_runtime_h", "Time limit in hours", "Running time, summed over all attempts, after which the job fails. Empty: none.")} faults=${faultsOf("policy")} onInput=${(max_runtime_h) => put("policy", { max_runtime_h })} placeholder="none" />
          <${Rows} id="environment" label="Environment" names=${["NAME", "value"]} rows=${form.environment} faults=${faultsOf("environment")} onChange=${(environment) => put("environment", { environment })} help="Variables of the job's processes. Every key of this tenant can read them." />
          <${Rows} id="tags" label="Tags" names=${["name", "value"]} rows=${form.tags} faults=${faultsOf("tags")} onChange=${(tags) => put("tags", { tags })} help="To find and to group jobs." />
        </section>
        <section aria-label="Rules"><h2>Rules</h2>
          <${TextField} ...${field("rules", "Rules", html`Watch and steer the training, in YAML. Six presets watch without rules.${(checked.ok?.warnings ?? []).map((one, at) => html`<span key=${at} class="warning">${one.line ? `Line ${one.line}: ` : ""}${one.reason}. ${one.remedy}</span>`)}`)} mono rows=${7} placeholder=${"rules:\n  - name: not-a-number\n    when: not isfinite(loss)\n    do: {stop: failed}"} />
        </section>
      </div>
      <aside class="submit-side" aria-label="Submission">
        ${checked.ok && checked.key === key ? html`<${Cost} document=${document} requirements=${checked.ok.requirements} />` : html`<section class="cost"><h2>Expected cost</h2><p class="cost-none">${checked.faults.length && checked.key === key ? "No estimate before the form is complete." : "Checking …"}</p></section>`}
        ${Object.keys(form.kept).length > 0 && html`<p class="soft">Kept as in the job: ${Object.keys(form.kept).join(", ")}.</p>`}
        ${checked.ok && html`<p class="soft">Runs on ${form.rented ? "a rented machine" : `a worker of queue ${document.queue}`}${needs(checked.ok.requirements) && ` with ${needs(checked.ok.requirements)}`}.</p>`}
        ${elsewhere.map(({ text, field: name }, at) => html`<p key=${at} class="inline-error" role="alert">${name && `${name}: `}${text}</p>`)}
        ${tried && checked.faults.length > elsewhere.length && html`<p class="inline-error" role="alert">${counted(checked.faults.length - elsewhere.length, "field needs", "fields need")} another value.</p>`}
        <button type="submit" class="button button-primary button-wide" disabled=${busy}>${busy ? "Submitting …" : "Submit"}</button>
        <details><summary>The same as a command</summary><${Copyable} text=${submitCommand(document)} label="Copy the command" /></details>
      </aside>
    </div>
  </form>`;
}

const asked = ({ ok }, name, otherwise) => [ok?.requirements[name] ?? []].flat().join(", ") || otherwise;

function Choice({ recipes, value, onChange, about, faults }) {
  const groups = [["Yours", recipes.filter((one) => !one.built_in)], ["Built in", recipes.filter((one) => one.built_in)]];
  return html`<div class="line"><label for="recipe">Recipe</label>
    <div class="line-control"><select id="recipe" value=${value} aria-describedby="recipe-help" onChange=${(event) => onChange(event.target.value)}>
      <option value="">None: a command of my own</option>
      ${groups.filter(([, found]) => found.length > 0).map(([label, found]) => html`<optgroup key=${label} label=${label}>${found.map((one) => html`<option key=${one.id} value=${one.id}>${one.id}</option>`)}</optgroup>`)}
    </select>${faults.map((fault) => html`<p key=${fault} class="line-fault">${fault}</p>`)}</div>
    <div class="line-help" id="recipe-help">${value ? about : "Any program in any image; what it must leave behind is listed below as outputs."}</div></div>`;
}

/** Required parameters and those that are set come first; a long rest is folded. */
function Parameters({ recipe, form, faultsOf, put }) {
  const names = Object.keys(recipe.parameters);
  const [first] = useState(() => new Set(names.length <= MANY ? names : names.filter((name) => recipe.parameters[name].required || form.parameters[name] !== undefined)));
  const rest = names.filter((name) => !first.has(name));
  const faulty = rest.some((name) => faultsOf(`parameters.${name}`).length > 0);
  const line = (name) => html`<${ParameterField} key=${name} name=${name} spec=${recipe.parameters[name]} value=${form.parameters[name]} faults=${faultsOf(`parameters.${name}`)} onInput=${(value) => put("parameters", name)(value || undefined)} />`;
  if (names.length === 0) return null;
  return html`<section aria-label="Parameters"><h2>Parameters</h2>
    ${names.filter((name) => first.has(name)).map(line)}
    ${rest.length > 0 && html`<details class="rest" open=${faulty || undefined}><summary>${counted(rest.length, "more parameter")}, each with a default</summary>${rest.map(line)}</details>`}
  </section>`;
}

/** Rows of a recipe's inputs stand there from the beginning. */
function Inputs({ recipe, rows, faults, onChange }) {
  const wanted = recipe?.inputs ?? [];
  const lacking = wanted.filter(({ into }) => !rows.some(({ name }) => name === into)).map(({ into }) => ({ name: into, value: "" }));
  const help = html`Stored files that the job reads: the folder below its data directory, and the prefix in the store. <code>baton data push</code> stores files.
    ${wanted.map(({ into, description, required }) => html`<span key=${into} class="warning">${into ? html`<code>${into}</code>: ` : ""}${description}${required ? " Required." : ""}</span>`)}`;
  return html`<${Rows} id="inputs" label="Inputs" names=${["folder", "prefix, such as digits/"]} rows=${[...lacking, ...rows]} faults=${faults} onChange=${onChange} help=${help} />`;
}

function Where({ form, onChange }) {
  const choice = (rented, label) => html`<label class="choice"><input type="radio" name="where" checked=${form.rented === rented} onChange=${() => onChange(rented)} />${label}</label>`;
  return html`<fieldset class="line"><legend class="visually-hidden">Where the job runs</legend><span class="line-label" aria-hidden="true">Where</span>
    <div class="line-control">${choice(false, "A worker or a fleet of a queue")}${choice(true, "A machine rented for this job")}</div><div class="line-help">A rented machine ends with the job.</div></fieldset>`;
}
