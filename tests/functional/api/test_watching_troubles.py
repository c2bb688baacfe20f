"""Control-plane rules that fail, take too long, are too large, or meet damaged state."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from functions.api.rules import rule_evaluation_runs as looking
from functions.domain.errors import StorageUnavailable, WriteConflict
from functions.domain.jobs.transaction import Put
from functions.domain.record_base import TableRecord
from functions.domain.records import Attempt, RulesRecord, RuleStateRecord
from functions.domain.rules import rule_evaluation
from tests.kits.api.harness import NOW, Api, Held
from tests.twins.jobs import MemoryJobStore

RULES = "rules: [{name: here, when: failures >= 0 and cost > 1, do: {alert: x}}]"


def running(api: Api, rules: str = RULES, **more: Any) -> Held:
    api.submit(rules=rules, **more)
    return api.claim(price_usd_per_hour=3600.0)


def errors(api: Api, job_id: str) -> list[str]:
    events = api.get(f"/job/{job_id}/events").ok()
    return [one["data"]["message"] for one in events if one["type"] == "rule.error"]


def beat(api: Api, held: Held) -> dict[str, Any]:
    api.clock.advance(30)
    answer: dict[str, Any] = held.heartbeat(step=1).ok()
    return answer


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("a defect")


def test_a_look_that_fails_fails_no_heartbeat_and_after_three_nobody_looks(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = running(api)
    with monkeypatch.context() as patch:
        patch.setattr(rule_evaluation, "evaluate_rules", broken)
        for _ in range(5):
            assert beat(api, held)["directive"] == "continue"
    found = errors(api, held.id)
    assert len(found) == 3 and "RuntimeError: a defect" in found[0]
    assert found[2].endswith("they are switched off until there is another revision")
    rule_state = api.context.jobs.read(RuleStateRecord, held.id)
    assert rule_state is not None and (rule_state.errors, rule_state.next_at) == (3, None)
    with api.unchanged():
        assert looking.evaluate_due_jobs(api.context.jobs, api.context.leases, api.clock.now()) == (0, 0, False)
    api.call("PUT", f"/job/{held.id}/rules", {"text": RULES + "  # again"}).ok()
    beat(api, held)
    assert [kind for kind in api.events(held.id) if kind == "rule.fired"] == ["rule.fired"]


def test_a_look_that_takes_too_long_is_one_in_vain(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    held = running(api)
    ticks = itertools.count(0.0, 1.5)
    monkeypatch.setattr(looking.time, "thread_time", lambda: next(ticks))
    beat(api, held)
    assert errors(api, held.id) == [
        "the rules cannot be checked in the control plane: an evaluation took 1.5 s; the limit is 1 s"
    ]


def reading(failing: type[TableRecord], fail: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `MemoryJobStore.read` that fails for one kind of record."""
    read = MemoryJobStore.read

    def one(store: MemoryJobStore, kind: type[TableRecord], job_id: str, number: int = 0) -> Any:
        return fail() if kind is failing else read(store, kind, job_id, number)

    return one


@pytest.mark.parametrize("call", ["get", RuleStateRecord, Attempt, RulesRecord, "put", "apply"])
def test_storage_that_is_away_fails_no_heartbeat(
    api: Api, monkeypatch: pytest.MonkeyPatch, call: str | type[TableRecord]
) -> None:
    """`call`: the call that fails, or the kind of record that cannot be read."""
    held = running(api, RULES.replace("here", f"here-{call if isinstance(call, str) else call.KIND[:4].lower()}"))

    def away(*_: object, **__: object) -> Any:
        raise StorageUnavailable("throttled")

    with monkeypatch.context() as patch:
        if isinstance(call, str):
            patch.setattr(MemoryJobStore, call, away)
        else:
            patch.setattr(MemoryJobStore, "read", reading(call, away))
        looking._load_revision.cache_clear()
        assert beat(api, held)["directive"] == "continue"
    beat(api, held)
    assert api.events(held.id).count("rule.fired") == 1


def test_a_job_that_others_change_all_the_time_is_looked_at_next_time(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = running(api)

    def lost(*_: object) -> None:
        raise WriteConflict

    with monkeypatch.context() as patch:
        patch.setattr(MemoryJobStore, "apply", lost)
        patch.setattr(MemoryJobStore, "put", lost)
        beat(api, held)
    beat(api, held)
    assert api.events(held.id).count("rule.fired") == 1


@pytest.mark.parametrize(
    "state", [rule_evaluation.pack_state({"version": 1, "now": "?"}), "?", "AAAA", rule_evaluation.pack_state({})]
)
def test_a_damaged_standing_begins_anew_and_says_so(api: Api, state: str) -> None:
    held = running(api)
    before = api.context.jobs.read(RuleStateRecord, held.id)
    assert before is not None
    damaged = RuleStateRecord(version=before.version + 1, revision=1, state=state)
    api.context.jobs.put(Put(owner=held.id, record=damaged))
    beat(api, held)
    (told,) = [
        one["data"]["message"]
        for one in api.get(f"/job/{held.id}/events").ok()
        if one["type"] == "rule.updated" and "begin anew" in one["data"]["message"]
    ]
    assert told.startswith("revision 1 goes on in the control plane; all counters begin anew: ")
    assert api.events(held.id).count("rule.fired") == 1


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (
            "rules: [" + ", ".join(f"{{name: r{n}, when: cost > {n}, do: stop}}" for n in range(21)) + "]",
            "the control plane evaluates 21 of these rules; at most 20 are allowed",
        ),
        (
            "rules: [{name: a, when: 'mean(cost, 1900) > 1 and max(failures, 10m) > 1', do: stop}]",
            "windows of rules that the control plane evaluates hold 2,400 points together; at most 2,000 are allowed",
        ),
    ],
)
def test_what_is_too_large_is_refused(api: Api, rules: str, said: str) -> None:
    error = api.post("/job", {"command": ["train"], "rules": rules}).refused(ErrorCode.INVALID_RULES, "rules")
    assert said in error["message"]
    checked = api.post("/rules/check", {"text": rules}).ok()
    assert [(one["reason"], one["code"]) for one in checked["faults"]] == [(said, "too_large")]
    job_id = api.submit()["id"]
    api.call("PUT", f"/job/{job_id}/rules", {"text": rules}).refused(ErrorCode.INVALID_RULES, "text")


def test_as_many_rules_of_the_training_as_ever_are_allowed(api: Api) -> None:
    rules = ", ".join(f"{{name: r{n}, when: 'mean(loss, 4000) > {n}', do: stop}}" for n in range(60))
    api.submit(rules=f"rules: [{rules}, {{name: here, when: cost > 1, do: stop}}]")


def test_the_largest_rules_fit_into_one_item_and_one_transaction(api: Api) -> None:
    """Twenty rules, all windows full, all firing with all their actions at the same moment."""
    actions = "[" + ", ".join(["save", "evaluate", "{alert: x}", "{set: {knob: lr, factor: 0.5}}"] * 4) + "]"
    whens = ["mean(cost, 1000) > 1 or cost > 0", "max(cost, 500) > 1 or cost > 0", "min(cost, 8m) > 1 or cost > 0"]
    rules = ", ".join(
        f"{{name: r{n}, when: '{whens[n % 3]}', on: heartbeat, for: 2 checks, do: {actions}}}" for n in range(20)
    )
    held = running(api, f"rules: [{rules}]", policy={"heartbeat_interval_s": 600})
    for _ in range(1010):
        api.clock.advance(1)
        held.heartbeat().ok()
    rule_state = api.context.jobs.read(RuleStateRecord, held.id)
    assert rule_state is not None and rule_state.state is not None
    assert 5_000 < len(rule_state.model_dump_json()) < 100_000
    events = api.get(f"/job/{held.id}/events", query={"limit": 1000}).ok()["events"]
    kinds = [one["type"] for one in events]
    assert (kinds.count("rule.fired"), kinds.count("action.applied")) == (20, 20)
    assert {one["at"] for one in events if one["type"] == "rule.fired"} == {NOW + 2}
    at_once = [one for one in events if one["at"] == NOW + 2]
    commands = api.get(f"/job/{held.id}/commands").ok()["commands"]
    assert len(commands) == 10
    assert len(at_once) + 2 * len(commands) + 3 <= 100, "a transaction has at most 100 actions"


def test_only_one_action_moves_a_job(api: Api) -> None:
    held = running(
        api,
        "rules: [{name: a, when: cost > 1, do: [pause, {stop: failed}, save]}, "
        "{name: b, when: cost > 1, do: [requeue, {alert: still}]}]",
    )
    assert beat(api, held)["directive"] == "pause"
    told = [
        (one["type"], one["data"].get("rule"), one["data"].get("actions"))
        for one in api.get(f"/job/{held.id}/events").ok()
        if one["type"].startswith("action.")
    ]
    assert told == [
        ("action.applied", "a", ["pause"]),
        ("action.rejected", "a", ["stop", "save"]),
        ("action.applied", "b", ["alert"]),
        ("action.rejected", "b", ["requeue"]),
    ]
    assert api.job(held.id)["ended_by"]["rule"] == "a"


@pytest.mark.parametrize(("do", "state"), [("{stop: failed}", "failed"), ("pause", "paused"), ("requeue", "pending")])
def test_a_client_of_the_original_loses_the_job(api: Api, do: str, state: str) -> None:
    api.submit(
        instance_prompt="dog",
        instance_data_prefix="dogs/",
    )
    (job,) = api.get("/work", query={"machine_id": "m-1"}).ok()
    text = f"rules: [{{name: here, when: failures == 0 and wall > 1m, do: {do}, once: true}}]"
    api.call("PUT", f"/job/{job['id']}/rules", {"text": text}).ok()
    api.clock.advance(61)
    api.post(f"/heartbeat/{job['id']}", {"machine_id": "m-1"}).refused(ErrorCode.JOB_NOT_RUNNING)
    shown = api.job(job["id"])
    assert shown["state"] == state
    assert shown["ended_by"]["rule"] == "here"


def test_a_client_of_the_original_knows_no_commands(api: Api) -> None:
    api.submit(instance_prompt="dog", instance_data_prefix="dogs/")
    (job,) = api.get("/work", query={"machine_id": "m-1"}).ok()
    text = "rules: [{name: here, when: failures == 0 and wall > 1m, do: save}]"
    api.call("PUT", f"/job/{job['id']}/rules", {"text": text}).ok()
    api.clock.advance(61)
    api.post(f"/heartbeat/{job['id']}", {"machine_id": "m-1"}).ok()
    rejected = next(one for one in api.get(f"/job/{job['id']}/events").ok() if one["type"] == "action.rejected")
    assert rejected["data"]["message"] == "its worker knows no commands"


def test_a_claimed_job_that_a_rule_stops_is_not_handed_out(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look behind the failure was lost with its function."""
    held = running(api, "rules: [{name: here, when: failures >= 1, do: {stop: failed}}]", policy={"avoid_machine_s": 0})
    with monkeypatch.context() as patch:
        patch.setattr(MemoryJobStore, "read", reading(RuleStateRecord, broken))
        held.fail().ok()
    assert api.job(held.id)["state"] == "pending"
    api.clock.advance(20)
    api.no_work()
    api.no_work()
    assert api.job(held.id)["state"] == "failed"


def test_who_completes_by_a_rule_s_command_names_the_rule(api: Api) -> None:
    held = running(api, "rules: [{name: here, when: cost > 1, do: stop}]")
    beat(api, held)
    (command,) = held.report(1).ok()["commands"]
    held.complete({}, ended_by={"command": command["seq"], "step": 7, "message": "command 1"}).ok()
    job = api.job(held.id)
    assert job["ended_by"] == {"rule": "here", "command": 1, "revision": 1, "step": 7, "message": "command 1"}
    completed = api.get(f"/job/{held.id}/events").ok()[-1]
    assert completed["data"]["ended_by"]["rule"] == "here"


def test_a_user_s_command_is_his_own(api: Api) -> None:
    held = running(api)
    api.post(f"/job/{held.id}/commands", {"kind": "stop"}).ok()
    held.complete({}, ended_by={"command": 1, "step": 7}).ok()
    assert api.job(held.id)["ended_by"]["rule"] is None
