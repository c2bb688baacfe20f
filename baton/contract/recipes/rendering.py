"""Render a recipe and a job's parameters into a plan, and report every fault, not only the first."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from baton.contract.base import JsonObject
from baton.contract.errors import Fault
from baton.contract.jobs.command_variables import FORM, command_problem
from baton.contract.names import RING_NAME_PATTERN, RING_PLACE, SHARED_DIR
from baton.contract.recipes.model import Output, Program, Recipe, RecipeStep, Shared
from baton.contract.recipes.plan import CommandOrder, OutputCheck, RunPlan, SharedFile, StepOrder
from baton.contract.recipes.templates import TemplateError, arguments, is_true, references, render

MAX_PLAN_CHARS = 64 * 1024
MAX_ARGUMENTS = 256

DIRECTORIES = {
    "data": "${BATON_DATA_DIR}",
    "output": "${BATON_OUTPUT_DIR}",
    "resume": "${BATON_RESUME_FROM}",
    "parameters": "${BATON_PARAMS}",
    "shared": f"${{BATON_DATA_DIR}}/{SHARED_DIR}",
}
"""`dirs` in templates: the directories of a job. The worker substitutes the paths."""
MAX_NAMED = 20
"""Largest number of parameter names that a remedy lists; beyond it the remedy names the command that lists them."""
NAMES = ("parameters", "given", "inputs", "dirs", "job")
"""Variables of expressions."""

_BELOW = re.compile(r"\$(?:\{(BATON_[A-Z_]+)\}|(BATON_[A-Z_]+))((?:/[^\s:;,=]*)?)")
_BETWEEN_PATHS = re.compile(r"[=:]")
_NO_PATH = re.compile(r"\s|\{\{")
"""Prose, or an expression that is not rendered yet."""
_NEXT = re.compile(r"[${]")
"""Start of another variable, or of an expression that is not rendered yet and may become several folders."""
T = TypeVar("T")


def parameter_faults(recipe: Recipe, given: JsonObject) -> list[Fault]:
    """Return the faults of single parameters, and the broken rules among parameters without such faults."""
    found = [
        Fault(f"parameters.{name}", f"is not a parameter of {recipe.id}", _did_you_mean(name, recipe))
        for name in given
        if name not in recipe.parameters
    ]
    unsound = set()
    for name, spec in recipe.parameters.items():
        problem = spec.problem(given[name]) if name in given else "is required" if spec.required else None
        if problem:
            unsound.add(name)
            # The remedy lists the choices, so the reason does not repeat them.
            reason = problem.replace(f"must be one of {', '.join(spec.choices or ())}", "is none of its choices")
            found.append(Fault(f"parameters.{name}", reason, f"Give {spec.expected()}."))
    return found + _broken_rules(recipe, given, unsound)


def input_faults(recipe: Recipe, inputs: Mapping[str, str]) -> list[Fault]:
    """Return the faults of a job's inputs, given as prefixes by their folder (`into`)."""
    found = []
    for wanted in recipe.inputs:
        named = f"the input for {wanted.into!r}" if wanted.into else "the input"
        if wanted.into not in inputs:
            if wanted.required:
                remedy = f'Add {{"prefix": "...", "into": "{wanted.into}"}}: {wanted.description}'.strip()
                found.append(Fault("inputs", f"{named} is missing", remedy))
        elif not inputs[wanted.into]:
            found.append(Fault("inputs", f"{named} has an empty prefix", "Name the folder of the files."))
    return found


def plan_of(recipe: Recipe, given: JsonObject, inputs: Collection[str] = ()) -> tuple[RunPlan | None, list[Fault]]:
    """Render the plan for parameters without faults. Returns None and the faults if rendering fails."""
    variables = variables_of(recipe, given, inputs)
    renderer = _Renderer(variables)
    steps = [
        renderer.step(step, f"steps.{number}")
        for number, step in enumerate(recipe.steps)
        if renderer.wanted(step.when, f"steps.{number}.when")
    ]
    check = recipe.health.check
    plan = RunPlan(
        steps=steps,
        outputs=renderer.outputs(recipe.outputs, "outputs", required=True),
        optional_outputs=renderer.outputs(recipe.outputs, "outputs", required=False),
        check=renderer.command(check, "health.check") if check else None,
        cleanup=[renderer.command(program, f"cleanup.{number}") for number, program in enumerate(recipe.cleanup)],
        shared=[
            SharedFile(path=shared.path, key=shared_key(recipe, shared, given))
            for number, shared in enumerate(recipe.shared)
            if renderer.wanted(shared.when, f"shared.{number}.when")
        ],
    )
    faults = renderer.faults
    if not steps and not faults:
        faults = [Fault("parameters", "no step is left to run", "See the steps' 'when' in the recipe.")]
    if not faults and (size := len(plan.model_dump_json())) > MAX_PLAN_CHARS:
        reason = f"the steps become {size} characters; at most {MAX_PLAN_CHARS} are allowed"
        faults = [Fault("parameters", reason, "Shorten the longest ones.")]
    return (None, faults) if faults else (plan, [])


def rings_of(recipe: Recipe, given: JsonObject, inputs: Collection[str] = ()) -> tuple[list[str], list[Fault]]:
    """Return the names of the control plane's rings that the programs use. Rings in other places need no permission."""
    renderer = _Renderer(variables_of(recipe, given, inputs))
    places = [place for number, text in enumerate(recipe.rings) for place in renderer.places(text, f"rings.{number}")]
    names = [place.removeprefix(RING_PLACE) for place in places if place.startswith(RING_PLACE)]
    remedy = "Name it with lower-case letters, digits and hyphens, as in baton:shapes."
    wrong = [
        Fault("parameters", f"{RING_PLACE}{name} is no place of a ring", remedy)
        for name in names
        if not re.fullmatch(RING_NAME_PATTERN, name)
    ]
    return names, [*renderer.faults, *wrong]


def variables_of(recipe: Recipe, given: JsonObject, inputs: Collection[str]) -> dict[str, Any]:
    """Return the variables of expressions; a parameter that is not set is null."""
    return {
        "parameters": {**dict.fromkeys(recipe.parameters), **recipe.filled(given)},
        "given": [name for name, value in given.items() if value is not None],
        "inputs": list(inputs),
        "dirs": dict(DIRECTORIES),
        "job": {"id": "${BATON_JOB_ID}"},
    }


def shared_key(recipe: Recipe, shared: Shared, given: JsonObject) -> str:
    """Return the key of a shared file: SHA-256 of recipe name (without version), path and `key` parameters."""
    filled = recipe.filled(given)
    facts = [recipe.name, shared.path, {name: filled.get(name) for name in shared.key}]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def escape_of(text: str) -> str | None:
    """Return the part of an argument that leads out of a directory of the job by `..`; None if there is none."""
    for found in _BELOW.finditer(text):
        if _leads_out(found[3]):
            return found[0]
        # An argument or an option's value that begins with a directory is one path, even with spaces or colons.
        whole = _NEXT.split(text[found.start(3) :], maxsplit=1)[0]
        if text[: found.start()][-1:] in ("", "=") and whole.startswith("/") and _leads_out(whole):
            return text[found.start() : found.start(3)] + whole
    if ".." not in text or _NO_PATH.search(text):
        return None
    # Relative paths start in the job's directory, where programs start. The start of other paths is not known.
    relative = (path for path in _BETWEEN_PATHS.split(text) if not path.startswith(("/", "~")) and "$" not in path)
    return next((path for path in relative if _leads_out(path)), None)


def _leads_out(path: str) -> bool:
    depth = 0
    for part in path.split("/"):
        depth += {"": 0, ".": 0, "..": -1}.get(part, 1)
        if depth < 0:
            return True
    return False


class _Renderer:
    """Renders the parts of a plan and collects the faults; a fault does not stop the rendering."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._variables = variables
        self.faults: list[Fault] = []

    def wanted(self, when: str | None, field: str) -> bool:
        return when is None or self._tried(lambda: is_true(when, self._variables), field, False)

    def step(self, step: RecipeStep, field: str) -> StepOrder:
        order = self.command(step, field)
        return StepOrder(
            **order.model_dump(),
            name=step.name,
            retries=step.retries,
            retry_wait_s=step.retry_wait_s,
            outputs=self.outputs(step.outputs, f"{field}.outputs", required=True),
            optional_outputs=self.outputs(step.outputs, f"{field}.outputs", required=False),
            keeps=step.keeps,
            checkpoints=step.checkpoints,
        )

    def command(self, command: Program, field: str) -> CommandOrder:
        rendered = [
            argument
            for number, text in enumerate(command.run)
            for argument in self._arguments(text, f"{field}.run.{number}")
        ]
        environment = {
            name: self._value(text, f"{field}.environment.{name}") for name, text in command.environment.items()
        }
        if len(rendered) > MAX_ARGUMENTS:
            reason = f"the command has {len(rendered)} arguments; at most {MAX_ARGUMENTS} are allowed"
            self.faults.append(Fault(f"{field}.run", reason, "Write them to a file that the program reads."))
        elif not rendered or not rendered[0].strip():
            self.faults.append(Fault(f"{field}.run", "names no program", "Begin it with the program's name."))
        elif problem := command_problem(rendered):
            self.faults.append(Fault(f"{field}.run", problem, f"Write {FORM}."))
        return CommandOrder(command=rendered, environment=environment, timeout_s=command.timeout_s)

    def places(self, text: str, field: str) -> list[str]:
        nothing: list[str] = []
        return self._tried(lambda: arguments(text, self._variables), field, nothing)

    def outputs(self, outputs: Iterable[Output], field: str, *, required: bool) -> list[OutputCheck]:
        return [
            OutputCheck(path=output.path, min_bytes=output.min_bytes, min_files=output.min_files, format=output.format)
            for number, output in enumerate(outputs)
            if output.required is required and self.wanted(output.when, f"{field}.{number}.when")
        ]

    def _arguments(self, text: str, field: str) -> list[str]:
        nothing: list[str] = []
        rendered = self._tried(lambda: arguments(text, self._variables), field, nothing)
        for argument in rendered:
            self._require_inside(argument, field)
        return rendered

    def _value(self, text: str, field: str) -> str:
        value = self._tried(lambda: render(text, self._variables), field, "")
        self._require_inside(value, field)
        return value

    def _require_inside(self, value: str, field: str) -> None:
        escape = escape_of(value)
        if escape:
            reason = f"{escape[:80]!r} leads out of the job's directory"
            self.faults.append(Fault(field, reason, "Leave out '..', in the recipe and in its parameters."))

    def _tried(self, work: Callable[[], T], field: str, otherwise: T) -> T:
        try:
            return work()
        except TemplateError as error:
            self.faults.append(Fault(field, str(error), "Correct the recipe, or choose other parameters."))
            return otherwise


def _broken_rules(recipe: Recipe, given: JsonObject, unsound: Collection[str]) -> list[Fault]:
    """Return the faults of the broken rules that read no unsound parameter."""
    variables = variables_of(recipe, given, ())
    found = []
    for number, rule in enumerate(recipe.rules):
        try:
            if unsound and _reads(rule.require, unsound):
                continue
            if not is_true(rule.require, variables):
                found.append(Fault(f"parameters.{rule.fields[0]}", rule.message, rule.remedy))
        except TemplateError as error:
            found.append(Fault(f"rules.{number}.require", str(error), "Correct the recipe."))
    return found


def _reads(expression: str, names: Collection[str]) -> bool:
    """Return True if an expression may read one of the parameters."""
    read = [reference.member for reference in references(expression, bare=True) if reference.name == "parameters"]
    return any(member is None or member in names for member in read)


def _did_you_mean(name: str, recipe: Recipe) -> str:
    """Return the remedy for an unknown parameter: the most similar name, or else the list of names."""
    names = sorted(recipe.parameters)
    close = get_close_matches(name, names, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    if len(names) > MAX_NAMED:
        return f"`baton recipes docs {recipe.id}` lists its {len(names)} parameters."
    return f"There are {', '.join(names)}." if names else "The recipe has no parameters."
