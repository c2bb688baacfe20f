"""Commands to a training: issued, delivered, executed, expired."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.worker.control import MAX_COMMANDS
from baton.contract.worker.lease_grace import LEASE_INTERVALS
from tests.kits.api.harness import NOW, Answer, Api, Held


def give(api: Api, job_id: str, kind: str = "save", **more: Any) -> Answer:
    headers = more.pop("headers", None)
    return api.post(f"/job/{job_id}/commands", {"kind": kind, **more}, headers=headers)


def kept(api: Api, job_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get(f"/job/{job_id}/commands").ok()["commands"]
    return found


def running(api: Api) -> Held:
    api.submit()
    return api.claim()


def result(seq: int, status: str = "applied", **more: Any) -> dict[str, Any]:
    return {"seq": seq, "status": status, **more}


def seqs(commands: list[dict[str, Any]]) -> list[int]:
    return [one["seq"] for one in commands]


def test_a_command_reaches_the_worker_with_its_next_heartbeat_and_is_answered(api: Api) -> None:
    held = running(api)
    api.clock.advance(1)
    given = give(api, held.id, "set", knob="lr", factor=0.5, expires_in_s=600).ok()
    assert given == {
        "seq": 1,
        "kind": "set",
        "arguments": {"knob": "lr", "factor": 0.5},
        "issued_at": NOW + 1,
        "expires_at": NOW + 601,
        "status": "waiting",
        "step": None,
        "message": "",
        "rule": None,
    }
    answer = held.report().ok()
    assert (answer["commands"], answer["commands_seq"]) == ([given], 1)
    answer = held.report(seq=1).ok()
    assert (answer["commands"], answer["commands_seq"]) == ([], None)
    held.report(seq=1, results=[result(1, step=120, message="lr is 0.0001")]).ok()
    assert kept(api, held.id) == [{**given, "status": "applied", "step": 120, "message": "lr is 0.0001"}]


def test_who_knows_no_commands_is_told_of_none(api: Api) -> None:
    held = running(api)
    give(api, held.id).ok()
    assert held.heartbeat().ok()["commands"] == []


def test_a_result_is_written_once(api: Api) -> None:
    held = running(api)
    give(api, held.id).ok()
    held.report(seq=1, results=[result(1, step=5)]).ok()
    held.report(seq=1, results=[result(1, "rejected", step=9), result(7)]).ok()
    (found,) = kept(api, held.id)
    assert (found["status"], found["step"]) == ("applied", 5)
    with api.unchanged():
        held.report(seq=1, results=[result(1, "rejected")]).ok()


def test_a_command_before_the_first_step_counts(api: Api) -> None:
    job_id = api.submit()["id"]
    give(api, job_id, "stop", outcome="complete", save=False).ok()
    api.post(f"/job/{job_id}/pause").ok()
    give(api, job_id, "evaluate").ok()
    api.post(f"/job/{job_id}/resume").ok()
    held = api.claim()
    control = held.item["control"]
    assert [(one["seq"], one["kind"]) for one in control["commands"]] == [(1, "stop"), (2, "evaluate")]
    assert control["commands"][0]["arguments"] == {"outcome": "complete", "save": False}
    assert control["commands_seq"] == 2
    assert held.report(seq=2).ok()["commands"] == []


def test_what_waits_is_handed_to_the_next_attempt_with_every_set_that_was_applied(api: Api) -> None:
    held = running(api)
    for kind, more in (
        ("set", {"knob": "lr", "value": 0.1}),
        ("save", {}),
        ("save", {}),
        ("set", {"knob": "wd", "value": 0}),
    ):
        give(api, held.id, kind, **more).ok()
    held.report(seq=4, results=[result(1, step=3), result(2), result(4, "rejected")]).ok()
    held.release().ok()
    control = api.claim().item["control"]
    found = [(one["seq"], one["kind"], one["status"], one["step"]) for one in control["commands"]]
    assert found == [(1, "set", "applied", 3), (3, "save", "waiting", None)]
    assert control["commands_seq"] == 4


def saved(held: Held, step: int) -> None:
    held.report(seq=1, results=[result(1, step=step, message="a checkpoint is due: best")]).ok()


def next_attempt(api: Api, held: Held) -> tuple[Held, list[dict[str, Any]]]:
    """Lose the machine, and claim the job again; return the attempt and its commands."""
    api.clock.advance(LEASE_INTERVALS * held.item["heartbeat_interval_s"] + 1)
    api.sweep()
    again = api.claim()
    return again, again.item["control"]["commands"]


def test_a_save_whose_checkpoint_was_lost_is_handed_out_again(api: Api) -> None:
    held = running(api)
    given = give(api, held.id, tag="best").ok()
    held.commit(100).ok()
    saved(held, 120)
    again, commands = next_attempt(api, held)
    assert commands == [given], "as it was given"
    assert kept(api, held.id)[0]["status"] == "applied", "until something is heard of it"
    again.commit(110, tag="best").ok()
    saved(again, 110)
    saved(again, 115)
    (shown,) = kept(api, held.id)
    assert (shown["status"], shown["step"]) == ("applied", 110), "written once by each attempt"
    last, commands = next_attempt(api, again)
    assert commands == []
    with api.unchanged():
        saved(last, 130)


def test_an_evaluation_that_was_lost_with_its_machine_is_handed_out_again(api: Api) -> None:
    """An `evaluate` of a step that no checkpoint contains is handed out again: the next attempt trains that step."""
    held = running(api)
    given = give(api, held.id, "evaluate").ok()
    held.commit(100).ok()
    saved(held, 120)
    again, commands = next_attempt(api, held)
    assert commands == [given], "as it was given"
    saved(again, 101)
    again.commit(150).ok()
    assert next_attempt(api, again)[1] == []
    (shown,) = kept(api, held.id)
    assert (shown["kind"], shown["status"], shown["step"]) == ("evaluate", "applied", 101)


@pytest.mark.parametrize("step", [120, 150])
def test_a_save_is_done_once_a_checkpoint_from_then_on_is_committed(api: Api, step: int) -> None:
    held = running(api)
    give(api, held.id, tag="best").ok()
    saved(held, 120)
    held.commit(step).ok()
    assert next_attempt(api, held)[1] == []


def test_a_save_that_was_lost_is_not_done_too_late_nor_by_another_run(api: Api) -> None:
    held = running(api)
    give(api, held.id, tag="best", expires_in_s=60).ok()
    saved(held, 120)
    api.clock.advance(60)
    held.release().ok()
    again = api.claim()
    assert again.item["control"]["commands"] == []
    again.complete().ok()
    held = running(api)
    give(api, held.id, expires_in_s=86_400).ok()
    saved(held, 120)
    held.fail(failure_class="stopped_by_rule").ok()
    api.post(f"/job/{held.id}/retry").ok()
    assert api.claim().item["control"]["commands"] == []


def test_a_save_that_a_rollback_went_back_behind_is_not_done_again(api: Api) -> None:
    held = running(api)
    give(api, held.id, tag="best").ok()
    held.commit(100).ok()
    saved(held, 120)
    held.commit(120, tag="best").ok()
    wish = {"kind": "rollback", "ended_by": {"rule": "spike", "step": 125}, "rollback": {"before_step": 110}}
    held.release(reason="rule", by_rule=wish).ok()
    assert api.claim().item["control"]["commands"] == []


@pytest.mark.parametrize("when", ["heartbeat", "claim"])
def test_an_expired_command_is_handed_to_nobody(api: Api, when: str) -> None:
    job_id = api.submit()["id"]
    held = api.claim() if when == "heartbeat" else None
    give(api, job_id, expires_in_s=60).ok()
    give(api, job_id, "evaluate", expires_in_s=61).ok()
    give(api, job_id, expires_in_s=60).ok()
    api.clock.advance(60)
    answer = held.report().ok() if held else api.claim().item["control"]
    assert (seqs(answer["commands"]), answer["commands_seq"]) == ([2], 3), "nor asked for again and again"
    assert [(one["seq"], one["status"]) for one in kept(api, job_id)] == [
        (3, "expired"),
        (2, "waiting"),
        (1, "expired"),
    ]


def test_who_was_in_time_may_say_so_later(api: Api) -> None:
    held = running(api)
    give(api, held.id, expires_in_s=10).ok()
    held.report().ok()
    api.clock.advance(20)
    held.report(seq=1, results=[result(1, step=7)]).ok()
    assert kept(api, held.id)[0]["status"] == "applied"


def test_what_was_meant_for_a_run_that_ended_is_not_done_by_a_retry(api: Api) -> None:
    held = running(api)
    give(api, held.id, "set", knob="lr", value=1).ok()
    held.report(seq=1, results=[result(1)]).ok()
    give(api, held.id, "stop").ok()
    held.complete().ok()
    assert [one["status"] for one in kept(api, held.id)] == ["expired", "applied"]
    give(api, held.id).refused(ErrorCode.JOB_FINISHED)
    api.post(f"/job/{held.id}/retry").ok()
    assert [one["status"] for one in kept(api, held.id)] == ["expired", "applied"]
    give(api, held.id).ok()
    again = api.claim()
    assert seqs(again.item["control"]["commands"]) == [1, 3]
    assert seqs(again.report(seq=0).ok()["commands"]) == [3]


def test_a_pause_is_for_running_jobs(api: Api) -> None:
    job_id = api.submit()["id"]
    with api.unchanged():
        error = give(api, job_id, "pause").refused(ErrorCode.ILLEGAL_TRANSITION, "kind")
        assert f"POST /job/{job_id}/pause" in error["message"]
    api.claim()
    assert give(api, job_id, "pause").ok()["seq"] == 1


def test_a_repeat_with_its_key_is_the_same_command(api: Api) -> None:
    held = running(api)
    first = give(api, held.id, headers={"idempotency-key": "k"}).ok()
    with api.unchanged():
        assert give(api, held.id, headers={"idempotency-key": "k"}).ok() == first
        for other in ({"kind": "evaluate"}, {"tag": "t"}, {"expires_in_s": 5}):
            refused = give(api, held.id, headers={"idempotency-key": "k"}, **other)
            refused.refused(ErrorCode.IDEMPOTENCY_MISMATCH, "idempotency-key")
    assert give(api, held.id, headers={"idempotency-key": "l"}).ok()["seq"] == 2
    assert "key_sha256" not in kept(api, held.id)[0]


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "save", "knob": "lr"},
        {"kind": "set", "knob": "lr"},
        {"kind": "set", "value": 1},
        {"kind": "set", "knob": "lr", "value": 1, "factor": 2},
        {"kind": "set", "knob": "lr", "factor": 0},
        {"kind": "stop", "outcome": "canceled"},
        {"kind": "stop", "expires_in_s": 0},
        {"kind": "dance"},
    ],
)
def test_what_makes_no_sense_is_refused(api: Api, body: dict[str, Any]) -> None:
    held = running(api)
    with api.unchanged():
        assert api.post(f"/job/{held.id}/commands", body).status == 422


def test_the_oldest_that_were_dealt_with_make_room_and_what_is_done_again_stays_longest(api: Api) -> None:
    held = running(api)
    give(api, held.id, "set", knob="lr", value=1).ok()
    for _ in range(MAX_COMMANDS - 1):
        give(api, held.id).ok()
    with api.unchanged():
        error = give(api, held.id).refused(ErrorCode.ILLEGAL_TRANSITION)
        assert str(MAX_COMMANDS) in error["message"]
    held.report(seq=100, results=[result(seq) for seq in (1, 3, 4)]).ok()
    for expected in (3, 4, 1):
        give(api, held.id).ok()
        found = seqs(kept(api, held.id))
        assert len(found) == MAX_COMMANDS and expected not in found
    assert seqs(kept(api, held.id)) == [103, 102, 101, *range(100, 4, -1), 2]
    assert seqs(held.report(seq=100).ok()["commands"]) == [101, 102, 103]


def test_of_another_tenants_job_nothing_is_told(api: Api) -> None:
    held = running(api)
    with api.unchanged():
        for method, what, body in (
            ("GET", "rules", None),
            ("GET", "rules/history", None),
            ("PUT", "rules", {"text": ""}),
            ("GET", "commands", None),
            ("POST", "commands", {"kind": "save"}),
        ):
            answer = api.call(method, f"/job/{held.id}/{what}", body, key="rival_submit")
            answer.refused(ErrorCode.JOB_NOT_FOUND, "id")
