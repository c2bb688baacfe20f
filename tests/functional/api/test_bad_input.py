"""Bad requests: each receives a clear error and changes nothing."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from functions.api.http.dispatch import MAX_BODY_BYTES, dispatch
from functions.api.http.route import Route, all_routes
from tests.functional.api.calls import named, valid_call
from tests.kits.api.harness import NO_JOB, NOW, Api

WITH_BODY = [route for route in all_routes() if route.body]
MALFORMED = {
    "cut off": b'{"a": 1',
    "not JSON": b"hello",
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": [-Infinity]}',
    "single quotes": b"{'a': 1}",
    "trailing comma": b'{"a": 1,}',
    "two documents": b"{} {}",
    "not UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a lone surrogate": b'{"\\ud800": "\\udfff"}',
    "nested too deeply": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of 5,000 digits": b'{"a": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("what", MALFORMED)
@pytest.mark.parametrize("route", WITH_BODY, ids=named)
def test_malformed_json(api: Api, route: Route, what: str) -> None:
    call = valid_call(route, NO_JOB)
    # The body is sent as bytes, because API Gateway makes valid text of a body that is declared as JSON.
    as_bytes = {"content-type": "application/octet-stream"}
    with api.unchanged():
        api.call(call.method, call.target, MALFORMED[what], headers=as_bytes).refused(ErrorCode.MALFORMED_JSON)


@pytest.mark.parametrize("body", [b"[]", b"5", b'"x"', b"null", b"true"])
@pytest.mark.parametrize("route", WITH_BODY, ids=named)
def test_json_that_is_no_object(api: Api, route: Route, body: bytes) -> None:
    call = valid_call(route, NO_JOB)
    with api.unchanged():
        api.call(call.method, call.target, body).refused(ErrorCode.INVALID_VALUE)


@pytest.mark.parametrize("route", [route for route in WITH_BODY if route.body_required], ids=named)
def test_an_empty_body_where_one_is_needed(api: Api, route: Route) -> None:
    call = valid_call(route, NO_JOB)
    with api.unchanged():
        for body in (b"", b" \n"):
            api.call(call.method, call.target, body).refused(ErrorCode.MALFORMED_JSON)


@pytest.mark.parametrize("route", WITH_BODY, ids=named)
def test_an_unknown_field_in_the_body(api: Api, route: Route) -> None:
    call = valid_call(route, NO_JOB)
    with api.unchanged():
        api.call(call.method, call.target, {**call.body, "stpes": 1}).refused(ErrorCode.UNKNOWN_FIELD, "stpes")
        answer = api.call(call.method, call.target, {**call.body, "x" * 100_000: 1})
        assert answer.error["code"] == "unknown_field" and len(answer.error["field"]) == 200
        assert "No such field exists here" in answer.error["message"]
        assert len(answer.text) < 1000


@pytest.mark.parametrize("route", all_routes(), ids=named)
def test_an_unknown_query_parameter(api: Api, route: Route) -> None:
    call = valid_call(route, NO_JOB)
    target = call.target + ("&" if "?" in call.target else "?") + "stpes=1"
    with api.unchanged():
        api.call(call.method, target, call.body).refused(ErrorCode.UNKNOWN_FIELD, "stpes")


@pytest.mark.parametrize("route", WITH_BODY, ids=named)
def test_a_body_of_more_than_5_mb(api: Api, route: Route) -> None:
    call = valid_call(route, NO_JOB)
    body = json.dumps(call.body).encode()
    with api.unchanged():
        answer = api.call(call.method, call.target, body + b" " * (MAX_BODY_BYTES + 1 - len(body)))
        answer.refused(ErrorCode.PAYLOAD_TOO_LARGE)
    assert api.call(call.method, call.target, body + b" " * (MAX_BODY_BYTES - len(body))).status != 413


def test_damaged_base64(api: Api) -> None:
    event: dict[str, Any] = {
        "routeKey": "POST /job",
        "headers": {},
        "requestContext": {
            "requestId": "r-1",
            "authorizer": {"lambda": {"tenant": "acme", "key_id": "k", "scopes": "submit"}},
        },
        "isBase64Encoded": True,
    }
    answer = dispatch({**event, "body": "%%%"}, api.context, "submitter")
    assert answer["statusCode"] == 400 and "malformed_json" in answer["body"]
    good = base64.b64encode(b'{"command": ["train"]}').decode()
    assert dispatch({**event, "body": good}, api.context, "submitter")["statusCode"] == 200
    # Not something that API Gateway sends, but nothing to fail on either.
    answer = dispatch({**event, "body": '{"command": ["\ud800"]}', "isBase64Encoded": False}, api.context, "submitter")
    assert answer["statusCode"] == 400 and "malformed_json" in answer["body"]


BAD_JOBS: list[tuple[dict[str, Any], ErrorCode, str | None]] = [
    ({}, ErrorCode.INVALID_VALUE, None),
    ({"command": ["a"], "recipe": "digits@1"}, ErrorCode.INVALID_VALUE, None),
    ({"command": []}, ErrorCode.INVALID_VALUE, "command"),
    ({"command": [""]}, ErrorCode.INVALID_VALUE, "command"),
    ({"command": ["a\0b"]}, ErrorCode.INVALID_VALUE, "command"),
    ({"command": "train"}, ErrorCode.INVALID_VALUE, "command"),
    ({"recipe": "digits"}, ErrorCode.INVALID_VALUE, "recipe"),
    ({"recipe": "nothing@1"}, ErrorCode.UNKNOWN_RECIPE, "recipe"),
    ({"recipe": "digits@2"}, ErrorCode.UNKNOWN_RECIPE, "recipe"),
    ({"recipe": "digits@1", "parameters": {"steps": -1}}, ErrorCode.INVALID_VALUE, "parameters.steps"),
    ({"recipe": "digits@1", "parameters": {"steps": 10**30}}, ErrorCode.INVALID_VALUE, "parameters.steps"),
    ({"recipe": "digits@1", "parameters": {"steps": True}}, ErrorCode.INVALID_VALUE, "parameters.steps"),
    ({"recipe": "digits@1", "parameters": {"stpes": 5}}, ErrorCode.INVALID_VALUE, "parameters.stpes"),
    ({"command": ["a"], "priority": -1}, ErrorCode.INVALID_VALUE, "priority"),
    ({"command": ["a"], "priority": 101}, ErrorCode.INVALID_VALUE, "priority"),
    ({"command": ["a"], "priority": "50"}, ErrorCode.INVALID_VALUE, "priority"),
    ({"command": ["a"], "priority": True}, ErrorCode.INVALID_VALUE, "priority"),
    ({"command": ["a"], "priority": 5.5}, ErrorCode.INVALID_VALUE, "priority"),
    ({"command": ["a"], "queue": "A B"}, ErrorCode.INVALID_VALUE, "queue"),
    ({"command": ["a"], "policy": {"max_failures": 0}}, ErrorCode.INVALID_VALUE, "policy.max_failures"),
    ({"command": ["a"], "policy": {"max_runtime_s": 10**12}}, ErrorCode.INVALID_VALUE, "policy.max_runtime_s"),
    ({"command": ["a"], "policy": {"deadline_at": NOW}}, ErrorCode.INVALID_VALUE, "policy.deadline_at"),
    ({"command": ["a"], "policy": {"heartbeat_interval_s": 0}}, ErrorCode.INVALID_VALUE, "policy.heartbeat_interval_s"),
    ({"command": ["a"], "policy": {"backof_s": 1}}, ErrorCode.UNKNOWN_FIELD, "policy.backof_s"),
    ({"command": ["a"], "parameters": {"a": "x" * 1_000_000}}, ErrorCode.INVALID_VALUE, "parameters"),
    ({"command": ["a"], "parameters": [1]}, ErrorCode.INVALID_VALUE, "parameters"),
    ({"command": ["a"], "inputs": [{"prefix": "../x"}]}, ErrorCode.INVALID_KEY, "inputs.0.prefix"),
    ({"command": ["a"], "inputs": [{"prefix": "a/", "into": "/etc"}]}, ErrorCode.INVALID_KEY, "inputs.0.into"),
    ({"command": ["a"], "inputs": [{}]}, ErrorCode.MISSING_FIELD, "inputs.0.prefix"),
    ({"command": ["a"], "outputs": ["a/../../b"]}, ErrorCode.INVALID_KEY, "outputs.0"),
    ({"command": ["a"], "environment": {"A": "\0"}}, ErrorCode.INVALID_VALUE, "environment"),
    ({"command": ["a"], "environment": {"A": 1}}, ErrorCode.INVALID_VALUE, "environment.A"),
    ({"instance_prompt": "dog"}, ErrorCode.MISSING_FIELD, "instance_data_prefix"),
    (
        {"instance_prompt": "dog", "instance_data_prefix": "dog/", "max_train_steps": -5},
        ErrorCode.INVALID_VALUE,
        "max_train_steps",
    ),
    (
        {"instance_prompt": "dog", "instance_data_prefix": "dog/", "lr_scheduler": "wild"},
        ErrorCode.INVALID_VALUE,
        "lr_scheduler",
    ),
]


@pytest.mark.parametrize(("body", "code", "field"), BAD_JOBS, ids=lambda value: str(value)[:60])
def test_a_job_that_cannot_be_accepted(api: Api, body: dict[str, Any], code: ErrorCode, field: str | None) -> None:
    with api.unchanged():
        api.post("/job", body).refused(code, field)
    assert api.get("/jobs").ok() == []


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_a_number_beyond_all_bounds_among_the_parameters(api: Api, number: str) -> None:
    body = f'{{"command": ["a"], "parameters": {{"a": {number}}}}}'.encode()
    with api.unchanged():
        api.call("POST", "/job", body).refused(ErrorCode.INVALID_VALUE, "parameters")
        body = f'{{"command": ["a"], "requirements": {{"min_vram_gib": {number}}}}}'.encode()
        api.call("POST", "/job", body).refused(ErrorCode.INVALID_VALUE, "requirements.min_vram_gib")


def test_parameters_nested_too_deeply(api: Api) -> None:
    nested: Any = 1
    for _ in range(100):
        nested = [nested]
    with api.unchanged():
        api.post("/job", {"command": ["a"], "parameters": {"a": nested}}).refused(ErrorCode.INVALID_VALUE, "parameters")


def test_a_job_whose_parts_are_allowed_but_not_all_together(api: Api) -> None:
    body = {"command": ["x" * 4096] * 30}
    with api.unchanged():
        api.post("/job", body).refused(ErrorCode.PAYLOAD_TOO_LARGE)


def test_a_whole_number_may_have_a_point(api: Api) -> None:
    assert (
        api.post("/job", b'{"command": ["a"], "priority": 60.0, "policy": {"backoff_s": 5.0}}').ok()["priority"] == 60
    )


def test_numbers_stay_what_they_are_in_parameters(api: Api) -> None:
    body = b'{"command": ["a"], "parameters": {"a": 1.0, "b": 12345678901234567890123, "c": 0.1, "d": "\\u0000"}}'
    view = api.post("/job", body)
    assert '"a":1.0' in view.text
    assert view.ok()["parameters"] == {"a": 1.0, "b": 12345678901234567890123, "c": 0.1, "d": "\0"}


@pytest.mark.parametrize(
    ("target", "field"),
    [
        ("/jobs?limit=0", "limit"),
        ("/jobs?limit=1001", "limit"),
        ("/jobs?limit=-1", "limit"),
        ("/jobs?limit=1,2", "limit"),
        ("/jobs?limit=5&limit=6", "limit"),
        ("/jobs?limit=", "limit"),
        ("/jobs?limit=many", "limit"),
        ("/jobs?status=happy", "status"),
        ("/jobs?queue=A%20B", "queue"),
        ("/jobs?cursor=" + "a" * 3000, "cursor"),
        ("/work?vram_gib=nan", "vram_gib"),
        ("/work?vram_gib=inf", "vram_gib"),
        ("/work?gpus=-1", "gpus"),
        ("/work?machine_id=a%20b", "machine_id"),
        ("/data?limit=0", "limit"),
        ("/upload/training-data/a?partNumber=0", "partNumber"),
        ("/upload/training-data/a?partNumber=10001", "partNumber"),
        ("/upload/training-data/a?action=mpu", "action"),
    ],
)
def test_a_query_that_makes_no_sense(api: Api, target: str, field: str) -> None:
    with api.unchanged():
        method = "PUT" if target.startswith("/upload") else "GET"
        api.call(method, target).refused(ErrorCode.INVALID_VALUE, field)


@pytest.mark.parametrize("value", ["0", "true", "yes", "1,1"])
def test_a_worker_is_lease_aware_or_it_is_not(api: Api, value: str) -> None:
    api.submit()
    with api.unchanged():
        for target in ("/work", "/work/peek"):
            api.get(target, headers={"x-lease-aware": value}).refused(ErrorCode.INVALID_VALUE, "x-lease-aware")


@pytest.mark.parametrize(
    ("method", "target", "name"),
    [
        ("POST", "/job", "idempotency-key"),
        ("POST", "/complete", "x-lease-token"),
        ("GET", "/download/training-data/a", "x-download-token"),
        ("PUT", "/upload/training-data/a", "x-upload-token"),
    ],
)
@pytest.mark.parametrize("value", ["", "with space", "x" * 256, "ü"])
def test_a_header_that_cannot_be_one(api: Api, method: str, target: str, name: str, value: str) -> None:
    with api.unchanged():
        api.call(method, target, headers={name: value}).refused(ErrorCode.INVALID_VALUE, name)


def test_a_route_of_another_function_is_not_found(api: Api) -> None:
    event = {"routeKey": "POST /keys", "requestContext": {"requestId": "r-1"}}
    answer = dispatch(event, api.context, "worker")
    assert answer["statusCode"] == 404 and '"not_found"' in answer["body"]
