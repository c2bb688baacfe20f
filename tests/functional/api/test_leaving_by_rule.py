"""Ends of attempts by a rule: rollback, pause, another machine, stop."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.worker.control import MAX_ROLLBACKS
from tests.kits.api.harness import NOW, Answer, Api, Held

BY = {"rule": "spike", "revision": 2, "step": 250, "message": "zscore(loss, 100) = 7.1"}
SHOWN = {**BY, "command": None}
SAID = "rule spike at step 250: zscore(loss, 100) = 7.1"


def roll_back(held: Held, *, by: dict[str, Any] | None = None, **rollback: Any) -> Answer:
    wish = {"kind": "rollback", "ended_by": by or BY, "rollback": {"before_step": 250, **rollback}}
    return held.release(reason="rule", by_rule=wish)


def trained(api: Api, metrics: dict[int, dict[str, float]], **job: Any) -> Held:
    """A job with a checkpoint at each step."""
    policy = {"retention": {"keep_last": 10, **job.pop("retention", {})}, **job.pop("policy", {})}
    api.submit(policy=policy, **job)
    held = api.claim()
    for step, values in metrics.items():
        held.commit(step, metrics=values).ok()
    return held


def resumed(held: Held) -> list[int]:
    return [ref["step"] for ref in held.item["resume"]]


def test_back_to_the_newest_checkpoint_before_the_trouble(api: Api) -> None:
    held = trained(api, {100: {}, 200: {}, 300: {}})
    api.clock.advance(40)
    answer = roll_back(held, skip=10, lr_factor=0.5).ok()
    assert answer == {"status": "ok", "state": "pending", "not_before": None}
    job = api.job(held.id)
    assert (job["checkpoint_step"], job["ended_by"]) == (200, SHOWN)
    assert job["reason"] == {"code": "rolled_back_by_rule", "message": SAID}
    counters = job["counters"]
    assert (counters["failures"], counters["interruptions"], counters["node_faults"]) == (0, 0, 0)
    assert api.events(held.id)[-2:] == ["attempt.released", "job.rolled_back"]
    again = api.claim()
    assert resumed(again) == [200, 100], "what lies beyond is nobody's any more"
    done = {"number": 1, "rule": "spike", "step": 250, "to_step": 200, "skip": 10, "lr_factor": 0.5, "commands_seq": 0}
    assert again.item["control"] == {
        "rules": None,
        "commands": [],
        "commands_seq": 0,
        "rollbacks": [done],
        "ends": 1,
        "ran_s": 40,
    }
    assert api.get(f"/job/{held.id}/events").ok()[-2]["data"] == done
    assert api.job(held.id)["ended_by"] is None, "another attempt has begun"
    again.commit(210).ok()
    again.release().ok()
    assert resumed(api.claim()) == [210, 200, 100]


def test_what_was_set_behind_the_checkpoint_is_undone_with_it(api: Api) -> None:
    held = trained(api, {100: {}, 200: {}})
    steps = (150, 240)
    for _ in steps:
        api.post(f"/job/{held.id}/commands", {"kind": "set", "knob": "lr", "factor": 0.5}).ok()
    held.report(seq=2, results=[{"seq": 1 + n, "status": "applied", "step": step} for n, step in enumerate(steps)]).ok()
    roll_back(held).ok()
    again = api.claim()
    assert [one["step"] for one in again.item["control"]["commands"]] == [150], "the other one led to what was undone"
    assert again.item["control"]["rollbacks"][0]["commands_seq"] == 2


def test_a_lost_answer_costs_no_second_rollback(api: Api) -> None:
    held = trained(api, {100: {}})
    roll_back(held).ok()
    with api.unchanged():
        roll_back(held).ok()


def test_without_a_checkpoint_before_it_all_begins_anew(api: Api) -> None:
    held = trained(api, {300: {}})
    roll_back(held).ok()
    again = api.claim()
    assert resumed(again) == []
    assert again.item["control"]["rollbacks"][0]["to_step"] == 0
    again.commit(10).ok()
    roll_back(again).ok()
    last = api.claim()
    assert resumed(last) == [10]
    assert [one["number"] for one in last.item["control"]["rollbacks"]] == [1, 2]


def not_kept(held: Held, oldest: str, **rollback: Any) -> None:
    with held.api.unchanged():
        error = roll_back(held, **rollback).refused(ErrorCode.ROLLBACK_NOT_KEPT, "by_rule.rollback.before_step")
    for text in ("spike", f"step {rollback.get('before_step', 250)}", oldest, "keep_last", "'for'"):
        assert text in error["message"]


@pytest.mark.parametrize("to", ["last", "best"])
def test_a_run_does_not_begin_anew_because_older_checkpoints_were_let_go(api: Api, to: str) -> None:
    held = trained(api, {step: {} for step in (200, 250, 300, 350)}, retention={"keep_last": 3})
    not_kept(held, "oldest kept checkpoint is of step 250", to=to)
    assert api.job(held.id)["checkpoint_step"] == 350
    assert held.heartbeat().ok()["directive"] == "continue", "its worker says what becomes of it"
    held.fail(failure_class="stopped_by_rule", message="too far", ended_by=BY).ok()
    job = api.job(held.id)
    assert (job["state"], job["ended_by"], job["checkpoint_step"]) == ("failed", SHOWN, 350)
    kept = api.get(f"/job/{held.id}/checkpoints").ok()["checkpoints"]
    assert [one["step"] for one in kept] == [350, 300, 250]
    api.post(f"/job/{held.id}/retry").ok()
    again = api.claim()
    assert resumed(again) == [350, 300, 250]
    not_kept(again, "step 250")


def test_what_was_committed_first_is_that_of_the_history_that_the_job_continues(api: Api) -> None:
    held = trained(api, {100: {}, 300: {}, 400: {}}, retention={"keep_last": 2})
    roll_back(held, before_step=100).ok()
    again = api.claim()
    assert resumed(again) == [], "the first one was younger"
    again.commit(310).ok()
    roll_back(again, by={**BY, "rule": "nan"}).ok()
    last = api.claim()
    assert resumed(last) == [], "what the first history had before it leads nowhere any more"
    for step in (320, 330, 340):
        last.commit(step).ok()
    not_kept(last, "step 330", before_step=325)
    api.post(f"/job/{held.id}/stop").ok()
    api.post(f"/job/{held.id}/retry", {"from_step": 330}).ok()
    not_kept(api.claim(), "step 330", before_step=325)


def test_a_damaged_checkpoint_is_not_gone_back_to(api: Api) -> None:
    held = trained(api, {100: {}, 200: {}})
    held.post(f"/job/{held.id}/checkpoints/200/damaged", {"epoch": 1}).ok()
    roll_back(held).ok()
    assert resumed(api.claim()) == [100]


def test_what_an_earlier_rollback_left_behind_is_not_gone_back_to(api: Api) -> None:
    held = trained(api, {100: {}, 200: {}, 300: {}})
    roll_back(held, before_step=150).ok()
    again = api.claim()
    again.commit(220).ok()
    roll_back(again).ok()
    last = api.claim()
    assert resumed(last) == [220, 100], "not 200"
    roll_back(last, before_step=220).ok()
    assert resumed(api.claim()) == [100]


BEST = [
    (
        {"keep_best_metric": "acc", "keep_best_mode": "max"},
        {100: {"acc": 0.9, "loss": 9}, 200: {"acc": 0.5, "loss": 1}},
        100,
    ),
    ({"keep_best_metric": "acc"}, {100: {"loss": 1}, 200: {"loss": 2}}, 100),
    ({}, {100: {"eval.loss": 1, "eval_loss": 5, "loss": 5}, 200: {"eval.loss": 2, "eval_loss": 1, "loss": 1}}, 100),
    ({}, {100: {"eval_loss": 1, "loss": 5}, 200: {"eval_loss": 2, "loss": 1}}, 100),
    ({}, {100: {"loss": 1}, 200: {"loss": 2}}, 100),
    ({}, {100: {"loss": 1}, 200: {"loss": 1}}, 200),
    ({}, {100: {}, 200: {"loss": 7}}, 200),
    ({}, {100: {}, 200: {}}, 200),
    ({}, {100: {"loss": 2}, 200: {"loss": 3}, 300: {"loss": 1}}, 100),
]


@pytest.mark.parametrize(("retention", "metrics", "step"), BEST)
def test_best_is_by_the_retentions_metric_or_by_a_loss(
    api: Api, retention: dict[str, Any], metrics: dict[int, dict[str, float]], step: int
) -> None:
    held = trained(api, metrics, retention=retention)
    roll_back(held, to="best").ok()
    assert api.job(held.id)["checkpoint_step"] == step


def test_a_spent_budget_leaves_the_job_as_it_is(api: Api) -> None:
    held = trained(api, {100: {}})
    for _ in range(2):
        roll_back(held, budget=2).ok()
        held = api.claim()
    with api.unchanged():
        error = roll_back(held, budget=2).refused(ErrorCode.ROLLBACK_BUDGET_SPENT, "by_rule.rollback.budget")
    assert "2 times" in error["message"]
    assert held.heartbeat().ok()["directive"] == "continue"
    other = {**BY, "rule": "nan"}
    roll_back(held, by=other, budget=1).ok()
    roll_back(api.claim(), budget=3).ok()


def test_all_rules_together_have_a_budget_too(api: Api) -> None:
    held = trained(api, {})
    for number in range(MAX_ROLLBACKS):
        roll_back(held, by={**BY, "rule": f"r{number % 3}"}, budget=1000).ok()
        held = api.claim()
    roll_back(held, budget=1000).refused(ErrorCode.ROLLBACK_BUDGET_SPENT, "by_rule.rollback.budget")


def test_a_rolled_back_job_goes_first(api: Api) -> None:
    held = trained(api, {})
    api.submit(priority=100)
    roll_back(held).ok()
    assert api.claim().id == held.id


def test_the_users_pause_is_kept_by_a_rollback(api: Api) -> None:
    held = trained(api, {100: {}, 300: {}})
    api.post(f"/job/{held.id}/pause", {"message": "mine"}).ok()
    roll_back(held).ok()
    job = api.job(held.id)
    assert (job["state"], job["reason"]["code"], job["checkpoint_step"]) == ("paused", "paused_by_user", 100)


def test_a_rule_pauses_until_somebody_resumes(api: Api) -> None:
    held = trained(api, {100: {}})
    for _ in range(2):
        held.release(by_rule={"kind": "pause", "ended_by": BY}).ok()
    job = api.job(held.id)
    assert (job["state"], job["ended_by"]) == ("paused", SHOWN)
    assert job["reason"] == {"code": "paused_by_rule", "message": SAID}
    assert api.events(held.id)[-2:] == ["attempt.released", "job.paused"]
    assert api.get(f"/job/{held.id}/events").ok()[-2]["data"]["ended_by"] == BY
    api.no_work()
    api.post(f"/job/{held.id}/resume").ok()
    again = api.claim()
    assert (resumed(again), again.item["control"]) == ([100], None)


@pytest.mark.parametrize("exclude", [True, False])
def test_a_rule_wants_another_machine(api: Api, exclude: bool) -> None:
    held = trained(api, {100: {}})
    held.release(by_rule={"kind": "requeue", "ended_by": BY, "exclude_host": exclude}).ok()
    job = api.job(held.id)
    assert (job["state"], job["reason"]["code"], job["not_before"]) == ("pending", "requeued_by_rule", None)
    if exclude:
        api.no_work(machine_id="m-1")
    assert resumed(api.claim(machine_id="m-2" if exclude else "m-1")) == [100]


def test_a_rule_may_end_the_job_as_failed_at_once(api: Api) -> None:
    held = trained(api, {100: {}}, policy={"max_failures": 5})
    for _ in range(2):
        held.fail(failure_class="stopped_by_rule", message="loss is nan", ended_by=BY).ok()
    job = api.job(held.id)
    assert (job["state"], job["failed_at"], job["ended_by"]) == ("failed", NOW, SHOWN)
    assert job["counters"]["failures"] == 0
    assert job["reason"] == {"code": "stopped_by_rule", "message": "loss is nan"}
    attempt, end = api.get(f"/job/{held.id}/events").ok()[-2:]
    assert (attempt["type"], end["type"]) == ("attempt.failed", "job.failed")
    assert attempt["data"]["ended_by"] == end["data"]["ended_by"] == BY
    assert (api.attempts(held.id)[0]["end"], api.attempts(held.id)[0]["failure_class"]) == ("failed", "stopped_by_rule")
    api.post(f"/job/{held.id}/retry").ok()
    assert api.job(held.id)["ended_by"] is None
    assert resumed(api.claim()) == [100]


def test_who_completed_it_is_told(api: Api) -> None:
    held = trained(api, {})
    by = {"command": 3, "step": 120}
    held.complete(ended_by=by).ok()
    job = api.job(held.id)
    shown = {"rule": None, "command": 3, "revision": 0, "step": 120, "message": ""}
    assert (job["state"], job["ended_by"]) == ("complete", shown)
    assert api.get(f"/job/{held.id}/events").ok()[-1]["data"]["ended_by"] == by


def test_ends_by_rules_are_counted_over_a_jobs_life_once_each(api: Api) -> None:
    """A checkpoint that says a rule was about to end the training needs to know whether it has."""
    held = trained(api, {100: {}}, policy={"backoff_s": 0}, rules="rules: []")

    def ends(again: Held) -> int:
        return int(again.item["control"]["ends"])

    assert ends(held) == 0
    for _ in range(2):
        held.release(reason="pause", by_rule={"kind": "pause", "ended_by": BY}).ok()
    api.post(f"/job/{held.id}/resume").ok()
    held = api.claim()
    assert ends(held) == 1
    held.release(reason="sigterm").ok()
    held = api.claim()
    assert ends(held) == 1, "the machine's leaving is none"
    held.fail(ended_by=BY).ok()
    held = api.claim(machine_id="m-2")
    assert ends(held) == 1, "it broke before it could end as the rule wanted"
    roll_back(held).ok()
    held = api.claim(machine_id="m-2")
    assert ends(held) == 2
    held.fail(failure_class="stopped_by_rule", ended_by=BY).ok()
    api.post(f"/job/{held.id}/retry").ok()
    held = api.claim(machine_id="m-2")
    assert ends(held) == 3
    held.complete(ended_by=BY).ok()
    api.post(f"/job/{held.id}/retry").ok()
    assert ends(api.claim(machine_id="m-2")) == 4


@pytest.mark.parametrize("kind", ["requeue", "rollback"])
def test_a_job_that_is_to_be_paused_is_paused_however_a_rule_hands_it_back(api: Api, kind: str) -> None:
    held = trained(api, {100: {}, 300: {}})
    api.post(f"/job/{held.id}/pause").ok()
    more = {"rollback": {"before_step": 250}} if kind == "rollback" else {}
    held.release(reason="rule", by_rule={"kind": kind, "ended_by": BY, **more}).ok()
    job = api.job(held.id)
    assert (job["state"], job["checkpoint_step"]) == ("paused", 100 if kind == "rollback" else 300)


def test_a_failure_that_a_rule_led_to_is_retried_as_any_other(api: Api) -> None:
    held = trained(api, {}, policy={"backoff_s": 0})
    held.fail(ended_by=BY).ok()
    job = api.job(held.id)
    assert (job["state"], job["counters"]["failures"], job["ended_by"]) == ("pending", 1, SHOWN)


@pytest.mark.parametrize(
    "wish",
    [
        {"kind": "rollback", "ended_by": BY},
        {"kind": "pause", "ended_by": BY, "rollback": {"before_step": 1}},
        {"kind": "rollback", "ended_by": {"command": 1, "step": 5}, "rollback": {"before_step": 1}},
        {"kind": "stop", "ended_by": BY},
    ],
)
def test_a_wish_that_makes_no_sense_is_refused(api: Api, wish: dict[str, Any]) -> None:
    held = trained(api, {})
    with api.unchanged():
        assert held.release(by_rule=wish).status == 422
