"""The calls for recipes, and the jobs that recipes make."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from baton.contract.errors import ErrorCode, Fault
from baton.contract.jobs.job import JobSubmit
from baton.contract.jobs.policy import Policy, Requirements
from baton.contract.names import MAX_RINGS
from baton.contract.recipes.calls import RecipePage, RecipePush, RecipeQuery, RecipeSummary, RecipeView
from baton.contract.recipes.plan import RunPlan
from functions.api.http.context import ApiCall, Context
from functions.domain.errors import Refusal
from functions.domain.records import RecipeEntry, Spec, StoredRecipe
from functions.recipes import built_in_document, built_in_ids, built_in_recipe, is_built_in_name

if TYPE_CHECKING:
    from baton.contract.recipes.model import Recipe

_PARAMETERS = "parameters."


def push(context: Context, call: ApiCall) -> RecipeView:
    """Register a recipe version; idempotent for the same document, refused for another document."""
    body: RecipePush = call.body
    recipe = _require_sound(body.document)
    if is_built_in_name(recipe.name):
        detail = f"{recipe.name!r} is the name of a built-in recipe."
        problems = [Fault("name", "is that of a built-in recipe", "Choose another name.")]
        raise Refusal(ErrorCode.RECIPE_EXISTS, detail, field="document", problems=problems)
    stored = StoredRecipe(
        tenant=call.tenant,
        name=recipe.name,
        version=recipe.version,
        description=recipe.description,
        created_at=call.now,
        document=body.document,
    )
    if not context.recipes.add(stored):
        # Recipes are never deleted, therefore the read finds the registered recipe.
        there = context.recipes.get(call.tenant, recipe.name, recipe.version)
        if there is None or there.document != body.document:
            raise Refusal(ErrorCode.RECIPE_EXISTS, f"{recipe.id} is registered with other contents.", field="document")
        stored = there
    return _view(stored)


def list_recipes(context: Context, call: ApiCall) -> RecipePage:
    """List the recipes that jobs may name: built-in recipes on the first page, then the tenant's own."""
    query: RecipeQuery = call.query
    page = context.recipes.list(call.tenant, limit=query.limit, cursor=query.cursor)
    own = [_summarize(entry) for entry in page.items]
    built_in = [] if query.cursor else [_view_built_in(recipe_id) for recipe_id in built_in_ids()]
    shown = [RecipeSummary(**view.model_dump(exclude={"document", "recipe"})) for view in built_in if view]
    return RecipePage(recipes=[*shown, *own], next_cursor=page.cursor)


def show(context: Context, call: ApiCall) -> RecipeView:
    """Show one recipe with its document."""
    recipe_id = call.path["recipe"]
    found = _view_built_in(recipe_id)
    if found is not None:
        return found
    name, _, version = recipe_id.partition("@")
    stored = context.recipes.get(call.tenant, name, int(version))
    if stored is None:
        raise Refusal(ErrorCode.RECIPE_NOT_FOUND, f"No recipe {recipe_id}.", field="recipe")
    return _view(stored)


class RecipeResolver:
    """Resolver of recipes for the jobs of one call; reads each recipe once."""

    def __init__(self, context: Context, call: ApiCall) -> None:
        self._context = context
        self._tenant = call.tenant
        self._found: dict[str, Recipe] = {}

    def build_spec(self, body: JobSubmit, *, flat: bool = False) -> Spec:
        """Return the job with the steps, defaults and outputs of its recipe; refuse a faulty job with all problems.

        `flat`: the parameters were fields of the body, as in the original, and problems name these fields.
        """
        if body.recipe is None:
            return _build_spec(body, command=body.command or [], parameters=body.parameters, outputs=body.outputs or [])
        recipe = self._find_recipe(body.recipe)
        plan = _render_plan(recipe, body, flat=flat)
        outputs = [check.path for check in plan.outputs] if body.outputs is None else body.outputs
        if body.outputs is not None:
            # Outputs that the job itself names are required.
            checks = [check for check in (*plan.outputs, *plan.optional_outputs) if check.path in outputs]
            plan = plan.model_copy(update={"outputs": checks, "optional_outputs": []})
        only = plan.steps[0].environment if len(plan.steps) == 1 else {}
        policy_fields = body.policy.model_fields_set
        no_progress_timeout_s = recipe.health.no_progress_timeout_s
        return _build_spec(
            body,
            command=plan.steps[0].command,
            parameters=recipe.filled(body.parameters),
            outputs=outputs,
            plan=plan,
            environment={**only, **body.environment},
            requirements=_merge_requirements(recipe.requirements, body.requirements),
            policy=body.policy
            if no_progress_timeout_s is None or "no_progress_timeout_s" in policy_fields
            else body.policy.model_copy(update={"no_progress_timeout_s": no_progress_timeout_s}),
            rings=_list_rings(recipe, body, flat=flat),
        )

    def _find_recipe(self, recipe_id: str) -> Recipe:
        found = self._found.get(recipe_id) or built_in_recipe(recipe_id)
        if found is None:
            name, _, version = recipe_id.partition("@")
            stored = self._context.recipes.get(self._tenant, name, int(version))
            if stored is None:
                known = ", ".join(built_in_ids())
                detail = f"No recipe {recipe_id}; a job may name {known}, or a recipe that the tenant registered."
                raise Refusal(ErrorCode.UNKNOWN_RECIPE, detail, field="recipe")
            found = _require_sound(stored.document)
        self._found[recipe_id] = found
        return found


def _render_plan(recipe: Recipe, body: JobSubmit, *, flat: bool) -> RunPlan:
    from baton.contract.recipes.rendering import input_faults, parameter_faults, plan_of

    folders = {ref.into: ref.prefix for ref in body.inputs}
    faults = [*parameter_faults(recipe, body.parameters), *input_faults(recipe, folders)]
    plan = None
    if not faults:
        plan, faults = plan_of(recipe, body.parameters, list(folders))
    if plan is None:
        raise _build_refusal(faults, flat=flat)
    return plan


def _list_rings(recipe: Recipe, body: JobSubmit, *, flat: bool) -> list[str]:
    """List the rings that the job and its recipe name."""
    if not recipe.rings:
        return body.rings
    from baton.contract.recipes.rendering import rings_of

    names, faults = rings_of(recipe, body.parameters, [ref.into for ref in body.inputs])
    if not faults and len({*body.rings, *names}) > MAX_RINGS:
        faults = [Fault("rings", f"are more than {MAX_RINGS} with those of the recipe", "Use fewer in one job.")]
    if faults:
        raise _build_refusal(faults, flat=flat)
    return [*body.rings, *names]


def _build_refusal(faults: Sequence[Fault], *, flat: bool) -> Refusal:
    first = faults[0]
    name = first.field.removeprefix(_PARAMETERS)
    problem = f"Parameter {name!r} {first.reason}" if name != first.field else f"{first.field}: {first.reason}"
    more = f" And {len(faults) - 1} more: see 'problems'." if len(faults) > 1 else ""
    remedy = f" {first.remedy}" if first.remedy else ""
    if flat:
        faults = [fault._replace(field=fault.field.removeprefix(_PARAMETERS)) for fault in faults]
    return Refusal(ErrorCode.INVALID_VALUE, f"{problem}.{remedy}{more}", field=faults[0].field, problems=faults)


def _build_spec(
    body: JobSubmit,
    *,
    command: list[str],
    parameters: dict[str, object],
    outputs: list[str],
    plan: RunPlan | None = None,
    environment: dict[str, str] | None = None,
    requirements: Requirements | None = None,
    policy: Policy | None = None,
    rings: list[str] | None = None,
) -> Spec:
    return Spec(
        name=body.name,
        recipe=body.recipe,
        command=command,
        plan=plan,
        parameters=parameters,
        environment=body.environment if environment is None else environment,
        inputs=body.inputs,
        outputs=outputs,
        requirements=requirements or body.requirements,
        policy=policy or body.policy,
        tags=body.tags,
        webhook=body.webhook,
        rings=list(dict.fromkeys(body.rings if rings is None else rings)),
        rent=body.rent,
        nodes=body.nodes,
    )


def _merge_requirements(recipe: Requirements, job: Requirements) -> Requirements:
    """Return the recipe's requirements, overridden by the fields that the job sets."""
    return recipe.model_copy(update={name: getattr(job, name) for name in job.model_fields_set})


@lru_cache(maxsize=64)
def _lint_document(document: str) -> tuple[Recipe | None, tuple[Fault, ...]]:
    from baton.contract.recipes.lint import lint

    recipe, faults = lint(document)
    return recipe, tuple(faults)


def _require_sound(document: str) -> Recipe:
    """Return the recipe in a document; refuse a faulty document with all faults."""
    recipe, faults = _lint_document(document)
    if recipe is None:
        first = faults[0]
        place = f"line {first.line}, column {first.column}: {first.field}".rstrip(": ")
        more = f" And {len(faults) - 1} more: see 'problems'." if len(faults) > 1 else ""
        detail = f"{place}: {first.reason}. {first.remedy}{more}"
        raise Refusal(ErrorCode.INVALID_RECIPE, detail, field="document", problems=faults)
    return recipe


def _view_built_in(recipe_id: str) -> RecipeView | None:
    recipe, document = built_in_recipe(recipe_id), built_in_document(recipe_id)
    if recipe is None or document is None:
        return None
    as_json = recipe.model_dump(mode="json")
    return RecipeView(id=recipe.id, description=recipe.description, built_in=True, document=document, recipe=as_json)


def _summarize(entry: RecipeEntry) -> RecipeSummary:
    return RecipeSummary(id=entry.id, description=entry.description, created_at=entry.created_at)


def _view(stored: StoredRecipe) -> RecipeView:
    recipe = _require_sound(stored.document).model_dump(mode="json")
    return RecipeView(**_summarize(stored).model_dump(), document=stored.document, recipe=recipe)
