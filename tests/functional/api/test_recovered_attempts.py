"""A live worker recovers its revoked attempt while no other worker has the job."""

from __future__ import annotations

import pytest

from baton.contract.errors import ErrorCode
from functions.domain.errors import WriteConflict
from tests.functional.api.original_calls import JOB, Original
from tests.functional.api.test_overtaken_calls import once
from tests.kits.api.harness import NOW, Api, Held


@pytest.fixture
def revoked(api: Api) -> Held:
    """A worker whose lease the sweeper has revoked, 90 s after its last heartbeat."""
    api.submit(policy={"backoff_s": 60})
    held = api.claim(price_usd_per_hour=3.6)
    api.clock.advance(600)
    held.heartbeat(step=100).ok()
    held.commit(100).ok()
    api.clock.advance(90)
    assert api.sweep().reclaimed == 1
    assert api.job(held.id)["state"] == "pending"
    return held


def test_a_heartbeat_takes_the_attempt_back_and_nothing_of_the_interruption_is_counted(api: Api, revoked: Held) -> None:
    assert revoked.heartbeat(step=110).ok()["directive"] == "continue"
    job = api.job(revoked.id)
    assert (job["state"], job["epoch"], job["reason"]) == ("running", 1, None)
    assert job["counters"] == {**job["counters"], "attempts": 1, "interruptions": 0, "runtime_s": 0}
    (attempt,) = api.attempts(revoked.id)
    assert (attempt.get("end"), attempt.get("ended_at"), attempt.get("reason")) == (None, None, None)
    assert api.events(revoked.id)[-2:] == ["attempt.interrupted", "attempt.recovered"]
    revoked.commit(120).ok()
    api.clock.advance(30)
    revoked.complete().ok()
    stored = api.context.jobs.get(revoked.id)
    assert stored is not None
    assert (stored.counters.runtime_s, stored.priced_s, stored.cost_usd) == (720, 720, pytest.approx(0.72))


def test_both_of_two_heartbeats_at_once_are_accepted(api: Api, revoked: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated heartbeat, after an answer that came too late, recovers the attempt first."""

    def repeated() -> None:
        revoked.heartbeat(step=110).ok()

    monkeypatch.setattr(api.context.jobs, "apply", once(repeated, api.context.jobs.apply))
    assert revoked.heartbeat(step=110).ok()["directive"] == "continue"
    assert api.job(revoked.id)["state"] == "running"
    assert api.events(revoked.id).count("attempt.recovered") == 1


def test_a_heartbeat_that_others_always_overtake_is_to_be_repeated(
    api: Api, revoked: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat that other writes always overtake is refused with 503, because 409 would end the training."""

    def conflict(*_: object) -> None:
        raise WriteConflict

    with api.unchanged(), monkeypatch.context() as patch:
        patch.setattr(api.context.jobs, "apply", conflict)
        revoked.heartbeat().refused(ErrorCode.UNAVAILABLE)
    revoked.heartbeat().ok()


def test_a_recovered_worker_receives_the_commands_and_rules_given_meanwhile(api: Api, revoked: Held) -> None:
    command = api.post(f"/job/{revoked.id}/commands", {"kind": "save"}).ok()
    rules = "rules: [{name: waits, when: queue.age > 10m, do: {alert: look}}]"
    api.call("PUT", f"/job/{revoked.id}/rules", {"text": rules}).ok()
    answer = revoked.heartbeat(control={"rules_revision": 0, "commands_seq": 0}).ok()
    assert [one["seq"] for one in answer["commands"]] == [command["seq"]]
    assert answer["rules"]["revision"] == 1
    lease = api.context.leases.get(revoked.id)
    assert lease is not None and lease.watched


ORIGINAL_LEASE_S = 90


@pytest.fixture
def original(api: Api) -> Original:
    """A client of the original whose lease the sweeper has revoked."""
    api.submit(**JOB)
    client = Original(api, "m-1")
    client.taken()
    api.clock.advance(ORIGINAL_LEASE_S)
    assert api.sweep().reclaimed == 1
    return client


def test_a_client_of_the_original_takes_its_attempt_back(api: Api, original: Original) -> None:
    (job_id,) = original.holds
    original.heartbeat(job_id).ok()
    view = api.job(job_id)
    assert (view["state"], view["epoch"], view["counters"]["interruptions"]) == ("running", 1, 0)
    original.checkpoint(job_id, 50).ok()
    original.upload(original.model_key(job_id), b"trained").ok()
    original.report("complete", job_id, original.model_key(job_id)).ok()
    assert api.job(job_id)["state"] == "complete"


@pytest.mark.parametrize("machine_id", [None, "", "m-2"])
def test_another_client_of_the_original_recovers_no_attempt(
    api: Api, original: Original, machine_id: str | None
) -> None:
    """Another client of the original recovers no attempt, even with the same address and without a machine id."""
    (job_id,) = original.holds
    other = Original(api, machine_id, key=original.key)
    with api.unchanged():
        other.heartbeat(job_id).refused(ErrorCode.JOB_NOT_RUNNING)


def test_the_worker_that_claims_first_has_the_job(api: Api, revoked: Held) -> None:
    next_one = api.claim(machine_id="m-2")
    with api.unchanged():
        revoked.heartbeat().refused(ErrorCode.LEASE_LOST, "x-lease-token")
    next_one.heartbeat().ok()


def test_a_command_meanwhile_is_obeyed(api: Api, revoked: Held) -> None:
    api.post(f"/job/{revoked.id}/pause").ok()
    with api.unchanged():
        answer = revoked.heartbeat()
        assert answer.status == 409, answer.text
    assert api.job(revoked.id)["state"] == "paused"


@pytest.mark.parametrize("commands", [("stop", "retry"), ("pause", "resume")], ids="-".join)
def test_a_job_that_a_user_has_sent_back_to_its_queue_is_for_the_next_worker(
    api: Api, revoked: Held, commands: tuple[str, str]
) -> None:
    for command in commands:
        api.post(f"/job/{revoked.id}/{command}").ok()
    assert api.job(revoked.id)["state"] == "pending"
    with api.unchanged():
        assert revoked.heartbeat().status == 409
        revoked.commit(120).refused(ErrorCode.LEASE_EXPIRED)
    assert api.claim(machine_id="m-2").epoch == 2


def test_a_backoff_that_ended_meanwhile_does_not_matter(api: Api) -> None:
    api.submit(policy={"max_fruitless_interruptions": 100, "backoff_s": 60})
    for number in range(6):
        held = api.claim(machine_id=f"m-{number}")
        api.clock.advance(90)
        assert api.sweep().reclaimed == 1
        api.clock.advance(3600)
        api.sweep()
    held = api.claim(machine_id="m-9")
    api.clock.advance(90)
    assert api.sweep().reclaimed == 1
    assert api.job(held.id)["not_before"] is not None
    held.heartbeat().ok()
    assert (api.job(held.id)["state"], api.job(held.id)["not_before"]) == ("running", None)


def test_an_agent_that_has_reported_its_own_crash_does_not_come_back(api: Api) -> None:
    api.submit()
    held = api.claim()
    held.release(reason="agent_crashed").ok()
    with api.unchanged():
        assert held.heartbeat().status == 409


def test_a_revoked_lease_is_recovered_within_an_hour_only(api: Api, revoked: Held) -> None:
    api.clock.at = NOW + 600 + 90 + 3600
    with api.unchanged():
        revoked.heartbeat().refused(ErrorCode.LEASE_LOST)
