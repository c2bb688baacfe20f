"""Original clients that lost their job: resumed after the lease, hanging, or without a machine id."""

from __future__ import annotations

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.names import CHECKPOINTS_BUCKET
from tests.functional.api.original_calls import JOB, Original
from tests.kits.api.harness import Answer, Api

LEASE_S = 90
ELSEWHERE = "198.51.100.9"


@pytest.fixture
def job_id(api: Api) -> str:
    return str(api.submit(**JOB)["id"])


def refused_writes(zombie: Original, job_id: str) -> list[Answer]:
    """Send the writes of a worker that wakes up: checkpoint, model, completion, failure; return the answers."""
    tokens = [zombie.asked_token(key) for key in (zombie.zip_key(job_id, 100), zombie.model_key(job_id))]
    return [*tokens, *zombie.reports(job_id)]


def assert_untouched(api: Api, job_id: str, zombie: Original) -> None:
    """Check that the zombie's writes are refused and change nothing of the next attempt."""
    with api.unchanged():
        for answer in refused_writes(zombie, job_id):
            assert (answer.status, answer.error["code"]) == (409, "lease_lost"), answer.text
    view = api.job(job_id)
    assert (view["state"], view["epoch"], view["checkpoint_step"], view["num_failures"]) == ("running", 2, 50, 0)


def overtaken(api: Api, job_id: str, zombie: Original, successor: Original) -> None:
    """The zombie stores a checkpoint and all of the next one but its `/progress`, stops, and loses the job."""
    zombie.taken()
    zombie.checkpoint(job_id, 50).ok()
    zombie.upload(zombie.zip_key(job_id, 100), b"the zombie's").ok()
    zombie.upload(zombie.model_key(job_id), b"the zombie's model").ok()
    api.clock.advance(LEASE_S + 1)
    api.sweep()
    assert successor.taken()["resume_from"] == zombie.zip_key(job_id, 50)


def finish(api: Api, job_id: str, successor: Original) -> None:
    successor.heartbeat(job_id).ok()
    successor.checkpoint(job_id, 100, b"the successor's").ok()
    successor.upload(successor.model_key(job_id), b"the successor's model").ok()
    successor.report("complete", job_id, successor.model_key(job_id)).ok()
    view = api.job(job_id)
    assert view["state"] == "complete" and api.objects()[view["model_key"]] == b"the successor's model"


@pytest.mark.parametrize("successor_id", [None, "", "m-2"])
@pytest.mark.parametrize("source_ip", [ELSEWHERE, None])
@pytest.mark.parametrize("zombie_id", [None, "", "m-1"])
def test_a_zombie_writes_nothing_as_the_next_attempt(
    api: Api, job_id: str, zombie_id: str | None, successor_id: str | None, source_ip: str | None
) -> None:
    """A zombie with its successor's key and address, and no machine id, is refused: its key names its attempt."""
    zombie = Original(api, zombie_id)
    successor = Original(api, successor_id, key=zombie.key, source_ip=source_ip or zombie.source_ip)
    overtaken(api, job_id, zombie, successor)
    assert_untouched(api, job_id, zombie)
    finish(api, job_id, successor)


def test_reports_must_name_the_machine_that_the_lease_names(api: Api, job_id: str) -> None:
    """Key, address and attempt are the holder's: behind one address, only the machine's id tells two clients apart."""
    holder = Original(api, "m-1")
    holder.taken()
    holder.checkpoint(job_id, 50).ok()
    nameless = Original(api, None, key=holder.key, source_ip=holder.source_ip)
    nameless.holds = holder.holds
    with api.unchanged():
        for answer in nameless.reports(job_id):
            assert (answer.status, answer.error["code"], answer.error["field"]) == (409, "lease_lost", "machine_id")
    holder.report("fail", job_id).ok()


def test_a_zombie_without_an_id_neither_ends_nor_prolongs_a_lease_that_names_a_machine(api: Api, job_id: str) -> None:
    zombie, successor = Original(api, ""), Original(api, "m-2", source_ip=ELSEWHERE)
    overtaken(api, job_id, zombie, successor)
    with api.unchanged():
        # Fields that the original's documentation leaves to the client.
        for key in ("", successor.prefix(job_id)):
            zombie.report("fail", job_id, key).refused(ErrorCode.LEASE_LOST, "machine_id")
        zombie.report("progress", job_id, successor.zip_key(job_id, 100)).refused(ErrorCode.LEASE_LOST, "machine_id")
        zombie.report("complete", job_id, successor.model_key(job_id)).refused(ErrorCode.LEASE_LOST, "machine_id")
        for body in ({}, None, {"machine_id": "m-1"}):
            zombie.heartbeat(job_id, body).refused(ErrorCode.JOB_NOT_RUNNING)
    finish(api, job_id, successor)


@pytest.mark.parametrize("same", ["key", "address"])
def test_a_lease_without_a_machine_belongs_to_the_key_and_address_of_its_claim(
    api: Api, job_id: str, same: str
) -> None:
    holder = Original(api, None)
    other = Original(api, None, key=holder.key, source_ip=ELSEWHERE) if same == "key" else Original(api, None)
    holder.taken()
    holder.checkpoint(job_id, 50).ok()
    other.holds = holder.holds
    with api.unchanged():
        other.heartbeat(job_id).refused(ErrorCode.JOB_NOT_RUNNING)
        other.report("progress", job_id, holder.zip_key(job_id, 100)).refused(ErrorCode.LEASE_LOST)
        other.report("complete", job_id, holder.model_key(job_id)).refused(ErrorCode.LEASE_LOST)
        other.report("fail", job_id).refused(ErrorCode.LEASE_LOST)
        # A failure that names no attempt could be that of an earlier one behind the same address.
        holder.report("fail", job_id, "").refused(ErrorCode.LEASE_LOST, "key")
    holder.heartbeat(job_id).ok()
    holder.report("fail", job_id).ok()
    assert api.job(job_id)["num_failures"] == 1


def test_a_client_as_the_documentation_has_it_keeps_its_job(api: Api, job_id: str) -> None:
    """A client that names its machine only in reports, and sends empty heartbeats, keeps its job."""
    client = Original(api, None)
    client.taken()
    client.salad = {"machine_id": "m-1"}
    client.heartbeat(job_id, {}).ok()
    client.checkpoint(job_id, 50).ok()
    client.upload(client.model_key(job_id), b"trained").ok()
    client.report("complete", job_id, client.model_key(job_id)).ok()
    assert api.job(job_id)["state"] == "complete"


def test_empty_heartbeats_of_the_machine_that_claimed_are_taken_from_its_key_and_address_only(
    api: Api, job_id: str
) -> None:
    client = Original(api, "m-1")
    client.taken()
    client.heartbeat(job_id, {}).ok()
    others = [Original(api, None, key=client.key, source_ip=ELSEWHERE), Original(api, None)]
    with api.unchanged():
        for other in others:
            other.heartbeat(job_id).refused(ErrorCode.JOB_NOT_RUNNING)
    # With its id it may have moved to another address.
    client.source_ip = ELSEWHERE
    client.heartbeat(job_id).ok()


def test_without_the_lease_token_no_other_call_of_a_worker_is_open(api: Api, job_id: str) -> None:
    client = Original(api, None)
    client.taken()
    with api.unchanged():
        client.call("GET", f"/job/{job_id}/inputs").refused(ErrorCode.LEASE_LOST, "key")
        client.call("POST", "/release", {"job_id": job_id}).refused(ErrorCode.LEASE_LOST, "key")
        logs = {"first_line": 0, "lines": ["x"]}
        client.call("POST", f"/job/{job_id}/logs", logs).refused(ErrorCode.LEASE_LOST, "key")


# Clients that hang


@pytest.mark.parametrize("machine_id", [None, "m-1"])
def test_heartbeats_without_progress_keep_a_job_for_a_bounded_time(
    api: Api, job_id: str, machine_id: str | None
) -> None:
    """The program's heartbeats go on when its other threads are dead, and those of a zombie behind the same address."""
    bound_s = api.context.settings.original_progress_s
    client, next_one = Original(api, machine_id), Original(api, "m-2")

    def beat_until(instant: int) -> None:
        while api.clock.now() + 60 < instant:
            client.heartbeat(job_id).ok()
            api.clock.advance(60)
        client.heartbeat(job_id).ok()
        api.clock.advance(instant - api.clock.now())

    started_at = api.clock.now()
    client.taken()
    beat_until(started_at + 2 * bound_s - 30)
    client.checkpoint(job_id, 50).ok()
    beat_until(api.clock.now() + bound_s - 1)
    client.heartbeat(job_id).ok()
    api.clock.advance(1)
    with api.unchanged():
        client.heartbeat(job_id).refused(ErrorCode.JOB_NOT_RUNNING)
        client.heartbeat(job_id, {}).refused(ErrorCode.JOB_NOT_RUNNING)
    api.clock.advance(LEASE_S)
    assert api.sweep().reclaimed == 1
    reason = api.attempts(job_id)[0]["reason"]
    assert reason["code"] == "lease_expired" and reason["message"].startswith("no checkpoint within the time allowed")
    with api.unchanged():
        client.heartbeat(job_id).refused(ErrorCode.JOB_NOT_RUNNING)
    assert next_one.taken()["resume_from"] == client.zip_key(job_id, 50)
    assert_untouched(api, job_id, client)


def test_progress_after_the_bound_proves_that_the_client_lives(api: Api, job_id: str) -> None:
    client = Original(api, "m-1")
    client.taken()
    bound_s = api.context.settings.original_progress_s
    for _ in range(2 * bound_s // 60):
        client.heartbeat(job_id).ok()
        api.clock.advance(60)
    client.heartbeat(job_id).refused(ErrorCode.JOB_NOT_RUNNING)
    client.checkpoint(job_id, 50).ok()
    client.heartbeat(job_id).ok()
    assert api.job(job_id)["checkpoint_step"] == 50


# The order to stop


@pytest.mark.parametrize("machine_id", [None, "m-1"])
def test_a_heartbeat_for_a_job_that_went_to_a_worker_with_a_lease_is_the_order_to_stop(
    api: Api, job_id: str, machine_id: str | None
) -> None:
    """A zombie's heartbeat answers 400; after any other status the original's worker repeats it without a pause."""
    zombie = Original(api, machine_id)
    zombie.taken()
    api.clock.advance(LEASE_S + 1)
    api.sweep()
    held = api.claim(machine_id="m-2")
    assert held.id == job_id
    with api.unchanged():
        for body in (None, {}, {"machine_id": "m-1"}, {"machine_id": "m-2"}):
            assert zombie.heartbeat(job_id, body).status == 400
    held.heartbeat().ok()
    held.fail().ok()
    assert zombie.heartbeat(job_id).status == 400


@pytest.mark.parametrize("end", ["expired", "released", "failed", "paused", "canceled", "complete", "interrupted"])
def test_every_heartbeat_without_a_lease_that_is_not_taken_is_a_400(api: Api, job_id: str, end: str) -> None:
    client = Original(api, "m-1")
    client.taken()
    if end == "expired":
        api.clock.advance(LEASE_S + 3600)
    elif end == "interrupted":
        api.clock.advance(LEASE_S)
        api.sweep()
        api.clock.advance(3600)
    elif end == "released":
        client.call("POST", "/release", {"job_id": job_id, **client.salad}).ok()
    elif end == "failed":
        client.report("fail", job_id).ok()
    elif end == "complete":
        client.upload(client.model_key(job_id), b"trained").ok()
        client.report("complete", job_id, client.model_key(job_id)).ok()
    else:
        client.call("POST", f"/job/{job_id}/{'pause' if end == 'paused' else 'stop'}").ok()
    assert client.heartbeat(job_id).status == 400
    assert client.heartbeat(job_id, {}).status == 400


def test_a_zip_below_the_prefix_of_the_job_but_of_no_attempt_is_no_checkpoint(api: Api, job_id: str) -> None:
    client = Original(api, "m-1")
    client.taken()
    key = f"jobs/{job_id}/checkpoint-50.zip"
    api.put_object(CHECKPOINTS_BUCKET, key)
    error = client.report("progress", job_id, key).refused(ErrorCode.INVALID_VALUE, "key")
    assert f"{client.prefix(job_id)}checkpoint-<step>.zip" in error["message"]
