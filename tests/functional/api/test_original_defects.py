"""The defects of the original orchestrator, by their number in docs and code: Baton has none of them."""

from __future__ import annotations

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.names import CHECKPOINTS_BUCKET
from functions.domain.records import CheckpointRecord
from tests.functional.api.original_calls import JOB, Original
from tests.kits.api.harness import RIVAL, TENANT, Api


@pytest.fixture
def first(api: Api) -> Original:
    return Original(api, "m-1")


@pytest.fixture
def second(api: Api) -> Original:
    return Original(api, "m-2")


def test_defect_01_a_job_is_not_given_to_two_pollers(
    api: Api, first: Original, second: Original, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = api.submit(**JOB)["id"]
    seen = api.context.jobs.ready(TENANT, "default", 0, limit=10)
    assert first.taken()["id"] == job_id
    # Both had read the same list before either wrote.
    pages = [seen]
    ready = api.context.jobs.ready
    monkeypatch.setattr(api.context.jobs, "ready", lambda *a, **k: pages.pop() if pages else ready(*a, **k))
    assert second.work() is None and not pages
    assert [attempt["machine_id"] for attempt in api.attempts(job_id)] == ["m-1"]


def test_defect_02_a_node_that_wakes_up_after_its_job_moved_on_changes_nothing(
    api: Api, first: Original, second: Original
) -> None:
    job_id = api.submit(**JOB)["id"]
    first.taken()
    first.checkpoint(job_id, 50).ok()
    late = first.zip_key(job_id, 100)
    token = first.token(late)
    upload_id = first.begin(late, token).ok()["uploadId"]
    part = first.part(late, token, upload_id, b"the first's")
    api.clock.advance(91)
    api.sweep()
    assert second.taken()["resume_from"] == first.zip_key(job_id, 50)
    second.checkpoint(job_id, 100, b"the second's").ok()
    first.heartbeat(job_id, first.salad).refused(ErrorCode.JOB_NOT_RUNNING)
    first.report("progress", job_id, first.zip_key(job_id, 50)).refused(ErrorCode.LEASE_LOST, "key")
    first.report("complete", job_id, first.model_key(job_id)).refused(ErrorCode.LEASE_LOST, "key")
    first.report("fail", job_id).refused(ErrorCode.LEASE_LOST, "key")
    first.report("fail", job_id, "").refused(ErrorCode.LEASE_LOST, "machine_id")
    release = {"job_id": job_id, **first.salad}
    api.post("/release", release, key=first.key).refused(ErrorCode.LEASE_LOST, "machine_id")
    # An upload that the zombie began before, or begins now, does not replace the committed object.
    first.finish(late, token, upload_id, part).refused(ErrorCode.LEASE_LOST, "key")
    first.begin(late, token).refused(ErrorCode.LEASE_LOST, "key")
    first.asked_token(late).refused(ErrorCode.LEASE_LOST, "key")
    headers = {"x-upload-token": token}
    single = api.call("PUT", f"/upload/{CHECKPOINTS_BUCKET}/{late}", b"x", key=first.key, headers=headers)
    single.refused(ErrorCode.LEASE_LOST, "key")
    delete = api.call("DELETE", f"/upload/{CHECKPOINTS_BUCKET}/{late}?action=delete", key=first.key, headers=headers)
    delete.refused(ErrorCode.LEASE_LOST, "key")
    # Nor does the attempt that holds the job write again what is committed.
    second.asked_token(second.zip_key(job_id, 100)).refused(ErrorCode.CHECKPOINT_CONFLICT, "key")
    assert late not in api.objects() and api.objects()[second.zip_key(job_id, 100)] == b"the second's"
    view = api.job(job_id)
    assert view["state"] == "running" and view["checkpoint_step"] == 100 and view["num_failures"] == 0


def test_defect_02_only_uploads_that_are_checked_at_their_end_write(api: Api, first: Original) -> None:
    job_id = api.submit(**JOB)["id"]
    first.taken()
    key = first.zip_key(job_id, 50)
    headers = {"x-upload-token": first.token(key)}
    put = api.call("PUT", f"/upload/{CHECKPOINTS_BUCKET}/{key}", b"x", key=first.key, headers=headers)
    put.refused(ErrorCode.MISSING_FIELD, "uploadId")


def test_defect_02_the_model_of_a_complete_job_stays(api: Api, first: Original) -> None:
    job_id = api.submit(**JOB)["id"]
    first.taken()
    key = first.model_key(job_id)
    token = first.token(key)
    first.upload(key, b"trained").ok()
    first.report("complete", job_id, key).ok()
    first.begin(key, token).refused(ErrorCode.JOB_FINISHED)
    assert api.objects()[key] == b"trained"


def test_defect_03_a_banned_job_starves_nobody(api: Api, first: Original, second: Original) -> None:
    banned = api.submit(**JOB)["id"]
    first.taken()
    first.report("fail", banned).ok()
    api.clock.advance(1)
    others = []
    for _ in range(3):
        others.append(api.submit(**JOB)["id"])
        api.clock.advance(1)
    api.clock.advance(60)
    # The original gave nothing with one job behind the ban, and the second of three.
    assert {first.taken()["id"] for _ in range(3)} == set(others)
    assert first.work() is None
    assert second.taken()["id"] == banned


@pytest.mark.parametrize("machine_id", [None, ""])
def test_defect_04_machines_without_an_id_do_not_share_a_ban(api: Api, machine_id: str | None) -> None:
    job_id = api.submit(**JOB)["id"]
    nameless, other = Original(api, machine_id), Original(api, machine_id)
    nameless.taken()
    nameless.report("fail", job_id).ok()
    api.clock.advance(15)
    assert other.taken()["id"] == job_id


def test_defect_05_bans_expire_and_download_tokens_are_good_once(api: Api, first: Original) -> None:
    job_id = api.submit(**JOB)["id"]
    first.taken()
    first.report("fail", job_id).ok()
    api.clock.advance(86_399)
    assert first.work() is None, "a ban is seen at once and as long as it lasts"
    api.clock.advance(1)
    assert first.taken()["id"] == job_id
    first.checkpoint(job_id, 50).ok()
    key = first.zip_key(job_id, 50)
    token = first.token(key, "download")
    answers = [
        api.get(f"/download/{CHECKPOINTS_BUCKET}/{key}", key=first.key, headers={"x-download-token": token}).status
        for _ in range(3)
    ]
    assert answers == [200, 401, 401]


def test_defect_06_terminal_states_stay_and_failures_are_counted_once(api: Api, first: Original) -> None:
    complete = api.submit(**JOB)["id"]
    first.taken()
    key = first.model_key(complete)
    first.upload(key, b"trained").ok()
    first.report("complete", complete, key).ok()
    assert first.call("POST", f"/job/{complete}/stop").ok()["state"] == "complete", "it stays what it is"
    for answer in (
        api.post(f"/job/{complete}/stop"),
        first.report("fail", complete),
        first.report("progress", complete, first.zip_key(complete, 50)),
    ):
        answer.refused(ErrorCode.JOB_FINISHED)
    canceled = api.submit(**JOB)["id"]
    first.taken()
    api.post(f"/job/{canceled}/stop").ok()
    for what in ("complete", "fail", "progress"):
        first.report(what, canceled, key).refused(ErrorCode.JOB_CANCELED)
    assert [api.job(job_id)["status"] for job_id in (complete, canceled)] == ["complete", "canceled"]
    api.get(f"/job/{canceled[:-1]}0/events").refused(ErrorCode.JOB_NOT_FOUND, "id")
    failing = api.submit(**JOB)["id"]
    first.taken()
    for _ in range(3):
        first.report("fail", failing).ok()
    assert api.job(failing)["num_failures"] == 1


def test_defect_07_pruning_counts_checkpoints_only_and_by_step(api: Api, first: Original, second: Original) -> None:
    job_id = api.submit(**JOB)["id"]
    first.taken()
    stray = [f"{first.prefix(job_id)}{name}" for name in ("model.safetensors", "notes.txt", "checkpoint-9.zip.tmp")]
    for key in stray:
        first.upload(key, b"stray").ok()
    for step in (50, 100, 150, 200):
        first.checkpoint(job_id, step).ok()
        api.clock.advance(10)
    assert set(api.objects()) == {*stray, *(first.zip_key(job_id, step) for step in (100, 150, 200))}
    # A late upload of an older step is the newest object, and no checkpoint.
    first.upload(first.zip_key(job_id, 60), b"late").ok()
    first.report("progress", job_id, first.zip_key(job_id, 60)).refused(ErrorCode.STEP_NOT_NEWER, "step")
    # A checkpoint with a download token stays.
    token = second.token(first.zip_key(job_id, 100), "download")
    for step in (250, 300):
        first.checkpoint(job_id, step).ok()
    headers = {"x-download-token": token}
    got = api.get(f"/download/{CHECKPOINTS_BUCKET}/{first.zip_key(job_id, 100)}", key=second.key, headers=headers)
    assert got.body == b"zip 100"
    assert sorted(api.checkpoints(job_id)) == [100, 200, 250, 300]
    api.clock.advance(91)
    api.sweep()
    assert second.taken()["resume_from"] == first.zip_key(job_id, 300)


def test_another_tenant_keeps_no_checkpoint_from_retention(api: Api, first: Original) -> None:
    """A token for another tenant's object of the same name does not protect this job's checkpoint."""
    job_id = api.submit(**JOB)["id"]
    first.taken()
    first.checkpoint(job_id, 50).ok()
    key = first.zip_key(job_id, 50)
    api.put_object(CHECKPOINTS_BUCKET, key, tenant=RIVAL)
    api.get("/download/token", query={"bucket": CHECKPOINTS_BUCKET, "key": key}, key="rival_worker").ok()
    record = api.context.jobs.read(CheckpointRecord, job_id, 50)
    assert record is not None and record.protected_until == 0
    first.token(key, "download")
    record = api.context.jobs.read(CheckpointRecord, job_id, 50)
    assert record is not None and record.protected_until > api.clock.now()


def test_defect_08_a_model_whose_complete_was_lost_is_no_checkpoint(
    api: Api, first: Original, second: Original
) -> None:
    job_id = api.submit(**JOB)["id"]
    first.taken()
    first.checkpoint(job_id, 50).ok()
    api.clock.advance(10)
    first.upload(first.model_key(job_id), b"trained").ok()
    api.clock.advance(91)
    api.sweep()
    assert second.taken()["resume_from"] == first.zip_key(job_id, 50)


def test_defect_08_nothing_counts_that_is_not_stored_in_its_place(api: Api, first: Original, second: Original) -> None:
    """The original took every key at its word: a model that was never uploaded, another job's checkpoint."""
    other = api.submit(**JOB)["id"]
    first.taken()
    first.checkpoint(other, 900).ok()
    job_id = api.submit(**JOB)["id"]
    second.taken()
    with api.unchanged():
        second.report("complete", job_id, second.model_key(job_id)).refused(ErrorCode.NOT_STORED_YET, "key")
        second.report("progress", job_id, second.zip_key(job_id, 50)).refused(ErrorCode.NOT_STORED_YET, "key")
        for elsewhere in (first.zip_key(other, 900), "checkpoint-900.zip", f"{second.prefix(job_id)}notes.zip"):
            second.report("progress", job_id, elsewhere).refused(ErrorCode.INVALID_VALUE, "key")
        body = {"job_id": job_id, "bucket_name": "training-data", "key": second.zip_key(job_id, 50), **second.salad}
        api.post("/progress", body, key=second.key).refused(ErrorCode.INVALID_VALUE, "key")
    view = api.job(job_id)
    assert view["state"] == "running" and view["checkpoint_step"] is None


def test_a_lost_answer_to_progress_is_asked_for_again(api: Api, first: Original) -> None:
    job_id = api.submit(**JOB)["id"]
    first.taken()
    first.checkpoint(job_id, 50).ok()
    with api.unchanged():
        assert first.report("progress", job_id, first.zip_key(job_id, 50)).ok() == {"status": "ok"}


def test_defect_09_inputs_beyond_a_thousand_are_listed(api: Api, first: Original) -> None:
    for number in range(1005):
        api.put_object("training-data", f"dog/{number:05d}.jpg")
        api.put_object("training-data", f"class/{number:05d}.jpg")
    api.submit(**JOB, class_prompt="a dog", class_data_prefix="class/")
    job = first.taken()
    assert job["instance_data_keys"] == [f"dog/{number:05d}.jpg" for number in range(1005)]
    assert len(job["class_data_keys"]) == 1005


def test_defect_10_a_key_may_hold_a_colon(api: Api, first: Original) -> None:
    key = "a:b/training-data:c"
    first.upload(key, b"x").ok()
    headers = {"x-download-token": first.token(key, "download")}
    got = api.get(f"/download/{CHECKPOINTS_BUCKET}/{key}", key=first.key, headers=headers)
    assert got.body == b"x"


def test_defect_11_large_bytes_pass_the_api_by_and_uploads_can_be_given_up(api: Api, first: Original) -> None:
    token = first.token("big")
    upload_id = first.begin("big", token).ok()["uploadId"]
    headers = {"x-upload-token": token}
    target = f"/upload/{CHECKPOINTS_BUCKET}/big?uploadId={upload_id}"
    signed = api.post(f"{target}&action=mpu-presign&partNumber=1", key=first.key, headers=headers).ok()
    assert api.send("PUT", signed["url"], {}, b"x" * 11_000_000).status == 200
    assert api.call("DELETE", f"{target}&action=mpu-abort", key=first.key, headers=headers).status == 204
    assert api.objects() == {}


def test_defect_12_there_is_progress_a_reason_and_a_pause(api: Api, first: Original, second: Original) -> None:
    job_id = api.submit(**JOB)["id"]
    first.taken()
    first.heartbeat(job_id, {**first.salad, "step": 40, "total_steps": 500, "metrics": {"loss": 0.4}}).ok()
    assert api.job(job_id)["progress"]["step"] == 40
    first.checkpoint(job_id, 50).ok()
    api.post(f"/job/{job_id}/pause").ok()
    # The original client knows no directives: it loses the paused job as it would lose a canceled one.
    first.heartbeat(job_id).refused(ErrorCode.JOB_NOT_RUNNING)
    view = api.job(job_id)
    assert view["state"] == "paused" and view["reason"]["code"] == "paused_by_user"
    assert second.work() is None
    api.post(f"/job/{job_id}/resume").ok()
    assert second.taken()["resume_from"] == first.zip_key(job_id, 50)
    second.report("fail", job_id).ok()
    assert api.attempts(job_id)[1]["reason"]["code"] == "script_error"


def test_an_original_client_is_given_no_job_of_another_kind(api: Api, first: Original) -> None:
    api.submit()
    assert first.work() is None
    assert api.get("/work/peek", key=first.key).ok() == []
    job_id = api.submit(**JOB)["id"]
    (peeked,) = api.get("/work/peek", key=first.key).ok()
    assert peeked["id"] == job_id and peeked["status"] == "pending" and peeked["last_heartbeat"] is None
