"""Every fault of a recipe's document, each with its place, the reason and what would be right."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from pydantic import ValidationError

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

_MEMBERS: dict[str, Collection[str]] = {"dirs": frozenset(DIRECTORIES), "job": frozenset(("id",))}


_DIRECTORY = re.compile(rf"\{{\{{[-\s]*dirs\.({'|'.join(DIRECTORIES)})[-\s]*\}}\}}")
_LONE_PARAMETER = re.compile(r"\s*parameters\.([A-Za-z_][A-Za-z0-9_]*)\s*")


class Linted(NamedTuple):
    """The recipe, if there are no faults."""

    recipe: Recipe | None
    faults: list[Fault]


class _Text(NamedTuple):
    """A template or an expression (`bare`) of a recipe, and where it is."""

    location: Location
    text: str
    bare: bool


def lint(text: str) -> Linted:
    """Read a document and say all that is wrong with it, in the order of its lines."""
    document = read_document(text)
    if not isinstance(document.value, dict):
        if not document.faults:
            document.fault((), "this is no recipe", "Write fields like 'name: digits', 'version: 1', 'steps: [...]'.")
        return Linted(None, document.faults)
    recipe = _validated(document)
    # what is said below is looked at whether or not all the rest is right
    _look_at_parameters(document)
    _look_at_names(document, "rules", "fields")
    _look_at_names(document, "shared", "key")
    _look_for_repetitions(document)
    for one in _texts(document.value):
        _look_at_text(one, document)
    if recipe is not None and not document.faults:
        _try(recipe, document)
    if recipe is not None and not document.faults:
        _try_types(recipe, document)
    return Linted(None if document.faults else recipe, _ordered(document.faults))


def _ordered(faults: Iterable[Fault]) -> list[Fault]:
    return sorted(dict.fromkeys(faults), key=lambda fault: (fault.line or 0, fault.column or 0, fault.field))


def _validated(document: Document) -> Recipe | None:
    try:
        return Recipe.model_validate(document.value, strict=True)
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            location = _within(document.value, problem["loc"])
            reason, remedy = _in_words(dict(problem), location)
            document.fault(location, reason, remedy)
        return None


def _within(value: Any, loc: Location) -> Location:
    """pydantic's place of an error, without the kinds of a union that it adds; what is missing lies in its parent."""
    found: list[str | int] = []
    for part in loc:
        if isinstance(value, dict) and (part in value or part == loc[-1]) and part != "[key]":
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        found.append(part)
    return tuple(found)


def _in_words(problem: dict[str, Any], location: Location) -> tuple[str, str]:
    """Reason and remedy."""
    kind, said = problem["type"], str(problem["msg"]).removeprefix("Value error, ")
    given = problem.get("input")
    if kind == "missing":
        return "is missing", f"Add '{location[-1]}: ...' here."
    if kind == "extra_forbidden":
        known = _fields_at(location[:-1])
        close = get_close_matches(str(location[-1]), known, n=1)
        remedy = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(known)}."
        return "is not a field of recipes", remedy
    if kind == "string_type":
        remedy = "Put it into quotes." if isinstance(given, (int, float, bool)) else "Write text."
        return f"must be text, not {_kind_of(given)}", remedy
    if kind.endswith(("_type", "_parsing")):
        return f"{said[0].lower()}{said[1:]}, not {_kind_of(given)}", "Write a value of that kind."
    if kind == "string_pattern_mismatch" and location and location[-1] == "name":
        return "cannot be a name", "Use up to 63 lower-case letters, digits and hyphens, a letter or digit first."
    return f"{said[0].lower()}{said[1:]}", "Change it so."


def _kind_of(value: Any) -> str:
    kinds = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def _fields_at(location: Location) -> list[str]:
    """The fields of the model that lies there."""
    schema = Recipe.model_json_schema()
    found: Any = schema
    for part in location:
        found = found["items"] if isinstance(part, int) else found.get("properties", {}).get(part) or _members(found)
        found = next((one for one in found.get("anyOf", ()) if one.get("type") != "null"), found)
        if "$ref" in found:
            found = schema["$defs"][found["$ref"].rpartition("/")[2]]
    return sorted(found.get("properties", ()))


def _members(schema: dict[str, Any]) -> dict[str, Any]:
    """What a mapping's values are."""
    found: Any = schema.get("additionalProperties") or next(iter(schema.get("patternProperties", {}).values()), {})
    return found if isinstance(found, dict) else {}


def _try(recipe: Recipe, document: Document) -> None:
    """With its defaults it has to give a plan, if it has them all."""
    if any(spec.required for spec in recipe.parameters.values()):
        return
    for fault in plan_of(recipe, {}, [one.into for one in recipe.inputs])[1]:
        location = tuple(int(part) if part.isdigit() else part for part in fault.field.split("."))
        document.fault(location, f"with the defaults: {fault.reason}", fault.remedy)


def _try_types(recipe: Recipe, document: Document) -> None:
    """What has values of the wrong kind with all samples of parameters for which it is rendered has so with any."""
    rules = [rule.require for rule in recipe.rules]
    left: dict[_Text, str] = dict.fromkeys(_texts(document.value), "")
    for sample in samples_of(recipe):
        variables = variables_of(recipe, sample.given, sample.inputs)
        # What breaks a rule is refused before anything else is rendered.
        allowed = all(_holds(rule, variables) for rule in rules)
        runs = [allowed and (step.when is None or _holds(step.when, variables)) for step in recipe.steps]
        for one in list(left):
            section, number = one.location[0], one.location[1]
            is_rendered = allowed or section == "rules"
            if section == "steps" and one.location[2] != "when":
                is_rendered = isinstance(number, int) and runs[number]
            if not is_rendered:
                continue
            reason = _wrong_type(one, variables)
            if reason is None:
                del left[one]
            else:
                left[one] = reason
    for one, reason in left.items():
        if reason:
            remedy = "Make them fit; docs/recipes.md says what expressions can do."
            document.fault(one.location, f"with parameters of these types: {reason}", remedy)


def _holds(condition: str, variables: Mapping[str, Any]) -> bool:
    try:
        return is_true(condition, variables)
    except TemplateError:
        return False


def _wrong_type(one: _Text, variables: Mapping[str, Any]) -> str | None:
    """Why it cannot be rendered whatever the values are; None if it can be, or others might do."""
    try:
        if one.bare:
            is_true(one.text, variables)
        elif "environment" in one.location:
            render(one.text, variables)
        else:
            arguments(one.text, variables)
    except TemplateTypeError as error:
        return str(error)
    except TemplateError:
        return None
    return None


def _members_of(value: Any, name: str) -> dict[str, Any]:
    """The mapping of that name in what should be a mapping."""
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _items_of(value: Any, name: str) -> list[Any]:
    """The list of that name in what should be a mapping."""
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, list) else []


def _look_at_parameters(document: Document) -> None:
    for name, raw in _members_of(document.value, "parameters").items():
        try:
            spec = Parameter.model_validate(raw, strict=True)
        except ValidationError:
            continue  # was told already
        location: Location = ("parameters", name)
        if spec.required and spec.default is not None:
            document.fault((*location, "default"), "a required parameter has no default", "Leave out one of the two.")
        problem = None if spec.default is None else spec.problem(spec.default)
        if problem:
            document.fault((*location, "default"), f"the default {problem}", f"Give {spec.expected()}.")
        _look_at_bounds(spec, location, document)
        numeric = spec.type in ("integer", "number")
        for bound in ("minimum", "exclusive_minimum", "maximum", "exclusive_maximum", "multiple_of"):
            if getattr(spec, bound) is not None and not numeric:
                document.fault((*location, bound), f"means nothing for a {spec.type}", "Leave it out.")
        if spec.choices and spec.type not in ("string", "strings"):
            document.fault((*location, "choices"), f"means nothing for a {spec.type}", "Leave it out.")


def _look_at_bounds(spec: Parameter, location: Location, document: Document) -> None:
    """Between the lower and the upper ones there has to be something."""
    for upper in ("maximum", "exclusive_maximum"):
        for lower in ("minimum", "exclusive_minimum"):
            least, most = getattr(spec, lower), getattr(spec, upper)
            if least is None or most is None:
                continue
            if least > most:
                document.fault((*location, upper), f"is less than the {lower}", "Exchange them.")
            elif least == most and (lower, upper) != ("minimum", "maximum"):
                document.fault((*location, upper), f"leaves nothing beside the {lower}", "Move one of them.")


def _look_at_names(document: Document, section: str, field: str) -> None:
    """What a section names as parameters has to be some."""
    known = _members_of(document.value, "parameters")
    for number, item in enumerate(_items_of(document.value, section)):
        for index, name in enumerate(_items_of(item, field)):
            if isinstance(name, str) and name not in known:
                location: Location = (section, number, field, index)
                document.fault(location, f"there is no parameter {name!r}", _did_you_mean(name, known))


def _look_for_repetitions(document: Document) -> None:
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
                remedy = "Choose another one, or leave one out."
                document.fault((*location, number, field), f"{str(found)[:80]!r} is there already", remedy)
            seen.append(found)
            if isinstance(item, dict) and item.get("format") and item.get("min_files"):
                remedy = "Leave out 'format', or 'min_files' if it is a file."
                document.fault(
                    (*location, number, "format"), "is looked at in a file, 'min_files' in a directory", remedy
                )


def _texts(value: Any) -> Iterator[_Text]:
    """All templates and expressions that are texts, whatever else is wrong."""
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


def _look_at_text(one: _Text, document: Document) -> None:
    kind = "expression" if one.bare else "template"
    escape = None if one.bare else escape_of(_DIRECTORY.sub(lambda found: DIRECTORIES[found[1]], one.text))
    if escape:
        document.fault(one.location, f"{escape[:80]!r} leads out of the job's directory", "Leave out '..'.")
    try:
        found = references(one.text, bare=one.bare)
        check(one.text, bare=one.bare)
    except TemplateError as error:
        document.fault(one.location, f"no {kind}: {error}", "docs/recipes.md says what expressions can do.")
        return
    members = {**_MEMBERS, "parameters": _members_of(document.value, "parameters")}
    for name, member in found:
        if name not in NAMES:
            document.fault(one.location, f"there is no variable {name!r}", f"There are {', '.join(NAMES)}.")
        elif member is not None and name in members and member not in members[name]:
            document.fault(one.location, f"there is no {name}.{member}", _did_you_mean(member, members[name]))
    alone = _LONE_PARAMETER.fullmatch(one.text) if one.bare else None
    spec = _members_of(members["parameters"], alone[1]) if alone else {}
    if spec.get("type", "boolean") != "boolean":
        document.fault(one.location, "is neither true nor false", "Compare with something.")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(sorted(known)) or 'none'}."
