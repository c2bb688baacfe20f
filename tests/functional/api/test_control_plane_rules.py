"""Rules of the control plane: each metric of the control plane, each action, and the effect on the job."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from functions.domain.records import RuleStateRecord
from tests.kits.api.harness import NOW, Api, Held


def rule(when: str, do: str = "{alert: 'look'}", **more: str) -> str:
    """A document of one rule."""
    if when.startswith("wall"):
        # The training knows it too: by itself this rule would be the training's.
        more.setdefault("on", "[heartbeat, timer, state]")
    rest = "".join(f", {key}: {value}" for key, value in more.items())
    return f"rules: [{{name: here, when: '{when}', do: {do}{rest}}}]"


def told(api: Api, job_id: str) -> list[tuple[str, str]]:
    """Type and message of what the control plane's rules did."""
    events = api.get(f"/job/{job_id}/events").ok()
    here = [one for one in events if one["data"].get("place") == "control_plane"]
    return [(one["type"], one["data"]["message"]) for one in here if one["type"] != "rule.updated"]


def running(api: Api, rules: str, **more: Any) -> Held:
    query = more.pop("query", {})
    api.submit(rules=rules, **more)
    return api.claim(**query)


def pass_minutes(api: Api, minutes: int, held: Held | None = None, **beat: Any) -> None:
    """The sweeper's turns, and the worker's heartbeats where it lives."""
    for _ in range(minutes):
        for _ in range(2):
            api.clock.advance(30)
            if held is not None:
                held.heartbeat(**beat).ok()
        api.sweep()


def test_a_job_that_waits_too_long_alerts_once(api: Api) -> None:
    job_id = api.submit(rules=rule("queue.age > 10m", "{alert: 'waits for {queue.age:.0f} s'}"))["id"]
    pass_minutes(api, 10)
    assert told(api, job_id) == []
    pass_minutes(api, 20)
    assert told(api, job_id) == [("rule.fired", ""), ("action.applied", "waits for 660 s")]
    api.claim()
    assert told(api, job_id)[2:] == [("rule.cleared", "")]


def test_a_wait_begins_anew_with_each_return_to_the_queue(api: Api) -> None:
    held = running(api, rule("queue.age > 10m"))
    pass_minutes(api, 20, held)
    held.release().ok()
    pass_minutes(api, 9)
    assert told(api, held.id) == []
    api.post(f"/job/{held.id}/commands", {"kind": "save"}).ok()
    pass_minutes(api, 3)
    assert [kind for kind, _ in told(api, held.id)] == ["rule.fired", "action.applied"]


def test_cost_stops_a_job_and_its_worker_is_told(api: Api) -> None:
    held = running(api, rule("cost > 0.5", "{stop: failed}"), query={"price_usd_per_hour": 3.0})
    pass_minutes(api, 10, held, step=5)
    api.clock.advance(30)
    answer = held.heartbeat(step=6).ok()
    assert (answer["directive"], answer["reason"]) == ("cancel", "failed")
    job = api.job(held.id)
    assert job["state"] == "failed"
    assert job["ended_by"] == {"rule": "here", "revision": 1, "step": 6, "message": "cost = 0.525", "command": None}
    assert job["reason"]["code"] == "stopped_by_rule"
    (attempt,) = api.attempts(held.id)
    assert (attempt["end"], attempt["failure_class"]) == ("failed", "stopped_by_rule")
    assert api.events(held.id)[-4:] == ["rule.fired", "attempt.failed", "job.failed", "action.applied"]
    assert job["counters"]["failures"] == 0
    api.no_work()


def test_cost_is_the_sum_of_all_attempts_and_unknown_as_soon_as_one_price_is(api: Api) -> None:
    held = running(api, rule("cost > 2"), query={"price_usd_per_hour": 3.0})
    pass_minutes(api, 19, held)
    held.release().ok()
    held = api.claim(price_usd_per_hour=6.0)
    pass_minutes(api, 1, held)
    assert said_of(api, held.id) == "armed, last value 1.05"
    held.release().ok()
    held = api.claim()
    pass_minutes(api, 60, held)
    assert (told(api, held.id), said_of(api, held.id)) == ([], "unknown, last value unknown")


def said_of(api: Api, job_id: str) -> str:
    (status,) = api.get(f"/job/{job_id}/rules").ok()["control_plane"]["statuses"]
    return str(status["said"])


def test_wall_time_is_counted_over_all_attempts(api: Api) -> None:
    held = running(api, rule("wall > 20m and step >= 0", "stop", on="heartbeat"))
    pass_minutes(api, 15, held)
    held.release().ok()
    pass_minutes(api, 30)
    held = api.claim()
    pass_minutes(api, 5, held, step=9)
    assert told(api, held.id) == []
    api.clock.advance(30)
    answer = held.report().ok()
    assert [(one["kind"], one["arguments"]) for one in answer["commands"]] == [
        ("stop", {"outcome": "complete", "save": True})
    ]
    assert told(api, held.id) == [("rule.fired", ""), ("action.applied", "the training is told: command 1, stop")]
    (command,) = api.get(f"/job/{held.id}/commands").ok()["commands"]
    assert command["rule"] == "here"


def test_a_silent_machine_alerts_before_its_lease_has_run_out(api: Api) -> None:
    held = running(
        api,
        rule("heartbeat.age > 2m", "{alert: 'silent for {heartbeat.age:.0f} s'}"),
        policy={"heartbeat_interval_s": 60},
    )
    pass_minutes(api, 3, held)
    pass_minutes(api, 3)
    assert told(api, held.id) == [("rule.fired", ""), ("action.applied", "silent for 180 s")]


def test_failures_stop_a_job_before_it_is_claimed_again(api: Api) -> None:
    held = running(api, rule("failures >= 2", "{stop: failed}"), policy={"avoid_machine_s": 0})
    held.fail(message="one").ok()
    assert told(api, held.id) == []
    api.clock.advance(60)
    answer = api.claim().fail(message="two").ok()
    assert answer["state"] == "failed"
    assert api.job(held.id)["ended_by"]["rule"] == "here"
    assert api.events(held.id)[-4:] == ["attempt.failed", "rule.fired", "job.failed", "action.applied"]


def test_interruptions_are_counted(api: Api) -> None:
    held = running(api, rule("interruptions >= 1", "pause"))
    pass_minutes(api, 5)
    job = api.job(held.id)
    assert (job["state"], job["reason"]["code"], job["ended_by"]["rule"]) == ("paused", "paused_by_rule", "here")
    assert told(api, held.id) == [("rule.fired", ""), ("action.applied", "the job is paused")]


def test_training_metrics_are_those_of_the_newest_heartbeat(api: Api) -> None:
    held = running(api, rule("loss > 4", "{alert: 'loss is {loss:.1f}'}", on="heartbeat", **{"for": "2 checks"}))
    held.heartbeat(step=1, metrics={"loss": 5.0}).ok()
    assert said_of(api, held.id) == "pending, 1 of 2, last value 5"
    held.heartbeat(step=2, metrics={"loss": 6.0}).ok()
    assert told(api, held.id) == [("rule.fired", ""), ("action.applied", "loss is 6.0")]


def test_a_heartbeat_that_is_repeated_is_no_new_point(api: Api) -> None:
    held = running(api, rule("count(loss) >= 3", on="[heartbeat, timer]"))
    for _ in range(5):
        api.clock.advance(30)
        held.heartbeat(step=1, metrics={"loss": 5.0}).ok()
    assert told(api, held.id) == []
    for step in (2, 3):
        api.clock.advance(30)
        held.heartbeat(step=step, metrics={"loss": 5.0}).ok()
    assert told(api, held.id)[0] == ("rule.fired", "")


def test_a_running_job_is_paused_by_its_worker(api: Api) -> None:
    held = running(api, rule("wall > 1m", "[save, pause]"))
    api.clock.advance(61)
    answer = held.report().ok()
    assert (answer["directive"], answer["reason"]) == ("pause", "paused_by_rule")
    assert [one["kind"] for one in answer["commands"]] == ["save"]
    assert api.job(held.id)["state"] == "running"
    held.release(reason="pause").ok()
    job = api.job(held.id)
    assert (job["state"], job["reason"]["code"], job["ended_by"]["rule"]) == ("paused", "paused_by_rule", "here")
    api.post(f"/job/{held.id}/resume").ok()
    assert api.claim().id == held.id


def test_a_machine_that_lives_is_asked_for_the_job_and_avoided(api: Api) -> None:
    held = running(api, rule("wall > 1m", "requeue", once="true"))
    api.clock.advance(61)
    answer = held.heartbeat().ok()
    assert (answer["directive"], answer["reason"]) == ("pause", "requeued_by_rule")
    held.release(reason="pause", message="requeued_by_rule").ok()
    assert api.job(held.id)["state"] == "pending"
    api.no_work(machine_id="m-1")
    assert api.claim(machine_id="m-2").id == held.id


def test_a_silent_machine_loses_the_job(api: Api) -> None:
    held = running(api, rule("heartbeat.age > 2m", "requeue"), policy={"heartbeat_interval_s": 50})
    api.clock.advance(130)
    api.sweep()
    job = api.job(held.id)
    assert (job["state"], job["reason"]["code"]) == ("pending", "requeued_by_rule")
    assert (job["counters"]["releases"], job["counters"]["interruptions"]) == (1, 0)
    held.heartbeat().refused(ErrorCode.LEASE_LOST)


@pytest.mark.parametrize(
    "do, asked",
    [
        ("{save: best}", ("save", {"tag": "best"})),
        ("evaluate", ("evaluate", {})),
        ("{set: {knob: lr, factor: 0.5, min: 0.001}}", ("set", {"knob": "lr", "factor": 0.5, "min": 0.001})),
    ],
)
def test_a_training_is_told_by_commands(api: Api, do: str, asked: tuple[str, dict[str, Any]]) -> None:
    held = running(api, rule("wall > 1m", do))
    api.clock.advance(61)
    answer = held.report().ok()
    assert [(one["kind"], one["arguments"]) for one in answer["commands"]] == [asked]
    held.report(seq=1, results=[{"seq": 1, "status": "applied", "step": 3}]).ok()
    (command,) = api.get(f"/job/{held.id}/commands").ok()["commands"]
    assert (command["status"], command["rule"]) == ("applied", "here")


@pytest.mark.parametrize("do", ["stop", "save", "evaluate", "{set: {knob: lr, value: 1}}", "requeue"])
def test_what_needs_a_training_is_rejected_where_there_is_none(api: Api, do: str) -> None:
    job_id = api.submit(rules=rule("queue.age > 1m", do))["id"]
    pass_minutes(api, 3)
    kinds = told(api, job_id)
    assert [kind for kind, _ in kinds] == ["rule.fired", "action.rejected"]
    assert "the job is pending" in kinds[1][1]
    assert api.job(job_id)["state"] == "pending"


def test_a_dry_run_only_tells(api: Api) -> None:
    held = running(api, rule("wall > 1m", "{stop: failed}", mode="dry_run"))
    pass_minutes(api, 3, held)
    assert told(api, held.id) == [("rule.fired", "")]
    event = next(one for one in api.get(f"/job/{held.id}/events").ok() if one["type"] == "rule.fired")
    assert event["data"] == {
        "place": "control_plane",
        "rule": "here",
        "revision": 1,
        "step": 0,
        "at": NOW + 90,
        "severity": "warning",
        "dry_run": True,
        "operands": {"wall": 90.0},
        "actions": ["stop"],
        "message": "",
    }
    assert api.job(held.id)["state"] == "running"


def test_a_job_without_such_rules_is_never_read_for_them(api: Api) -> None:
    held = running(api, "rules: [{name: nan, when: not isfinite(loss), do: save}]")
    assert api.context.jobs.read(RuleStateRecord, held.id) is None
    with api.unchanged():
        assert api.context.jobs.due_rules(NOW + 10**6, limit=10) == []
    lease = api.context.leases.get(held.id)
    assert lease is not None and not lease.watched
    assert api.get(f"/job/{held.id}/rules").ok()["control_plane"] is None


def test_rules_may_come_and_go_while_a_job_runs(api: Api) -> None:
    held = running(api, "")
    pass_minutes(api, 5, held)
    view = api.call("PUT", f"/job/{held.id}/rules", {"text": rule("wall > 10m")}).ok()
    assert view["control_plane"] == {
        "revision": 1,
        "at": NOW + 300,
        "next_check_at": NOW + 350,
        "statuses": [{"rule": "here", "state": "armed", "said": "armed, last value 300", "fires": 0}],
    }
    pass_minutes(api, 2, held)
    assert said_of(api, held.id) == "armed, last value 420"
    api.call("PUT", f"/job/{held.id}/rules", {"text": ""}).ok()
    pass_minutes(api, 10, held)
    assert told(api, held.id) == []
    rule_state = api.context.jobs.read(RuleStateRecord, held.id)
    assert rule_state is not None and rule_state.next_at is None
    lease = api.context.leases.get(held.id)
    assert lease is not None and not lease.watched


def test_an_unchanged_rule_keeps_its_counters(api: Api) -> None:
    one = "{name: long, when: wall > 1m, on: [heartbeat, timer], do: {alert: x}, for: 10 checks}"
    held = running(api, f"rules: [{one}]")
    pass_minutes(api, 4, held)
    before = said_of(api, held.id)
    assert before.startswith("pending,")
    text = f"rules: [{one}, {{name: other, when: cost > 1, do: stop}}]"
    view = api.call("PUT", f"/job/{held.id}/rules", {"text": text}).ok()
    states = {status["rule"]: status["said"] for status in view["control_plane"]["statuses"]}
    count = int(before.split()[1])
    assert states["long"].startswith(f"pending, {count} of 10")
    updated = [one for one in api.get(f"/job/{held.id}/events").ok() if one["type"] == "rule.updated"]
    assert "counters begin anew: other (the rule is new)" in updated[-1]["data"]["message"]


def test_a_retried_job_is_looked_at_again(api: Api) -> None:
    held = running(api, rule("queue.age > 5m"))
    held.complete().ok()
    pass_minutes(api, 3)
    rule_state = api.context.jobs.read(RuleStateRecord, held.id)
    assert rule_state is not None and rule_state.next_at is None
    api.post(f"/job/{held.id}/retry").ok()
    pass_minutes(api, 7)
    assert told(api, held.id)[0] == ("rule.fired", "")
