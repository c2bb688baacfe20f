"""Find every fault of a recipe document, with its place, reason and remedy."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from baton.contract.document_models import did_you_mean, validate_document
from baton.contract.errors import Fault
from baton.contract.recipes.model import Parameter, Recipe
from baton.contract.recipes.rendering import DIRECTORIES, NAMES, escape_of, plan_of, variables_of
from baton.contract.recipes.samples import samples_of
from baton.contract.recipes.templates import (
    TemplateError,
    TemplateTypeError,
    arguments,
    check,
    is_true,
    references,
    render,
)
from baton.contract.yaml_documents import Document, Location, read_document

_NAMES = "Use up to 63 lower-case letters, digits and hyphens, a letter or digit first."
_MEMBERS: dict[str, Collection[str]] = {"dirs": frozenset(DIRECTORIES), "job": frozenset(("id",))}


_DIRECTORY = re.compile(rf"\{{\{{[-\s]*dirs\.({'|'.join(DIRECTORIES)})[-\s]*\}}\}}")
_LONE_PARAMETER = re.compile(r"\s*parameters\.([A-Za-z_][A-Za-z0-9_]*)\s*")


class Linted(NamedTuple):
    """Result of linting: `recipe` is None if there are faults."""

    recipe: Recipe | None
    faults: list[Fault]


class _Text(NamedTuple):
    """A template, or a bare expression, of a recipe with its location."""

    location: Location
    text: str
    bare: bool


def lint(text: str) -> Linted:
    """Read a recipe document and return all of its faults in the order of its lines."""
    document = read_document(text)
    if not isinstance(document.value, dict):
        if not document.faults:
            remedy = "Write fields like 'name: digits', 'version: 1', 'steps: [...]'."
            document.fault((), "the document is not a recipe", remedy)
        return Linted(None, document.faults)
    recipe = validate_document(document, Recipe, kind="recipes", names=_NAMES)
    # The next checks read the plain values, so that they find their faults even if the recipe has others.
    _check_parameters(document)
    _check_parameter_names(document, "rules", "fields")
    _check_parameter_names(document, "shared", "key")
    _check_repetitions(document)
    for template in _texts(document.value):
        _check_text(template, document)
    if recipe is not None and not document.faults:
        _check_default_plan(recipe, document)
    if recipe is not None and not document.faults:
        _check_types(recipe, document)
    return Linted(None if document.faults else recipe, _ordered(document.faults))


def _ordered(faults: Iterable[Fault]) -> list[Fault]:
    return sorted(dict.fromkeys(faults), key=lambda fault: (fault.line or 0, fault.column or 0, fault.field))


def _check_default_plan(recipe: Recipe, document: Document) -> None:
    """Render the recipe with its defaults and record the faults, unless a parameter is required."""
    if any(spec.required for spec in recipe.parameters.values()):
        return
    for fault in plan_of(recipe, {}, [folder.into for folder in recipe.inputs])[1]:
        location = tuple(int(part) if part.isdigit() else part for part in fault.field.split("."))
        document.fault(location, f"with the defaults: {fault.reason}", fault.remedy)


def _check_types(recipe: Recipe, document: Document) -> None:
    """Record each text that fails with a type error for every sample of parameters.

    The samples cover each type that a parameter can have, so such a text fails for every job.
    """
    rules = [rule.require for rule in recipe.rules]
    unproved: dict[_Text, str] = dict.fromkeys(_texts(document.value), "")
    for sample in samples_of(recipe):
        variables = variables_of(recipe, sample.given, sample.inputs)
        # Parameters that break a rule are refused before any other text is rendered.
        allowed = all(_holds(rule, variables) for rule in rules)
        runs = [allowed and (step.when is None or _holds(step.when, variables)) for step in recipe.steps]
        for text in list(unproved):
            section, number = text.location[0], text.location[1]
            is_rendered = allowed or section == "rules"
            if section == "steps" and text.location[2] != "when":
                is_rendered = isinstance(number, int) and runs[number]
            if not is_rendered:
                continue
            reason = _type_error(text, variables)
            if reason is None:
                del unproved[text]
            else:
                unproved[text] = reason
    for text, reason in unproved.items():
        if reason:
            remedy = "Correct the expression; docs/recipes.md lists the operators and filters of expressions."
            document.fault(text.location, f"with parameters of these types: {reason}", remedy)


def _holds(condition: str, variables: Mapping[str, Any]) -> bool:
    try:
        return is_true(condition, variables)
    except TemplateError:
        return False


def _type_error(template: _Text, variables: Mapping[str, Any]) -> str | None:
    """Return the type error of rendering the text; None for success and for errors that depend on the values."""
    try:
        if template.bare:
            is_true(template.text, variables)
        elif "environment" in template.location:
            render(template.text, variables)
        else:
            arguments(template.text, variables)
    except TemplateTypeError as error:
        return str(error)
    except TemplateError:
        return None
    return None


def _members_of(value: Any, name: str) -> dict[str, Any]:
    """Return the member `name` of a mapping if the member is a mapping; otherwise an empty one."""
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _items_of(value: Any, name: str) -> list[Any]:
    """Return the member `name` of a mapping if the member is a list; otherwise an empty one."""
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, list) else []


def _check_parameters(document: Document) -> None:
    for name, raw in _members_of(document.value, "parameters").items():
        try:
            spec = Parameter.model_validate(raw, strict=True)
        except ValidationError:
            continue  # validate_document has recorded the fault
        location: Location = ("parameters", name)
        if spec.required and spec.default is not None:
            document.fault((*location, "default"), "a required parameter has no default", "Leave out one of the two.")
        problem = None if spec.default is None else spec.problem(spec.default)
        if problem:
            document.fault((*location, "default"), f"the default {problem}", f"Give {spec.expected()}.")
        _check_bounds(spec, location, document)
        numeric = spec.type in ("integer", "number")
        for bound in ("minimum", "exclusive_minimum", "maximum", "exclusive_maximum", "multiple_of"):
            if getattr(spec, bound) is not None and not numeric:
                document.fault((*location, bound), f"has no effect on type {spec.type}", "Leave it out.")
        if spec.choices and spec.type not in ("string", "strings"):
            document.fault((*location, "choices"), f"has no effect on type {spec.type}", "Leave it out.")


def _check_bounds(spec: Parameter, location: Location, document: Document) -> None:
    """Record each upper bound that leaves no value above a lower bound."""
    for upper in ("maximum", "exclusive_maximum"):
        for lower in ("minimum", "exclusive_minimum"):
            least, most = getattr(spec, lower), getattr(spec, upper)
            if least is None or most is None:
                continue
            if least > most:
                document.fault((*location, upper), f"is less than {lower}", "Exchange the two bounds.")
            elif least == most and (lower, upper) != ("minimum", "maximum"):
                document.fault((*location, upper), f"leaves no value, with the {lower}", "Change one of the bounds.")


def _check_parameter_names(document: Document, section: str, field: str) -> None:
    """Record each unknown parameter that a section names in `field`."""
    known = _members_of(document.value, "parameters")
    for number, item in enumerate(_items_of(document.value, section)):
        for index, name in enumerate(_items_of(item, field)):
            if isinstance(name, str) and name not in known:
                location: Location = (section, number, field, index)
                document.fault(location, f"there is no parameter {name!r}", did_you_mean(name, known))


def _check_repetitions(document: Document) -> None:
    value = document.value
    steps = _items_of(value, "steps")
    outputs: list[tuple[Location, list[Any]]] = [(("outputs",), _items_of(value, "outputs"))]
    outputs += [(("steps", number, "outputs"), _items_of(step, "outputs")) for number, step in enumerate(steps)]
    lists: list[tuple[Location, list[Any], str]] = [(("steps",), steps, "name")]
    lists.append((("inputs",), _items_of(value, "inputs"), "into"))
    lists.append((("shared",), _items_of(value, "shared"), "path"))
    lists += [(location, items, "path") for location, items in outputs]
    for location, items, field in lists:
        seen: list[Any] = []
        for number, item in enumerate(items):
            found = item.get(field, "" if field == "into" else None) if isinstance(item, dict) else None
            if found is not None and found in seen:
                remedy = f"Choose another {field}, or leave one of the two out."
                document.fault((*location, number, field), f"{str(found)[:80]!r} occurs twice", remedy)
            seen.append(found)
            if isinstance(item, dict) and item.get("format") and item.get("min_files"):
                remedy = "Leave out 'min_files' for a file, 'format' for a directory."
                reason = "applies to files, but 'min_files' to directories"
                document.fault((*location, number, "format"), reason, remedy)


def _texts(value: Any) -> Iterator[_Text]:
    """Yield all templates and expressions of a document, which may have faults."""
    for number, rule in enumerate(_items_of(value, "rules")):
        yield from _condition(rule, ("rules", number), "require")
    for number, step in enumerate(_items_of(value, "steps")):
        yield from _condition(step, ("steps", number), "when")
        yield from _texts_of(step, ("steps", number))
        for index, output in enumerate(_items_of(step, "outputs")):
            yield from _condition(output, ("steps", number, "outputs", index), "when")
    for number, output in enumerate(_items_of(value, "outputs")):
        yield from _condition(output, ("outputs", number), "when")
    for number, shared in enumerate(_items_of(value, "shared")):
        yield from _condition(shared, ("shared", number), "when")
    for number, place in enumerate(_items_of(value, "rings")):
        if isinstance(place, str):
            yield _Text(("rings", number), place, bare=False)
    yield from _texts_of(_members_of(_members_of(value, "health"), "check"), ("health", "check"))
    for number, command in enumerate(_items_of(value, "cleanup")):
        yield from _texts_of(command, ("cleanup", number))


def _condition(value: Any, location: Location, field: str) -> Iterator[_Text]:
    if isinstance(value, dict) and isinstance(value.get(field), str):
        yield _Text((*location, field), value[field], bare=True)


def _texts_of(command: Any, location: Location) -> Iterator[_Text]:
    for number, argument in enumerate(_items_of(command, "run")):
        if isinstance(argument, str):
            yield _Text((*location, "run", number), argument, bare=False)
    for name, text in _members_of(command, "environment").items():
        if isinstance(text, str):
            yield _Text((*location, "environment", name), text, bare=False)


def _check_text(template: _Text, document: Document) -> None:
    kind = "expression" if template.bare else "template"
    escape = None if template.bare else escape_of(_DIRECTORY.sub(lambda found: DIRECTORIES[found[1]], template.text))
    if escape:
        document.fault(template.location, f"{escape[:80]!r} leads out of the job's directory", "Leave out '..'.")
    try:
        found = references(template.text, bare=template.bare)
        check(template.text, bare=template.bare)
    except TemplateError as error:
        remedy = "docs/recipes.md lists the operators and filters of expressions."
        document.fault(template.location, f"invalid {kind}: {error}", remedy)
        return
    members = {**_MEMBERS, "parameters": _members_of(document.value, "parameters")}
    for name, member in found:
        if name not in NAMES:
            document.fault(template.location, f"there is no variable {name!r}", f"There are {', '.join(NAMES)}.")
        elif member is not None and name in members and member not in members[name]:
            document.fault(template.location, f"there is no {name}.{member}", did_you_mean(member, members[name]))
    alone = _LONE_PARAMETER.fullmatch(template.text) if template.bare else None
    spec = _members_of(members["parameters"], alone[1]) if alone else {}
    if spec.get("type", "boolean") != "boolean":
        remedy = f"Write a comparison, such as {template.text.strip()} > 0."
        document.fault(template.location, "is neither true nor false", remedy)
