"""The committed OpenAPI file equals the generated description and is complete."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import jsonschema_rs
import pytest
from pydantic import ValidationError

import functions.api
from baton.contract.checkpoints.manifest import Chunk, Codec
from baton.contract.errors import ERRORS, ErrorCode
from baton.contract.names import Scope
from baton.contract.worker.control import Decision
from functions.api.http.route import Route, all_routes

COMMITTED = Path(functions.api.__file__).with_name("openapi.json")
DESCRIPTION = json.loads(COMMITTED.read_text())
EVERY_ROUTE = pytest.mark.parametrize("route", all_routes(), ids=lambda route: route.route_key)


def operation(route: Route) -> dict[str, Any]:
    found: dict[str, Any] = DESCRIPTION["paths"][route.path.replace("+}", "}")][route.method.lower()]
    return found


def test_the_committed_file_is_the_generated_one() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "functions.api.http.openapi"], capture_output=True, text=True, check=True
    )
    assert COMMITTED.read_text() == made.stdout, (
        "run: python -m functions.api.http.openapi > functions/api/openapi.json"
    )


def test_nothing_is_described_that_is_no_route() -> None:
    described = {f"{method.upper()} {path}" for path, methods in DESCRIPTION["paths"].items() for method in methods}
    assert described == {route.route_key.replace("+}", "}") for route in all_routes()}
    ids = [operation(route)["operationId"] for route in all_routes()]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("base", [None, 0])
@pytest.mark.parametrize("pack", [None, 0])
@pytest.mark.parametrize("codec", [None, *get_args(Codec)])
def test_the_description_says_what_a_chunk_of_each_codec_has(
    codec: str | None, pack: int | None, base: int | None
) -> None:
    given = {"codec": codec, "pack": pack, "base": base}
    for chunk in (given, {name: value for name, value in given.items() if value is not None}):
        if chunk.get("codec", "") is None:
            continue
        document = {"blake3": "0" * 64, "size_bytes": 1024, **chunk}
        try:
            Chunk.model_validate(document)
        except ValidationError:
            valid = False
        else:
            valid = True
        schema = DESCRIPTION["components"]["schemas"]["Chunk"]
        assert jsonschema_rs.is_valid(schema, document) == valid, document


@pytest.mark.parametrize("kind", ["ring.quarantined", "rule.error"])
@pytest.mark.parametrize("given", [(), ("ring", "object", "objects"), ("ring",), ("objects",), ("object", "objects")])
@pytest.mark.parametrize("absent", ["left out", "null"])
def test_the_description_says_which_decision_names_an_object_of_a_ring(
    kind: str, given: tuple[str, ...], absent: str
) -> None:
    values = {"ring": "shapes", "object": "samples/1", "objects": 1}
    named = {name: value for name, value in values.items() if name in given}
    nulls = dict.fromkeys(values) if absent == "null" else {}
    decision = {"number": 1, "type": kind, "step": 0, "at": 0, **nulls, **named}
    try:
        Decision.model_validate(decision)
    except ValidationError:
        valid = False
    else:
        valid = True
    described = {**DESCRIPTION["components"]["schemas"]["Decision"], "components": DESCRIPTION["components"]}
    assert valid == (len(given) == (3 if kind == "ring.quarantined" else 0))
    assert jsonschema_rs.is_valid(described, decision) == valid


@EVERY_ROUTE
def test_every_route_has_a_scope_or_needs_no_key(route: Route) -> None:
    said = operation(route)
    if not route.scopes:
        assert said["security"] == [] and "x-scopes" not in said
    else:
        assert said["security"] == [{"key": []}]
        assert said["x-scopes"] == sorted(route.scopes) and set(said["x-scopes"]) <= set(Scope)


@EVERY_ROUTE
def test_every_route_says_what_it_does(route: Route) -> None:
    said = operation(route)
    assert said["summary"].endswith(".") and len(said["summary"]) > 10
    assert str(route.status) in said["responses"]


@EVERY_ROUTE
def test_every_error_a_route_can_answer_with_is_described(route: Route) -> None:
    responses = operation(route)["responses"]
    codes = {
        *route.refuses,
        ErrorCode.UNKNOWN_FIELD,
        ErrorCode.INTERNAL,
        ErrorCode.UNAVAILABLE,
        ErrorCode.TOO_MANY_REQUESTS,
    }
    if route.scopes:
        codes |= {
            ErrorCode.UNAUTHORIZED,
            ErrorCode.KEY_UNKNOWN,
            ErrorCode.KEY_REVOKED,
            ErrorCode.KEY_EXPIRED,
            ErrorCode.WRONG_SCOPE,
        }
    if route.body:
        codes |= {ErrorCode.MALFORMED_JSON, ErrorCode.PAYLOAD_TOO_LARGE, ErrorCode.INVALID_VALUE}
    for code in codes:
        answer = responses[str(code.status)]
        assert f"{code.value}: {code.meaning}" in answer["description"]
        assert answer["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorBody"}


def test_every_error_code_is_of_some_route() -> None:
    text = json.dumps(DESCRIPTION["paths"])
    assert [code for code in ERRORS if f"{code.value}: " not in text] == []


def test_every_reference_leads_somewhere() -> None:
    def references(part: Any) -> set[str]:
        if isinstance(part, dict):
            own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
            return own.union(*(references(value) for value in part.values()), set())
        return set().union(*(references(item) for item in part)) if isinstance(part, list) else set()

    known = {f"#/components/schemas/{name}" for name in DESCRIPTION["components"]["schemas"]}
    assert references(DESCRIPTION) <= known


@pytest.mark.parametrize("route", [route for route in all_routes() if route.body], ids=lambda route: route.route_key)
def test_every_body_has_an_example_of_each_kind(route: Route) -> None:
    examples = operation(route)["requestBody"]["content"]["application/json"]["examples"]
    assert set(examples) == {model.__name__ for model in route.body}
    for model in route.body:
        assert examples[model.__name__]["value"]
        model.model_validate(examples[model.__name__]["value"])


@EVERY_ROUTE
def test_what_a_path_or_query_must_name_has_an_example(route: Route) -> None:
    for parameter in operation(route)["parameters"]:
        if parameter["required"]:
            assert "example" in parameter, parameter["name"]
