"""The events that are kept as examples: real shapes, and what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from functions.api.routes import routes_of
from functions.local.events import HttpRequest, authorizer_event, common_fields, function_event
from tests.functional.api.replay import EVENTS, JOB_ID, KEY_ID, LEASE_TOKEN, prepared_api, replay

CASES = sorted(path.relative_to(EVENTS).as_posix() for path in EVENTS.glob("*/*.json"))
EXPECTED: dict[str, tuple[int, dict[str, Any]]] = {
    "submitter/submit.json": (200, {"recipe": "digits@1", "state": "pending"}),
    "submitter/submit-original.json": (200, {"instance_prompt": "timberdog", "recipe": "dreambooth-lora-sdxl@1"}),
    "submitter/submit-malformed.json": (400, {"code": "malformed_json"}),
    "submitter/list-page.json": (200, {"next_cursor": None}),
    "submitter/revoked-key.json": (403, {"code": "key_revoked", "field": "x-api-key"}),
    "worker/claim.json": (200, {"id": JOB_ID, "lease_token": LEASE_TOKEN, "epoch": 1}),
    "worker/heartbeat-original.json": (409, {"code": "lease_required", "field": "x-lease-token"}),
    "worker/heartbeat.json": (200, {"directive": "continue", "epoch": 1}),
    "worker/commit.json": (200, {"committed": False, "step": 100}),
    "worker/wrong-scope.json": (403, {"code": "wrong_scope"}),
    "transfer/download-odd-key.json": (302, {}),
    "transfer/upload-part.json": (401, {"code": "token_invalid", "field": "x-upload-token"}),
    "admin/create-key.json": (200, {"name": "laptop", "scopes": ["submit"]}),
}
LAMBDA_EVENTS = [case for case in CASES if case in EXPECTED]


def test_every_event_is_replayed() -> None:
    others = {"authorizer/known-key.json", "authorizer/unknown-key.json", "sweeper/schedule.json"}
    assert set(CASES) == set(EXPECTED) | others


@pytest.mark.parametrize("case", LAMBDA_EVENTS)
def test_an_event_is_answered(case: str) -> None:
    status, parts = EXPECTED[case]
    answer = replay(EVENTS / case, prepared_api(claimed=case != "worker/claim.json"))
    assert answer["statusCode"] == status, answer
    if status == 302:
        assert answer["headers"]["location"] and answer["body"] == ""
        return
    body = json.loads(answer["body"])
    body = body[0] if isinstance(body, list) else body.get("error", body)
    assert {name: body[name] for name in parts} == parts


@pytest.mark.parametrize("case", LAMBDA_EVENTS)
def test_an_event_has_the_shape_that_the_gateway_gives_it(case: str) -> None:
    event = json.loads((EVENTS / case).read_text())
    route = routes_of(Path(case).parent.name)[event["routeKey"]]  # type: ignore[arg-type]
    http = event["requestContext"]["http"]
    assert route.method == http["method"] and event["rawPath"] == http["path"]
    request = HttpRequest(
        http["method"], event["rawPath"], event["rawQueryString"], list(event["headers"].items()), b"", http["sourceIp"]
    )
    made = common_fields(
        request, route.route_key, event["rawPath"], event.get("pathParameters", {}), request_id="r", now_s=1.79e9
    )
    made = function_event(made, b"", {})
    assert set(event) - {"body"} == set(made)
    assert set(event["requestContext"]) == set(made["requestContext"])
    assert set(http) == set(made["requestContext"]["http"])
    assert event.get("queryStringParameters") == made.get("queryStringParameters")
    assert event["requestContext"]["time"] == made["requestContext"]["time"]


def test_the_authorizer_knows_a_key_and_lets_others_through_with_the_reason() -> None:
    api = prepared_api(claimed=True)
    known = replay(EVENTS / "authorizer/known-key.json", api)
    assert known == {
        "isAuthorized": True,
        "context": {"tenant": "acme", "key_id": KEY_ID, "scopes": "submit,worker"},
    }
    unknown = replay(EVENTS / "authorizer/unknown-key.json", api)
    assert unknown == {"isAuthorized": True, "context": {"auth_error": "key_unknown"}}
    event = json.loads((EVENTS / "authorizer/known-key.json").read_text())
    request = HttpRequest("GET", "/jobs", "limit=50", list(event["headers"].items()), b"", "203.0.113.7")
    fields = common_fields(request, "GET /jobs", "/jobs", {}, request_id="r", now_s=1.79e9)
    assert set(authorizer_event(fields, "k")) == set(event)


def test_the_sweeper_returns_a_lost_machine_s_job() -> None:
    api = prepared_api(claimed=True)
    api.clock.advance(91)
    assert replay(EVENTS / "sweeper/schedule.json", api) == {"reclaimed": 1, "timers": 0, "left": 0, "more": False}
    assert api.job(JOB_ID)["state"] == "pending"
