"""Validate the plain values of a document by a model; each error of the model becomes a fault with its place."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from baton.contract.yaml_documents import Document, Location

M = TypeVar("M", bound=BaseModel)


def validate_document(document: Document, model: type[M], *, kind: str, names: str) -> M | None:
    """Return the model of a document's values; None after recording the faults.

    kind: the documents in the plural, for messages. names: the remedy for a text that cannot be a name.
    """
    try:
        return model.model_validate(document.value, strict=True)
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            location = locate(document.value, problem["loc"])
            reason, remedy = explain_problem(dict(problem), location, model, kind=kind, names=names)
            document.fault(location, reason, remedy)
        return None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown name: the closest known name, or all known names."""
    close = get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(sorted(known)) or 'none'}."


def locate(value: Any, loc: Location) -> Location:
    """Convert pydantic's location of an error into a location in the document.

    pydantic adds the members of a union, which the document does not have. A missing field has its parent's place.
    """
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


def explain_problem(
    problem: dict[str, Any], location: Location, model: type[BaseModel], *, kind: str, names: str
) -> tuple[str, str]:
    """Convert an error of pydantic into a reason and a remedy; `validate_document` describes the arguments."""
    code, message = problem["type"], str(problem["msg"]).removeprefix("Value error, ")
    given = problem.get("input")
    if code == "missing":
        return "is missing", f"Add '{location[-1]}: ...' here."
    if code == "extra_forbidden":
        return f"is not a field of {kind}", did_you_mean(str(location[-1]), _fields_at(location[:-1], model))
    if code == "string_type":
        remedy = "Put it into quotes." if isinstance(given, (int, float, bool)) else "Write text."
        return f"must be text, not {_kind_of(given)}", remedy
    if code in _KINDS:
        return f"must be {_KINDS[code]}, not {_kind_of(given)}", _show_kind(code, given, location, model)
    if code.endswith(("_type", "_parsing")):
        return f"{message[0].lower()}{message[1:]}, not {_kind_of(given)}", "Write a value of that type."
    if code == "string_pattern_mismatch" and location and location[-1] in ("name", "queue"):
        return "cannot be a name", names
    return f"{message[0].lower()}{message[1:]}", "Change the value accordingly."


_KINDS = {
    "model_type": "fields with values",
    "dict_type": "names with values",
    "list_type": "a list",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
}
"""Requirement for a value, by pydantic's type of the error."""


def _show_kind(code: str, given: Any, location: Location, model: type[BaseModel]) -> str:
    """Return how a value of the right kind is written."""
    fields = _fields_at(location, model) if code == "model_type" else []
    if fields:
        return f"Write fields like '{{{fields[0]}: ...}}'; there are {', '.join(fields)}."
    if code == "list_type" and isinstance(given, (str, int, float)):
        return f"Write [{', '.join(str(given).split())}]."
    return "Write a value of that type."


def _kind_of(value: Any) -> str:
    kinds = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def _fields_at(location: Location, model: type[BaseModel]) -> list[str]:
    """Return the field names of the model at `location`."""
    schema = model.model_json_schema()
    found: Any = schema
    for part in location:
        found = found["items"] if isinstance(part, int) else found.get("properties", {}).get(part) or _members(found)
        found = next((member for member in found.get("anyOf", ()) if member.get("type") != "null"), found)
        if "$ref" in found:
            found = schema["$defs"][found["$ref"].rpartition("/")[2]]
    return list(found.get("properties", ()))


def _members(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a mapping's values."""
    found: Any = schema.get("additionalProperties") or next(iter(schema.get("patternProperties", {}).values()), {})
    return found if isinstance(found, dict) else {}
