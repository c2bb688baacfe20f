"""The OpenAPI 3.1 description of the route table. `python -m functions.api.http.openapi` prints the description."""

from __future__ import annotations

import inspect
import json
import re
import sys
from typing import Any
from urllib.parse import parse_qsl

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema

from baton.contract.base import JOB_ID_PATTERN, MAX_KEY_BYTES, MAX_STEP
from baton.contract.error_body import ErrorBody
from baton.contract.errors import ErrorCode
from baton.contract.fleets.money import Budget
from baton.contract.fleets.providers import ACCOUNTS
from baton.contract.names import (
    BUCKETS,
    FLEET_NAME_PATTERN,
    KEY_ID_PATTERN,
    MACHINE_NAME_PATTERN,
    REGISTRY_PATTERN,
    RING_NAME_PATTERN,
)
from baton.contract.recipes.calls import RECIPE_ID_PATTERN
from functions.api.http.route import Route, all_routes
from functions.settings import ControlPlaneSettings

_BYTES = "application/octet-stream"
_REF = "#/components/schemas/{model}"
_SEGMENT = r"(?!\.{1,2}(/|$))[^/\\\x00-\x1f\x7f-\x9f]+"
_KEY_PATTERN = f"^{_SEGMENT}(/{_SEGMENT})*$"
_CHECKED_BY = {
    "checked_path": _KEY_PATTERN,
    "_checked_relative_path": _KEY_PATTERN,
    "_checked_prefix": f"^({_SEGMENT}(/{_SEGMENT})*/?)?$",
    "_into_is_relative": f"^({_SEGMENT}(/{_SEGMENT})*)?$",
}
"""Patterns that the contract's validators require beyond the types, by the validator's name. The validators count
bytes, JSON Schema counts characters: a non-ASCII key may be too long although the schema accepts the key."""


def _restrict_fields(kind: str, *fields: str) -> dict[str, Any]:
    """Return the schema of a command of one kind, which may have only these of the kinds' fields."""
    others = {"outcome", "save", "tag", "knob", "value", "factor"} - set(fields)
    return {"properties": {"kind": {"const": kind}, **{name: {"type": "null"} for name in sorted(others)}}}


def _require_fields(**types: str) -> dict[str, Any]:
    """Return a schema that requires these fields with types other than null."""
    return {"required": sorted(types), "properties": {name: {"type": type_} for name, type_ in types.items()}}


_QUARANTINED = {"ring": "string", "object": "string", "objects": "integer"}
"""Fields that only a `Decision` of type `ring.quarantined` has."""
_BETWEEN_FIELDS: dict[str, dict[str, Any]] = {
    "Budget": {"anyOf": [_require_fields(**{name: "number"}) for name in sorted(Budget.model_fields)]},
    "JobSubmit": {
        "oneOf": [
            {"required": ["recipe"], "properties": {"recipe": {"type": "string"}}},
            {"required": ["command"], "properties": {"command": {"type": "array"}}},
        ]
    },
    "CommandRequest": {
        "oneOf": [
            _restrict_fields("stop", "outcome", "save"),
            _restrict_fields("save", "tag"),
            _restrict_fields("evaluate"),
            _restrict_fields("pause"),
            {"allOf": [_restrict_fields("set", "knob", "value"), _require_fields(knob="string", value="number")]},
            {"allOf": [_restrict_fields("set", "knob", "factor"), _require_fields(knob="string", factor="number")]},
        ]
    },
    "LeaveByRule": {
        "oneOf": [
            {
                "required": ["rollback"],
                "properties": {
                    "kind": {"const": "rollback"},
                    "rollback": {"type": "object"},
                    "ended_by": {"required": ["rule"], "properties": {"rule": {"type": "string"}}},
                },
            },
            {"properties": {"kind": {"enum": ["pause", "requeue"]}, "rollback": {"type": "null"}}},
        ]
    },
    "Decision": {
        "if": {"required": ["type"], "properties": {"type": {"const": "ring.quarantined"}}},
        "then": _require_fields(**_QUARANTINED),
        "else": {"properties": {name: {"type": "null"} for name in _QUARANTINED}},
    },
    "Chunk": {
        "oneOf": [
            {
                "required": ["pack"],
                "properties": {
                    "pack": {"type": "integer"},
                    "codec": {"enum": ["raw", "planes"]},
                    "base": {"type": "null"},
                },
            },
            {
                "required": ["codec"],
                "properties": {"pack": {"type": "null"}, "codec": {"const": "zeros"}, "base": {"type": "null"}},
            },
            {
                "required": ["pack", "codec", "base"],
                "properties": {
                    "pack": {"type": "integer"},
                    "codec": {"const": "delta"},
                    "base": {"type": "integer"},
                },
            },
        ]
    },
}
"""Rules between the fields of a model."""
_PATH_SCHEMAS: dict[str, dict[str, Any]] = {
    "id": {"type": "string", "pattern": JOB_ID_PATTERN},
    "step": {"type": "integer", "minimum": 0, "maximum": MAX_STEP},
    "bucket": {"type": "string", "enum": list(BUCKETS)},
    "recipe": {"type": "string", "pattern": RECIPE_ID_PATTERN},
    "ring": {"type": "string", "pattern": RING_NAME_PATTERN},
    "fleet": {"type": "string", "pattern": FLEET_NAME_PATTERN},
    "machine": {"type": "string", "pattern": MACHINE_NAME_PATTERN},
    "provider": {"type": "string", "enum": list(ACCOUNTS)},
    "registry": {"type": "string", "pattern": REGISTRY_PATTERN},
    "file": {"type": "string", "pattern": r"^[A-Za-z0-9._-]{1,100}$"},
    "key": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_BYTES, "pattern": _KEY_PATTERN},
}
_KEY_ID = {"type": "string", "pattern": KEY_ID_PATTERN}
_PATH_EXAMPLES: dict[str, Any] = {
    "id": "146683a1-cb76-4702-9fef-fcccd32594f1",
    "step": 100,
    "bucket": "training-data",
    "recipe": "digits@1",
    "ring": "shapes",
    "fleet": "nights",
    "machine": "a1b2c3d4-nights-9f8e7d6c5b4a",
    "provider": "vast",
    "registry": "ghcr.io",
    "file": "main-5TQ7A2.js",
    "key": "digits/3/0001.png",
}
_KEY_ID_EXAMPLE = "k3f9a7c2"
_ALWAYS = (ErrorCode.UNKNOWN_FIELD, ErrorCode.INTERNAL, ErrorCode.UNAVAILABLE, ErrorCode.TOO_MANY_REQUESTS)
_GUARDED = (
    ErrorCode.UNAUTHORIZED,
    ErrorCode.KEY_UNKNOWN,
    ErrorCode.KEY_REVOKED,
    ErrorCode.KEY_EXPIRED,
    ErrorCode.SESSION_OVER,
    ErrorCode.WRONG_SCOPE,
)


def describe() -> dict[str, Any]:
    """Return the whole description as a JSON-ready dictionary."""
    schemas = _Schemas()
    paths: dict[str, dict[str, Any]] = {}
    for route in all_routes():
        paths.setdefault(route.path.replace("+}", "}"), {})[route.method.lower()] = _describe_operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": ControlPlaneSettings.model_fields["version"].default,
            "description": "Hands training jobs to GPU workers that may vanish at any second. A client whose key has "
            "exactly the scopes submit and worker, and that sends none of Baton's headers, is one of the original "
            "Dreambooth orchestrator: it receives OriginalJob and OriginalEvent, and text as `error` of a refusal.",
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.found.items())),
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "x-api-key"}},
        },
    }


class _Generator(GenerateJsonSchema):
    """Schema generator that adds the requirements of the contract's validators."""

    def function_after_schema(self, schema: core_schema.AfterValidatorFunctionSchema) -> JsonSchemaValue:
        described = super().function_after_schema(schema)
        pattern = _CHECKED_BY.get(getattr(schema["function"]["function"], "__name__", ""))
        return {**described, "pattern": pattern} if pattern else described

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        described = super().dict_schema(schema)
        return {**described, "additionalProperties": False} if "patternProperties" in described else described


class _Schemas:
    """Collection of the models' schemas under `components`."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def of(self, annotation: Any, mode: JsonSchemaMode) -> dict[str, Any]:
        """Return a reference to the schema of an annotation, or the inline schema."""
        schema = TypeAdapter(annotation).json_schema(mode=mode, ref_template=_REF, schema_generator=_Generator)
        for name, definition in schema.pop("$defs", {}).items():
            self._add(name, definition)
        if inspect.isclass(annotation) and issubclass(annotation, BaseModel) and "$ref" not in schema:
            self._add(annotation.__name__, schema)
            return {"$ref": _REF.format(model=annotation.__name__)}
        return schema

    def _add(self, name: str, definition: dict[str, Any]) -> None:
        self.found.setdefault(name, {**definition, **_BETWEEN_FIELDS.get(name, {})})


def _describe_operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    summary = (inspect.getdoc(route.call) or "").split("\n", maxsplit=1)[0]
    operation: dict[str, Any] = {
        "operationId": f"{route.function}_{route.call.__name__}{'_head' if route.method == 'HEAD' else ''}",
        "summary": summary,
        "tags": [route.function],
        "parameters": [
            *_describe_path_parameters(route),
            *_describe_query_parameters(route, schemas),
            *_describe_headers(route),
        ],
        "responses": _describe_responses(route, schemas),
        "security": [{"key": []}] if route.scopes else [],
    }
    if route.scopes:
        operation["x-scopes"] = sorted(route.scopes)
    if route.body:
        choices = [schemas.of(model, "validation") for model in route.body]
        schema = choices[0] if len(choices) == 1 else {"anyOf": choices}
        examples = {model.__name__: {"value": parse_example(model)} for model in route.body}
        operation["requestBody"] = {
            "required": route.body_required,
            "content": {"application/json": {"schema": schema, "examples": examples}},
        }
    if route.takes_bytes:
        operation["requestBody"] = {"required": True, "content": {_BYTES: {"schema": {}}}}
    return operation


def parse_example(model: type[BaseModel]) -> dict[str, Any]:
    """Return the example in a request model's docstring, JSON or a query string; empty without an example.

    Raises:
        pydantic.ValidationError: The model refuses the example.
    """
    found = re.search(r"Example:\s+`([^`]+)`", model.__doc__ or "")
    if found is None:
        return {}
    text = " ".join(found.group(1).split())
    value = dict(parse_qsl(text[1:], strict_parsing=True)) if text.startswith("?") else json.loads(text)
    return model.model_validate(value).model_dump(mode="json", exclude_unset=True, by_alias=True)


def _describe_path_parameters(route: Route) -> list[dict[str, Any]]:
    names = [part.strip("{}").rstrip("+") for part in route.path.split("/") if part.startswith("{")]
    schemas, examples = _PATH_SCHEMAS, _PATH_EXAMPLES
    if route.path.startswith("/keys"):
        schemas, examples = {"id": _KEY_ID}, {"id": _KEY_ID_EXAMPLE}
    return [
        {"name": name, "in": "path", "required": True, "schema": schemas[name], "example": examples[name]}
        for name in names
    ]


def _describe_query_parameters(route: Route, schemas: _Schemas) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    schema = TypeAdapter(route.query).json_schema(mode="validation", ref_template=_REF, schema_generator=_Generator)
    schemas.found |= schema.pop("$defs", {})
    required = set(schema.get("required", ()))
    examples = {name: {"example": value} for name, value in parse_example(route.query).items()}
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _drop_null(definition)}
        | examples.get(name, {})
        for name, definition in schema.get("properties", {}).items()
    ]


def _drop_null(definition: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without null: a query parameter is absent rather than null."""
    kinds = [kind for kind in definition.get("anyOf", ()) if kind.get("type") != "null"]
    rest = {name: value for name, value in definition.items() if name not in ("anyOf", "title")}
    if rest.get("default", ...) is None:
        del rest["default"]
    if not kinds:
        return rest
    return {**kinds[0], **rest} if len(kinds) == 1 else {**rest, "anyOf": kinds}


def _describe_headers(route: Route) -> list[dict[str, Any]]:
    visible = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[\\x21-\\x7e]+$"}
    schemas = {"x-lease-aware": {"type": "string", "enum": ["1"]}}
    revalidation = {"name": "if-none-match", "in": "header", "required": False, "schema": {"type": "string"}}
    return [
        *(
            {"name": name, "in": "header", "required": False, "schema": schemas.get(name, visible)}
            for name in route.headers
        ),
        *([revalidation] if route.revalidates else []),
    ]


def _describe_responses(route: Route, schemas: _Schemas) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    if route.answer is not None:
        content = {"application/json": {"schema": schemas.of(route.answer, "serialization")}}
        if route.answers_bytes:
            content[_BYTES] = {"schema": {}}
        responses[str(route.status)] = {"description": "Done", "content": content}
    elif route.answers_bytes:
        responses[str(route.status)] = {"description": "Done", "content": {"*/*": {"schema": {}}}}
    else:
        responses[str(route.status)] = {"description": "Done, without a body"}
    if route.revalidates:
        responses["304"] = {"description": "The answer is still the one whose ETag is in if-none-match"}
    codes = set(route.refuses) | set(_ALWAYS)
    if route.scopes:
        codes |= set(_GUARDED)
    if route.operator:
        codes.add(ErrorCode.OPERATOR_ONLY)
    if route.body or route.query or route.headers or "{step}" in route.path:
        codes.add(ErrorCode.INVALID_VALUE)
    if route.body or route.query:
        codes |= {ErrorCode.MISSING_FIELD, ErrorCode.INVALID_KEY}
    if route.body:
        codes |= {ErrorCode.MALFORMED_JSON, ErrorCode.PAYLOAD_TOO_LARGE}
    error = schemas.of(ErrorBody, "serialization")
    by_status: dict[int, list[ErrorCode]] = {}
    for code in sorted(codes):
        by_status.setdefault(code.status, []).append(code)
    for status, members in sorted(by_status.items()):
        description = "; ".join(f"{code.value}: {code.meaning}" for code in members)
        responses[str(status)] = {"description": description, "content": {"application/json": {"schema": error}}}
    return responses


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe(), indent=1, sort_keys=True, ensure_ascii=False) + "\n")
