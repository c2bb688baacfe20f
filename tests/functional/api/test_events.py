"""The example events in `events/`: the gateway's shapes, and the answers."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from functions.api.http.route import routes_of
from functions.domain.webhooks import backoff_s
from functions.local.gateway.lambda_events import HttpRequest, authorizer_event, common_fields, function_event
from tests.functional.api.replay import DOWN_HOOK_ID, EVENTS, JOB_ID, KEY_ID, LEASE_TOKEN, prepared_api, replay
from tests.kits.api.harness import memory_api
from tests.kits.api.stream_records import stream_record
from tests.kits.api.webhooks import line_record, make_event

CASES = sorted(path.relative_to(EVENTS).as_posix() for path in EVENTS.glob("*/*.json"))
EXPECTED: dict[str, tuple[int, dict[str, Any]]] = {
    "submitter/submit.json": (200, {"recipe": "digits@1", "state": "pending"}),
    "submitter/submit-base64.json": (200, {"recipe": "digits@1", "state": "pending"}),
    "submitter/submit-original.json": (200, {"instance_prompt": "timberdog", "recipe": "dreambooth-lora-sdxl@1"}),
    "submitter/submit-malformed.json": (400, {"code": "malformed_json"}),
    "submitter/list-page.json": (200, {"next_cursor": None}),
    "submitter/revoked-key.json": (403, {"code": "key_revoked", "field": "x-api-key"}),
    "worker/claim.json": (200, {"id": JOB_ID, "lease_token": LEASE_TOKEN, "epoch": 1}),
    "worker/heartbeat-original.json": (400, {"code": "job_not_running"}),
    "worker/heartbeat.json": (200, {"directive": "continue", "epoch": 1}),
    "worker/commit.json": (200, {"committed": False, "step": 100}),
    "worker/lease-lost.json": (409, {"code": "lease_lost"}),
    "worker/complete-not-stored.json": (409, {"code": "not_stored_yet", "field": "artifacts.0"}),
    "worker/fail.json": (200, {"state": "pending"}),
    "worker/release.json": (200, {"state": "pending"}),
    "worker/wrong-scope.json": (403, {"code": "wrong_scope"}),
    "transfer/download-odd-key.json": (200, {}),
    "transfer/upload-part.json": (401, {"code": "token_invalid", "field": "x-upload-token"}),
    "rings/claim-sample.json": (200, {"written": True, "records": []}),
    "rings/another-ring.json": (403, {"code": "wrong_scope", "field": "ring"}),
    "machines/enroll.json": (200, {"machine_id": "a1b2c3d4-nights-9f8e7d6c5b4a", "queues": ["default"]}),
    "machines/used-token.json": (409, {"code": "enrolment_used", "field": "x-api-key"}),
    "admin/create-key.json": (200, {"name": "laptop", "scopes": ["submit"]}),
    "admin/health.json": (200, {"status": "ok"}),
}
LAMBDA_EVENTS = [case for case in CASES if case in EXPECTED]


def test_every_event_is_replayed() -> None:
    others = {
        "authorizer/known-key.json",
        "authorizer/unknown-key.json",
        "sweeper/schedule.json",
        "fleet/schedule.json",
        "fleet/nudge.json",
    }
    stream = {f"publisher/{case}.json" for case in ("started", "lost-for-good", "other-writes", "unreadable")}
    stream |= {f"deliverer/{case}.json" for case in ("completed", "not-taken", "given-up")}
    assert set(CASES) == set(EXPECTED) | others | stream


@pytest.mark.parametrize("case", LAMBDA_EVENTS)
def test_an_event_is_answered(case: str) -> None:
    status, parts = EXPECTED[case]
    answer = replay(EVENTS / case, prepared_api(claimed=case != "worker/claim.json"))
    assert answer["statusCode"] == status, answer
    if answer["isBase64Encoded"]:
        assert base64.b64decode(answer["body"]), "the bytes of an object"
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
    made = function_event(made, b"", {} if route.scopes else None)
    if "body" in event and event["headers"].get("content-type"):
        content_type = {"content-type": event["headers"]["content-type"]}
        shaped = function_event({**made, "headers": content_type}, b"x", None)
        assert event["isBase64Encoded"] == shaped["isBase64Encoded"], "as the content type makes it"
    assert set(event) - {"body"} == set(made)
    assert set(event["requestContext"]) == set(made["requestContext"])
    assert set(http) == set(made["requestContext"]["http"])
    assert event.get("queryStringParameters") == made.get("queryStringParameters")
    assert event["requestContext"]["time"] == made["requestContext"]["time"]


@pytest.mark.parametrize(
    "case",
    [
        "worker/claim.json",
        "authorizer/unknown-key.json",
        "sweeper/schedule.json",
        "fleet/schedule.json",
        "publisher/started.json",
        "deliverer/completed.json",
    ],
)
def test_an_event_can_be_tried_by_hand_as_the_readme_says(case: str) -> None:
    (command,) = re.findall(r"^    python (-m \S+) events/\S+$", (EVENTS / "README.md").read_text(), re.M)
    done = subprocess.run(
        [sys.executable, *command.split(), f"events/{case}"],
        cwd=EVENTS.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == replay(EVENTS / case, prepared_api(claimed=case != "worker/claim.json"))


def test_the_readme_names_every_event() -> None:
    named = set(re.findall(r"`([a-z]+/[a-z0-9-]+\.json)`", (EVENTS / "README.md").read_text()))
    assert set(CASES) == named | {"authorizer/unknown-key.json"}, "which shares a line"


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
    assert replay(EVENTS / "sweeper/schedule.json", api) == {
        "reclaimed": 1,
        "timers": 0,
        "left": 0,
        "more": False,
        "watched": 0,
        "decided": 0,
        "heartbeat_lag_s": 1,
        "queue_age_s": 0,
        "retentions": 0,
    }
    assert api.job(JOB_ID)["state"] == "pending"


@pytest.mark.parametrize(
    ("case", "published", "dead_letters"),
    [
        ("started", ["job.started"], 0),
        ("lost-for-good", ["attempt.interrupted", "job.failed"], 0),
        ("other-writes", [], 0),
        ("unreadable", ["job.completed"], 1),
    ],
)
def test_the_publisher_tells_of_new_events_only(case: str, published: list[str], dead_letters: int) -> None:
    answer = replay(EVENTS / f"publisher/{case}.json", memory_api())
    assert answer["batchItemFailures"] == []
    assert [event["type"] for event in answer["published"]] == published
    assert {event["job_id"] for event in answer["published"]} <= {JOB_ID}
    assert len(answer["dead_letters"]) == dead_letters


@pytest.mark.parametrize("case", sorted(path.name for path in (EVENTS / "publisher").glob("*.json")))
def test_a_stream_event_has_the_shape_that_dynamodb_gives_it(case: str) -> None:
    made = stream_record(1)
    for record in json.loads((EVENTS / "publisher" / case).read_text())["Records"]:
        assert set(record) - {"userIdentity"} == set(made)
        image = {"NewImage"} if record["eventName"] != "REMOVE" else set()
        assert set(record["dynamodb"]) - image == set(made["dynamodb"]) - {"NewImage"}
        keys = record["dynamodb"]["Keys"]
        if keys["sk"]["S"].startswith("EVENT#") and image:
            assert set(record["dynamodb"]["NewImage"]) == set(made["dynamodb"]["NewImage"]), "as it is stored today"


def test_the_deliverer_sends_what_waits() -> None:
    case = EVENTS / "deliverer/completed.json"
    answer = replay(case, memory_api())
    assert answer["batchItemFailures"] == []
    (sent,) = answer["posted"]
    assert sent["host"] == "hooks.example.com" and sent["body"]["type"] == "job.completed"
    assert sent["headers"]["baton-event-id"] == f"{JOB_ID}#4"
    assert answer["postponed_s"] == []


def test_the_deliverer_postpones_what_is_not_taken_and_gives_it_up_after_a_day() -> None:
    api = memory_api()
    answer = replay(EVENTS / "deliverer/not-taken.json", api)
    (record,) = json.loads((EVENTS / "deliverer/not-taken.json").read_text())["Records"]
    assert answer["batchItemFailures"] == [{"itemIdentifier": record["messageId"]}]
    assert answer["postponed_s"] == [backoff_s(3)] and len(answer["posted"]) == 1

    def noted() -> list[tuple[str, int, int | None]]:
        items = api.context.webhooks.deliveries(DOWN_HOOK_ID, limit=10).items
        return [(one.state.value, one.attempts, one.status) for one in items]

    assert noted() == [("waiting", 3, 503)]
    answer = replay(EVENTS / "deliverer/given-up.json", api)
    assert (answer["batchItemFailures"], answer["postponed_s"]) == ([], [])
    assert noted() == [("failed", 31, 503)]


@pytest.mark.parametrize("case", sorted(path.name for path in (EVENTS / "deliverer").glob("*.json")))
def test_a_message_has_the_shape_that_sqs_gives_it(case: str) -> None:
    (record,) = json.loads((EVENTS / "deliverer" / case).read_text())["Records"]
    made = line_record(make_event(4))
    assert set(record) == set(made) and set(record["attributes"]) == set(made["attributes"])
    body = json.loads(record["body"])
    assert record["attributes"]["MessageGroupId"] == f"{body['webhook_id']}.{JOB_ID}"
