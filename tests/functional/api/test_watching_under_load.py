"""Control-plane rules with many jobs, slow storage, changing machines, and costs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

import pytest

from functions.domain.errors import StorageUnavailable
from functions.domain.records import MemberRecord, MemberValue, RuleStateRecord
from tests.kits.api.harness import NOW, Api, Held
from tests.twins.jobs import MemoryJobStore

COST = "rules: [{name: here, when: cost > 1, do: %s}]"
ECC = """
signals: {ecc: uncorrectable}
rules:
  - {name: here, when: log.ecc > 0, on: [heartbeat, timer, state], cooldown: 1m, do: {requeue: {exclude_host: true}}}
"""


def running(api: Api, rules: str, **more: Any) -> Held:
    api.submit(rules=rules, **more)
    return api.claim(price_usd_per_hour=3600.0)


def away(*_: object, **__: object) -> Any:
    raise StorageUnavailable("throttled")


# The sweeper


def test_lost_machines_are_taken_back_though_nobody_can_say_whose_rules_are_due(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = running(api, "")
    api.clock.advance(200)
    monkeypatch.setattr(MemoryJobStore, "due_rules", away)
    assert api.sweep().reclaimed == 1
    assert api.job(held.id)["state"] == "pending"


def test_rules_that_take_long_do_not_use_up_the_sweeper_s_time(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = [api.submit(rules=COST % "save", queue="watched")["id"] for _ in range(12)]
    held = running(api, "")
    api.clock.advance(200)
    ticks = itertools.count(0.0, 4.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    swept = api.sweep()
    assert 1 <= swept.watched < len(watched) and swept.more
    assert swept.reclaimed == 1 and api.job(held.id)["state"] == "pending"
    turns = 1
    while api.context.jobs.due_rules(api.clock.now(), limit=100):
        api.sweep()
        turns += 1
    assert turns <= 6, "each job has its turn"
    rule_states = [api.context.jobs.read(RuleStateRecord, job_id) for job_id in watched]
    assert all(rule_state is not None and rule_state.at == NOW + 200 for rule_state in rule_states)


def test_waiting_for_storage_is_not_computing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three looks in vain switch a bound on cost off: a store that is slow must not do that."""
    held = running(api, COST % "save")
    ticks = itertools.count(0.0, 2.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    api.clock.advance(30)
    held.heartbeat(step=1).ok()
    assert "rule.error" not in api.events(held.id)
    assert "action.applied" in api.events(held.id)


# Money


def test_a_stop_that_is_decided_between_two_attempts_ends_the_next_one(api: Api) -> None:
    held = running(api, COST % "stop")
    api.clock.advance(60)
    held.release(reason="sigterm").ok()
    assert api.events(held.id).count("action.applied") == 1
    (command,) = api.claim(price_usd_per_hour=3600.0).item["control"]["commands"]
    assert (command["kind"], command["rule"], command["arguments"]["outcome"]) == ("stop", "here", "complete")


def test_a_stop_by_a_rule_waits_for_a_training_however_long_that_takes(api: Api) -> None:
    held = running(api, COST % "stop")
    api.clock.advance(60)
    held.heartbeat().ok()
    api.clock.advance(8 * 86_400)
    api.sweep()
    assert [one["kind"] for one in api.claim().item["control"]["commands"]] == ["stop"]


def test_who_retries_a_stopped_job_goes_on_until_the_rule_is_cleared(api: Api) -> None:
    held = running(api, COST % "{stop: failed}")
    api.clock.advance(60)
    held.heartbeat().ok()
    assert api.job(held.id)["state"] == "failed"
    api.post(f"/job/{held.id}/retry", {"reset_counters": False}).ok()
    again = api.claim(price_usd_per_hour=3600.0)
    api.clock.advance(30)
    again.heartbeat().ok()
    assert api.job(held.id)["state"] == "running"
    api.post(f"/job/{held.id}/stop").ok()
    api.post(f"/job/{held.id}/retry", {"reset_counters": True}).ok()
    last = api.claim(price_usd_per_hour=3600.0)
    api.clock.advance(30)
    last.heartbeat().ok()
    assert api.job(held.id)["state"] == "failed"


# Signals of other machines


def test_a_signal_of_an_earlier_attempt_says_nothing_of_this_machine(api: Api) -> None:
    held = running(api, ECC)
    api.clock.advance(30)
    held.heartbeat(step=1, metrics={"log.ecc": 1.0}).ok()
    held.release(reason="pause", message="requeued_by_rule").ok()
    api.clock.advance(120)
    other = api.claim(machine_id="m-2")
    api.sweep()
    api.clock.advance(60)
    assert other.heartbeat().ok()["directive"] == "continue"
    assert api.events(held.id).count("rule.fired") == 1
    # The attempt's own signal counts, even with the same value as before.
    answer = other.heartbeat(step=1, metrics={"log.ecc": 1.0}).ok()
    assert (answer["directive"], answer["reason"]) == ("pause", "requeued_by_rule")


# Groups

WORST = "rules: [{name: worst, when: group_count(loss) >= 2 and group_rank(loss) >= 0.5, do: {stop: failed}}]"


def test_a_stop_is_told_at_once_though_the_group_could_not_be(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.context.jobs.join("acme", "g", "other", _member(0.5))
    held = running(api, WORST, tags={"group": "g"})
    monkeypatch.setattr(MemoryJobStore, "join", away)
    assert held.heartbeat(step=1, metrics={"loss": 2.0}).ok()["directive"] == "cancel"


def test_a_large_group_is_not_read_with_each_heartbeat(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(150):
        api.context.jobs.join("acme", "large", f"job-{number}", _member(5.0))
    rules = "rules: [{name: here, when: group_rank(loss) < 0.1, do: {alert: best}}]"
    reads: list[str] = []
    members = MemoryJobStore.members

    def counted(store: MemoryJobStore, tenant: str, group: str) -> Mapping[str, MemberRecord]:
        reads.append(group)
        return members(store, tenant, group)

    monkeypatch.setattr(MemoryJobStore, "members", counted)
    jobs = [running(api, rules, tags={"group": "large"}) for _ in range(3)]
    for loss in (6.0, 7.0, 4.0):
        for held in jobs:
            held.heartbeat(step=int(loss), metrics={"loss": loss}).ok()
    assert len(reads) == 1, "one of all these"
    assert [api.events(held.id).count("rule.fired") for held in jobs] == [1, 1, 1], "each knows its own value"
    api.clock.advance(30)
    jobs[0].heartbeat(step=9, metrics={"loss": 4.0}).ok()
    assert len(reads) == 2
    assert len(members(api.context.jobs, "acme", "large")) == 153  # type: ignore[arg-type]


def _member(loss: float) -> MemberRecord:
    return MemberRecord(values=[MemberValue(metric="loss", value=loss)], expires_at=NOW + 10**6)


def test_a_loss_that_is_no_number_is_the_worst_of_its_group(api: Api) -> None:
    rules = WORST.replace("(loss)", "(loss, 5)").replace("when: ", 'when: "').replace(", do:", '", do:')
    jobs = [running(api, rules, tags={"group": "g"}) for _ in range(2)]
    jobs[0].heartbeat(step=5, metrics={"loss": 9.0}).ok()
    api.clock.advance(1)
    report = {"rules_revision": 1, "commands_seq": 0, "nonfinite": {"loss": "nan"}}
    assert jobs[1].heartbeat(step=5, metrics={"lr": 0.1}, control=report).ok()["directive"] == "cancel"
    assert api.job(jobs[1].id)["progress"]["nonfinite"] == {"loss": "nan"}
    jobs[0].heartbeat(step=6, metrics={"loss": 9.0}).ok()
    assert [api.job(held.id)["state"] for held in jobs] == ["running", "failed"]


def test_nan_that_is_repeated_is_no_new_point(api: Api) -> None:
    held = running(api, "rules: [{name: here, when: count(loss) >= 2 and failures == 0, do: {alert: x}}]")
    report = {"rules_revision": 1, "commands_seq": 0, "nonfinite": {"loss": "nan"}}
    for _ in range(4):
        api.clock.advance(30)
        held.heartbeat(step=1, control=report).ok()
    assert "rule.fired" not in api.events(held.id)
    held.heartbeat(step=2, control=report).ok()
    assert "rule.fired" in api.events(held.id)
