"""The API on DynamoDB and S3 of the emulated cloud, and the deployed handlers in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from blake3 import blake3

from baton.contract.errors import ErrorCode
from baton.contract.names import Scope
from functions.api.rules.group_scaling import JOBS_PER_CALL
from functions.domain.jobs.transaction import Put
from functions.domain.records import RuleStateRecord
from functions.local.emulator import Emulator
from tests.functional.api.replay import EVENTS, KEY_ID, events_key
from tests.functional.api.test_transfers import download, multipart, token
from tests.kits.api.harness import TENANT, Api, emulated_api

pytestmark = pytest.mark.emulator

CHECKPOINTS = "training-checkpoints"
REPLAY = """
import importlib, json, sys
handler = importlib.import_module("functions.handlers." + sys.argv[1]).handler
for line in sys.stdin:
    print(json.dumps(handler(json.loads(line), None)), flush=True)
"""


@pytest.fixture(scope="module")
def api(emulator: Emulator) -> Api:
    """Make one set of tables and buckets for the file; each test has a queue of its own."""
    return emulated_api(emulator)


def test_a_job_lives_and_ends(api: Api) -> None:
    files = {"model.bin": b"weights", "frozen.bin": b"same"}
    api.submit(queue="life", outputs=["model"], policy={"retention": {"keep_last": 1}})
    held = api.claim(queue="life")
    assert held.heartbeat(step=5, metrics={"loss": 0.5}).ok()["directive"] == "continue"
    manifest = held.manifest(100, files)
    (first, second) = held.post(f"/job/{held.id}/checkpoints", manifest).ok()["missing"]
    by_digest = {blake3(data).hexdigest(): data for data in files.values()}
    assert api.send("PUT", first["url"], first["headers"], b"altered").status in (400, 403)
    for item in (first, second):
        assert api.send("PUT", item["url"], item["headers"], by_digest[item["blake3"]]).status == 200
        assert api.send("PUT", item["url"], item["headers"], by_digest[item["blake3"]]).status == 412
    assert held.post(f"/job/{held.id}/checkpoints", manifest).ok()["committed"] is True
    assert held.post(f"/job/{held.id}/checkpoints", manifest).ok()["committed"] is True
    held.commit(200, {"model.bin": b"better", "frozen.bin": b"same"}).ok()
    assert list(api.checkpoints(held.id)) == [200]
    assert set(api.objects()) == {
        api.checkpoints(held.id)[200]["manifest_key"],
        *(f"packs/{blake3(data).hexdigest()}" for data in (b"better", b"same")),
    }
    point = {"step": 1, "at": 1.5, "metrics": {"loss": "nan"}}
    held.post(f"/job/{held.id}/logs", {"first_line": 0, "lines": ["a", "b"], "points": [point]}).ok()
    assert api.get(f"/job/{held.id}/metrics").ok()["points"] == [{"epoch": 1, **point, "seat": None}]
    assert [line["text"] for line in api.get(f"/job/{held.id}/logs").ok()["lines"]] == ["a", "b"]
    held.release().ok()
    second_worker = api.claim(queue="life", machine_id="m-2")
    held.heartbeat().refused(ErrorCode.LEASE_LOST, "x-lease-token")
    held.commit(300).refused(ErrorCode.LEASE_LOST, "epoch")
    urls = second_worker.post(f"/job/{held.id}/checkpoints/200/urls").ok()["urls"]
    assert {api.send("GET", url).text for url in urls.values()} == {"better", "same"}
    second_worker.complete().refused(ErrorCode.NOT_STORED_YET, "artifacts")
    second_worker.complete({"model": b"trained"}).ok()
    assert second_worker.complete({}).status == 200, "repeated"
    assert api.job(held.id)["state"] == "complete"
    assert api.events(held.id)[-1] == "job.completed"


def test_a_damaged_pack_is_replaced_and_no_other_version_of_it(api: Api) -> None:
    api.submit(queue="damage")
    held = api.claim(queue="damage")
    held.commit(100, {"model.bin": b"damaged"}).ok()
    pack = f"packs/{blake3(b'damaged').hexdigest()}"
    api.put_object(CHECKPOINTS, pack, b"rotten!")
    held.post(f"/job/{held.id}/checkpoints/100/damaged", {"epoch": 1}).ok()
    manifest = held.manifest(150, {"model.bin": b"damaged"})
    (missing,) = held.post(f"/job/{held.id}/checkpoints", manifest).ok()["missing"]
    assert api.send("PUT", missing["url"], missing["headers"], b"damaged").status == 200
    assert api.send("PUT", missing["url"], missing["headers"], b"damaged").status == 412
    assert held.post(f"/job/{held.id}/checkpoints", manifest).ok()["committed"] is True
    assert api.objects(prefix=pack)[pack] == b"damaged"


@pytest.mark.parametrize("key", ["a:b c/ü🦜+%25&=.bin", "what?.png", "k" * 900])
def test_odd_names_go_up_and_come_down(api: Api, key: str) -> None:
    done = multipart(api, key, token(api, "upload", key), b"x" * 5 * 1024 * 1024, b"y")
    assert done.ok() == {"status": "ok"} and done.headers["etag"].endswith('-2"')
    said = token(api, "download", key)
    got = download(api, key, said)
    got.refused(ErrorCode.OBJECT_TOO_LARGE, "key")
    url = download(api, key, said, query={"as": "url"}).ok()["url"]
    assert len(api.send("GET", url).text) == 5 * 1024 * 1024 + 1
    download(api, key, said).refused(ErrorCode.TOKEN_INVALID, "x-download-token")


def test_a_completed_multipart_upload_completes_again(api: Api) -> None:
    said = token(api, "upload", "again")
    headers = {"x-upload-token": said}
    target = "/upload/training-data/again"
    upload_id = api.post(f"{target}?action=mpu-create", headers=headers).ok()["uploadId"]
    query = {"uploadId": upload_id, "partNumber": 1}
    body = {"parts": [api.call("PUT", target, b"x", headers=headers, query=query).ok()]}
    query = {"action": "mpu-complete", "uploadId": upload_id}
    etags = {api.post(target, body, headers=headers, query=query).headers["etag"] for _ in range(2)}
    assert len(etags) == 1


def test_a_rule_scales_a_group_up_and_down_and_once(api: Api) -> None:
    group = "emulated"
    api.submit(queue=group, tags={"group": group})
    held = api.claim(queue=group)
    text = "rules: [{name: %s, when: step >= %d, on: heartbeat, do: {scale: {group: emulated, delta: %d, most: 60}}}]"
    api.submit(queue="scaling", rules=text % ("grow", 5, 45))
    training = api.claim(queue="scaling")

    def jobs() -> list[dict[str, Any]]:
        return [job for job in api.get("/jobs").ok() if job["tags"].get("group") == group]

    training.heartbeat(step=5).ok()
    assert len(jobs()) == 1 + JOBS_PER_CALL
    ordered = api.context.jobs.read(RuleStateRecord, training.id)
    assert ordered is not None and [order.copies for order in ordered.orders] == [45]
    api.sweep()
    assert len(jobs()) == 46
    done = api.context.jobs.read(RuleStateRecord, training.id)
    assert done is not None and done.orders == []
    # The order is there again, as if the function had died before it removed the executed order.
    again = done.model_copy(update={"version": done.version + 1, "orders": ordered.orders})
    api.context.jobs.put(Put(owner=training.id, record=again))
    api.sweep()
    assert len(jobs()) == 46
    api.call("PUT", f"/job/{training.id}/rules", {"text": text % ("shrink", 6, -100)}).ok()
    training.heartbeat(step=6).ok()
    api.sweep()
    states = [job["state"] for job in jobs()]
    assert (states.count("canceled"), states.count("running")) == (45, 1)
    assert [one["kind"] for one in held.report().ok()["commands"]] == ["stop"]
    stored = api.context.jobs.scaling(TENANT, group)
    assert stored is not None and stored.leaving == []
    assert [kind for kind in api.events(training.id) if kind.startswith("action.")] == ["action.applied"] * 2


def test_steering_idempotence_and_paging(api: Api) -> None:
    key = {"idempotency-key": "emulated-1"}
    job = api.submit(queue="steer", headers=key)
    assert api.submit(queue="steer", headers=key)["id"] == job["id"]
    api.post("/job", {"command": ["other"]}, headers=key).refused(ErrorCode.IDEMPOTENCY_MISMATCH, "idempotency-key")
    for command, state in (("pause", "paused"), ("resume", "pending"), ("stop", "canceled"), ("retry", "pending")):
        assert api.post(f"/job/{job['id']}/{command}").ok()["state"] == state
    first = api.get(f"/job/{job['id']}/events", query={"limit": 2}).ok()
    rest = api.get(f"/job/{job['id']}/events", query={"cursor": first["next_cursor"]}).ok()
    assert [event["seq"] for event in first["events"] + rest["events"]] == [1, 2, 3, 4, 5]
    cursor = {"cursor": first["next_cursor"]}
    api.get(f"/job/{job['id']}/attempts", query=cursor).refused(ErrorCode.INVALID_CURSOR, "cursor")
    other = api.claim(queue="steer")
    assert api.get("/jobs", key="rival_submit").ok() == []
    api.get(f"/job/{other.id}", key="rival_submit").refused(ErrorCode.JOB_NOT_FOUND, "id")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("handler", "cases"),
    [
        ("submitter", {"submit": 200, "submit-original": 200, "submit-malformed": 400, "revoked-key": 403}),
        ("worker", {"claim": 200, "heartbeat-original": 400, "heartbeat": 404, "wrong-scope": 403}),
        ("transfer", {"download-odd-key": 401, "upload-part": 401}),
        ("rings", {"claim-sample": 404, "another-ring": 403}),
        ("admin", {"create-key": 200}),
        ("authorizer", {"known-key": None, "unknown-key": None}),
        ("sweeper", {"schedule": None}),
        ("fleet", {"schedule": None, "nudge": None}),
    ],
)
def test_a_handler_starts_from_its_environment_and_answers(
    emulator: Emulator, handler: str, cases: dict[str, int | None]
) -> None:
    api = emulated_api(emulator)
    api.context.tokens.put_key(events_key(Scope.SUBMIT))
    settings = api.context.settings
    environment = {
        **os.environ,
        "BATON_TABLE_PREFIX": settings.table_prefix,
        "BATON_DATA_BUCKET": settings.data_bucket,
        "BATON_CHECKPOINTS_BUCKET": settings.checkpoints_bucket,
        "BATON_S3_ENDPOINT": emulator.endpoint_url,
        "AWS_ENDPOINT_URL": emulator.endpoint_url,
    }
    events = [json.dumps(json.loads((EVENTS / handler / f"{case}.json").read_text())) for case in cases]
    process = subprocess.run(
        [sys.executable, "-c", REPLAY, handler],
        input="\n".join(events),
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=True,
    )
    answers: list[dict[str, Any]] = [json.loads(line) for line in process.stdout.splitlines()]
    assert [answer.get("statusCode") for answer in answers] == list(cases.values()), process.stdout + process.stderr
    if handler == "authorizer":
        assert answers[0]["context"] == {"tenant": TENANT, "key_id": KEY_ID, "scopes": "submit"}
        assert answers[1]["context"] == {"auth_error": "key_unknown"}
    elif handler == "sweeper":
        nothing = {"reclaimed": 0, "timers": 0, "left": 0, "heartbeat_lag_s": 0, "queue_age_s": 0, "retentions": 0}
        assert answers == [nothing | {"more": False, "watched": 0, "decided": 0}]
    elif handler == "fleet":
        assert {(answer["skipped"], answer["finished"]) for answer in answers} == {(False, False)}, "there is no fleet"
    elif handler == "submitter":
        assert api.job(json.loads(answers[0]["body"])["id"])["recipe"] == "digits@1"
        logged = [json.loads(line) for line in process.stderr.splitlines() if '"level"' in line]
        answered = [(line["action"], line["status"]) for line in logged if line["message"] == "answered"]
        assert answered[:2] == [("POST /job", 200), ("POST /job", 200)]


def test_a_handler_refuses_to_start_with_a_bad_setting(emulator: Emulator) -> None:
    environment = {**os.environ, "AWS_ENDPOINT_URL": emulator.endpoint_url, "BATON_URL_LIFE_S": "NaN"}
    command = [sys.executable, "-c", REPLAY, "worker"]
    process = subprocess.run(
        command, input="", capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert process.returncode != 0 and "url_life_s" in process.stderr
