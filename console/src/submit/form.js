/** The fields of the form and the document of the job: each is made of the other. Pure. */

const LISTS = ["inputs", "environment", "tags"];
const NUMBERS = ["min_gpus", "min_vram_gib", "min_disk_gib"];
/** Fields of a document that the form shows; the others are kept as they are. */
const SHOWN = ["recipe", "command", "parameters", "name", "queue", "priority", "outputs", "requirements", "rent", "rules", ...LISTS];
const HOUR_S = 3600;

/** Return the fields of the form for a document; `{}` gives an empty form. */
export function formOf(document) {
  const { requirements = {}, rent, policy = {} } = document;
  const pairs = (found = {}) => Object.entries(found).map(([name, value]) => ({ name, value }));
  return {
    recipe: document.recipe ?? "",
    command: joinCommand(document.command ?? []),
    parameters: Object.fromEntries(Object.entries(document.parameters ?? {}).filter(([, value]) => value !== null).map(([name, value]) => [name, textOf(value)])),
    name: document.name ?? "",
    queue: document.queue ?? "default",
    priority: String(document.priority ?? 50),
    outputs: (document.outputs ?? []).join("\n"),
    inputs: (document.inputs ?? []).map(({ prefix, into }) => ({ value: prefix, name: into })),
    environment: pairs(document.environment),
    tags: pairs(document.tags),
    requirements: {
      ...Object.fromEntries(NUMBERS.map((name) => [name, textOf(requirements[name])])),
      gpu_models: (requirements.gpu_models ?? []).join(", "),
      image: requirements.image ?? "",
    },
    rented: Boolean(rent),
    rent: {
      budget_usd: textOf(rent?.budget_usd),
      max_usd_per_hour: textOf(rent?.max_usd_per_hour),
      providers: (rent?.providers ?? []).join(", "),
    },
    max_runtime_h: policy.max_runtime_s ? textOf(policy.max_runtime_s / HOUR_S) : "",
    rules: document.rules ?? "",
    kept: Object.fromEntries(Object.entries(document).filter(([name]) => !SHOWN.includes(name))),
  };
}

/** Return the document that the form submits. `recipe`: the schema of the chosen recipe, null without one. */
export function documentOf(form, recipe) {
  const { kept } = form;
  const named = (rows) => Object.fromEntries(rows.filter(({ name }) => name.trim()).map(({ name, value }) => [name.trim(), value]));
  const inputs = form.inputs.filter(({ value }) => value.trim()).map(({ name, value }) => ({ prefix: value.trim(), into: name.trim() }));
  const outputs = linesOf(form.outputs);
  const numbers = Object.fromEntries(NUMBERS.map((name) => [name, numberOf(form.requirements[name])]));
  const hours = numberOf(form.max_runtime_h);
  return pruned({
    ...kept,
    ...(form.recipe ? { recipe: form.recipe } : { command: splitCommand(form.command) }),
    name: form.name.trim(),
    queue: form.rented ? undefined : form.queue.trim() || "default",
    priority: numberOf(form.priority) ?? 50,
    parameters: form.recipe ? parametersOf(form.parameters, recipe) : undefined,
    inputs,
    environment: named(form.environment),
    tags: named(form.tags),
    outputs: outputs.length || !form.recipe ? outputs : undefined,
    requirements: pruned({ ...numbers, gpu_models: namesOf(form.requirements.gpu_models), image: form.requirements.image.trim() }),
    rent: form.rented
      ? {
          budget_usd: numberOf(form.rent.budget_usd),
          providers: namesOf(form.rent.providers),
          max_usd_per_hour: numberOf(form.rent.max_usd_per_hour),
        }
      : undefined,
    policy: pruned({ ...kept.policy, max_runtime_s: typeof hours === "number" ? Math.round(hours * HOUR_S) : hours }),
    rules: form.rules.trim() ? form.rules : undefined,
  });
}

function parametersOf(texts, recipe) {
  const typed = { integer: numberOf, number: numberOf, boolean: (value) => value === "true", strings: linesOf };
  // A parameter that the reader has cleared is undefined; an empty text of the document is a value of its own.
  const found = Object.entries(texts).filter(([, value]) => value !== undefined);
  return Object.fromEntries(found.map(([name, value]) => [name, (typed[recipe?.parameters[name]?.type] ?? String)(value)]));
}

/** Return the number in a text, undefined without one; what is no number stays text, which the control plane refuses. */
function numberOf(text) {
  const trimmed = text.trim();
  if (!trimmed) return undefined;
  return Number.isFinite(Number(trimmed)) ? Number(trimmed) : trimmed;
}

const textOf = (value) => (value === undefined || value === null ? "" : Array.isArray(value) ? value.join("\n") : String(value));
const linesOf = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
const namesOf = (text) => text.split(",").map((name) => name.trim()).filter(Boolean);

function pruned(found) {
  const empty = (value) => value === undefined || value === "" || (value !== null && typeof value === "object" && Object.keys(value).length === 0);
  return Object.fromEntries(Object.entries(found).filter(([name, value]) => !empty(value) || ["command", "outputs"].includes(name)&& value !== undefined));
}

/** Split a command line at spaces, as a shell does, with quotes and backslashes and without variables. */
export function splitCommand(line) {
  const found = [];
  let word = null;
  let quote = "";
  for (let at = 0; at < line.length; at += 1) {
    const letter = line[at];
    const next = line[at + 1];
    // Within double quotes a backslash before any other letter is itself.
    if (letter === "\\" && next && quote !== "'" && (!quote || '$`"\\\n'.includes(next))) {
      at += 1;
      if (next !== "\n") word = (word ?? "") + next;
    } else if (quote) {
      if (letter === quote) quote = "";
      else word += letter;
    } else if (letter === "'" || letter === '"') {
      quote = letter;
      word ??= "";
    } else if (/\s/.test(letter)) {
      if (word !== null) found.push(word);
      word = null;
    } else {
      word = (word ?? "") + letter;
    }
  }
  return word === null ? found : [...found, word];
}

/** Return a command line that `splitCommand` splits into these arguments. */
export function joinCommand(words) {
  return words.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`)).join(" ");
}
