/** The document of a job, and the command that submits the document. Pure. */

/** Return the document with which `baton submit` submits the same job again. Pure. */
export function documentOf(job, rules) {
  // Parameters can change the outputs of a recipe, therefore these are left to the recipe.
  const planned = new Set(job.plan?.outputs.map(({ path }) => path));
  const document = {
    name: job.name ?? undefined,
    ...(job.recipe ? { recipe: job.recipe } : { command: job.command }),
    queue: job.rent ? undefined : job.queue,
    priority: job.priority,
    parameters: job.parameters,
    environment: job.environment,
    inputs: job.inputs,
    outputs: job.recipe && job.outputs.every((path) => planned.has(path)) ? undefined : job.outputs,
    requirements: job.requirements,
    policy: job.policy,
    tags: job.tags,
    webhook: job.webhook ?? undefined,
    rings: job.rings,
    rules: rules || undefined,
    rent: job.rent ?? undefined,
    nodes: job.nodes ?? undefined,
  };
  const empty = (value) => value === undefined || value === null || (typeof value === "object" && Object.keys(value).length === 0);
  return Object.fromEntries(Object.entries(document).filter(([name, value]) => !empty(value) || name === "outputs" && Array.isArray(value)));
}

/** Return a command for a shell that submits the document. Pure. */
export const submitCommand = (document) => withInput("baton submit -", JSON.stringify(document, null, 2), "JOB");

/** Return a command for a shell that reads `text` from its input. Pure. */
export function withInput(command, text, mark) {
  // A line of the text that equals the mark would end the text, and the shell would run the lines behind.
  while (text.split("\n").includes(mark)) mark += "_";
  return `${command} <<'${mark}'\n${text}\n${mark}`;
}
