"""Scaling of groups with slow reads, concurrent changes, and partial failures."""

from __future__ import annotations

from typing import Any

import pytest

import functions.api.rules.group_scaling
import functions.api.rules.rule_evaluation_runs
from baton.contract.jobs.job import JobState
from functions.api.rules.group_scaling import MAX_GROUPS, ScaleOrderExecutor
from functions.domain.errors import WriteConflict
from functions.domain.jobs.transaction import Transaction
from functions.domain.ports import ResultPage
from functions.domain.records import Job, RuleStateRecord, ScaleOrder, ScalingRecord
from tests.functional.api.scaling_kit import GROUP, generators, live, scaling, told, training
from tests.kits.api.harness import Api
from tests.twins.jobs import MemoryJobStore


def test_a_job_that_cannot_be_copied_keeps_no_rule_from_being_evaluated(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    generators(api)
    alert = "{name: late, when: wall > 5m, on: timer, do: {stop: failed}}"
    held = training(api, scaling(1)[:-1] + f", {alert}]")

    def broken(*_: object) -> Transaction:
        raise ValueError("damaged")

    with monkeypatch.context() as patch:
        patch.setattr(ScaleOrderExecutor, "_copy", broken)
        held.heartbeat(step=5).ok()
        api.clock.advance(301)
        api.sweep()
        assert api.job(held.id)["state"] == "failed"
        assert len(live(api)) == 1
    api.sweep()
    assert len(live(api)) == 2, "and it stands there until it is done"


def test_a_group_among_too_many_jobs_is_not_counted(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions.api.rules.group_scaling, "MAX_LIVE_JOBS", 3)
    monkeypatch.setattr(functions.api.rules.group_scaling, "PAGE", 1)
    generators(api, 2)
    held = training(api, scaling(1))
    held.heartbeat(step=5).ok()
    api.submit()
    other = training(api, scaling(1))
    other.heartbeat(step=5).ok()
    assert told(api, held.id)[-1][0] == "action.applied"
    said = "group 'generators' cannot be counted: more than 3 jobs have not ended"
    assert told(api, other.id)[-1] == ("action.rejected", said)


def test_who_was_taken_out_and_is_retried_meanwhile_is_not_taken_out_again(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job_id,) = generators(api)
    held = training(api, scaling(-1))
    with monkeypatch.context() as patch:
        # The function dies, or is slow, with the order done and not taken away.
        patch.setattr(ScaleOrderExecutor, "_settle", lambda _, rule_state, *__: rule_state)
        held.heartbeat(step=5).ok()
    assert api.job(job_id)["state"] == "canceled"
    api.post(f"/job/{job_id}/retry").ok()
    api.sweep()
    assert api.job(job_id)["state"] == "pending"
    rule_state = api.context.jobs.read(RuleStateRecord, held.id)
    assert rule_state is not None and rule_state.orders == []


def test_the_rule_s_own_job_is_counted_though_an_index_does_not_show_it_yet(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule counts its own job at the claim, when the index of jobs by state does not show the job yet."""
    own = api.submit(queue="training", tags=GROUP, rules=scaling(5, more=", most: 2", when="failures == 0", on="state"))
    listed = MemoryJobStore.list_jobs

    def behind(store: MemoryJobStore, *at: Any, **more: Any) -> ResultPage[Job]:
        found = listed(store, *at, **more)
        return ResultPage([job for job in found.items if job.id != own["id"]], found.cursor)

    monkeypatch.setattr(MemoryJobStore, "list_jobs", behind)
    held = api.claim(queue="training")
    said = f"group 'generators' has 1 job: 1 copy of job {held.id} of 5: the rule allows 2 jobs at most"
    assert told(api, held.id) == [("rule.fired", ""), ("action.applied", said)]


def test_a_tenant_s_jobs_are_read_once_for_all_groups_of_a_look(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty rules of sixteen actions may name a group each: a heartbeat ends before its function is ended."""
    do = ", ".join(f"{{scale: {{group: g{number}, delta: 1, most: 3}}}}" for number in range(16))
    rules = f"rules: [{{name: grow, when: step >= 5, on: [heartbeat], do: [{do}]}}]"
    for number in (0, 1, 9, 10):
        api.submit(queue="generators", tags={"group": f"g{number}"})
    held = training(api, rules)
    listings: list[JobState | None] = []
    groups: set[str] = set()
    listed, scaled = MemoryJobStore.list_jobs, MemoryJobStore.scaling

    def listing(store: MemoryJobStore, *at: Any, **more: Any) -> ResultPage[Job]:
        listings.append(more["state"])
        return listed(store, *at, **more)

    def reading(store: MemoryJobStore, tenant: str, group: str) -> ScalingRecord | None:
        groups.add(group)
        return scaled(store, tenant, group)

    monkeypatch.setattr(MemoryJobStore, "list_jobs", listing)
    monkeypatch.setattr(MemoryJobStore, "scaling", reading)
    held.heartbeat(step=5).ok()
    assert len(listings) == 3
    assert len(groups) == MAX_GROUPS
    assert [len(live(api, f"g{number}")) for number in (0, 1, 9, 10)] == [2, 2, 2, 1]
    assert "may read 10 groups" in told(api, held.id)[-1][1]


def test_reading_a_group_is_no_slow_rule(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant of two thousand jobs takes about a second of a small function to be read."""
    generators(api)
    held = training(api, scaling(1))
    now_s = 0.0
    listed = MemoryJobStore.list_jobs

    def slow(store: MemoryJobStore, *at: Any, **more: Any) -> ResultPage[Job]:
        nonlocal now_s
        now_s += 0.5
        return listed(store, *at, **more)

    monkeypatch.setattr(MemoryJobStore, "list_jobs", slow)
    monkeypatch.setattr(functions.api.rules.rule_evaluation_runs.time, "thread_time", lambda: now_s)
    held.heartbeat(step=5).ok()
    assert [kind for kind, _ in told(api, held.id)] == ["rule.fired", "action.applied"]
    assert "rule.error" not in api.events(held.id)


@pytest.mark.parametrize("running", [False, True])
def test_who_has_been_paused_meanwhile_is_left_as_he_is(
    api: Api, monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    (job_id,) = generators(api)
    worker = api.claim(queue="generators", machine_id="m-0") if running else None
    held = training(api, scaling(-1))
    with monkeypatch.context() as patch:
        patch.setattr(ScaleOrderExecutor, "execute", lambda _, rule_state, **__: rule_state)
        held.heartbeat(step=5).ok()
    api.post(f"/job/{job_id}/pause").ok()
    api.sweep()
    assert api.job(job_id)["state"] == ("running" if worker else "paused")
    assert api.get(f"/job/{job_id}/commands").ok()["commands"] == []
    assert told(api, held.id)[-1] == (
        "action.failed",
        f"group 'generators': Job {job_id} is paused; scale leaves paused jobs unchanged.",
    )
    rule_state, record = api.context.jobs.read(RuleStateRecord, held.id), api.context.jobs.scaling("acme", "generators")
    assert rule_state is not None and rule_state.orders == []
    assert record is not None and record.leaving == []


def test_a_turn_of_the_sweeper_does_a_part_of_very_many(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost machines' jobs are taken back behind it, in the same function."""
    monkeypatch.setattr(functions.api.rules.group_scaling, "JOBS_PER_SWEEP", 30)
    generators(api)
    held = training(api, scaling(100, more=", most: 100"))
    with monkeypatch.context() as patch:
        patch.setattr(ScaleOrderExecutor, "execute", lambda _, rule_state, **__: rule_state)
        held.heartbeat(step=5).ok()
    held.complete().ok()
    found = []
    for _ in range(5):
        api.sweep()
        found.append(len(live(api)))
    assert found == [31, 61, 91, 100, 100]
    assert held.id not in api.context.jobs.due_rules(2**40, limit=99)


def test_one_order_that_cannot_be_carried_out_keeps_nothing_else_waiting(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that cannot be copied and a job that others keep writing delay neither the other order nor another rule."""
    for group in ("damaged", "busy", "sound"):
        api.submit(queue="generators", tags={"group": group})
    (busy,) = live(api, "busy")
    deltas = {"damaged": 1, "busy": -1, "sound": 1}
    do = ", ".join(f"{{scale: {{group: {group}, delta: {delta}}}}}" for group, delta in deltas.items())
    grow = f"{{name: grow, when: step >= 5, on: [heartbeat], do: [{do}]}}"
    held = training(api, f"rules: [{grow}, {{name: late, when: wall > 5m, on: timer, do: {{stop: failed}}}}]")
    apply, copied = MemoryJobStore.apply, ScaleOrderExecutor._copy

    def busy_one(store: MemoryJobStore, change: Transaction) -> None:
        if change.job.id == busy["id"]:
            raise WriteConflict
        apply(store, change)

    def damaged_one(carrying: ScaleOrderExecutor, order: ScaleOrder, one: str) -> Transaction:
        if order.group == "damaged":
            raise ValueError("damaged")
        return copied(carrying, order, one)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryJobStore, "apply", busy_one)
        patch.setattr(ScaleOrderExecutor, "_copy", damaged_one)
        held.heartbeat(step=5).ok()
        assert [len(live(api, group)) for group in deltas] == [1, 1, 2]
        api.clock.advance(301)
        api.sweep()
        assert api.job(held.id)["state"] == "failed"
    api.sweep()
    assert [len(live(api, group)) for group in deltas] == [2, 0, 2]
    rule_state = api.context.jobs.read(RuleStateRecord, held.id)
    assert rule_state is not None and rule_state.orders == []


@pytest.mark.parametrize("answered", [False, True])
def test_who_was_told_to_stop_and_was_lost_is_told_again(api: Api, answered: bool) -> None:
    """The machine is lost behind its answer and ahead of the end: the next one is not handed that command."""
    (job_id,) = generators(api)
    worker = api.claim(queue="generators", machine_id="m-0")
    held = training(api, scaling(-1), policy={"heartbeat_interval_s": 600})
    held.heartbeat(step=5).ok()
    worker.report(1).ok()
    if answered:
        worker.report(1, results=[{"seq": 1, "status": "applied", "step": 3, "message": "stops"}]).ok()
    for _ in range(2):
        api.clock.advance(300)
        api.sweep()
    again = api.claim(queue="generators", machine_id="m-1")
    api.call("PUT", f"/job/{held.id}/rules", {"text": scaling(-1, when="step >= 6")}).ok()
    held.heartbeat(step=6).ok()
    rejected = "action.rejected", "all jobs of group 'generators' are being taken out already"
    applied = "action.applied", f"group 'generators' has 1 job: 1 taken out: {job_id}"
    assert told(api, held.id)[-1] == (applied if answered else rejected)
    commands = api.get(f"/job/{job_id}/commands").ok()["commands"]
    waiting = [one["seq"] for one in commands if one["status"] == "waiting"]
    assert waiting == ([2] if answered else [1])
    if answered:
        assert [one["seq"] for one in again.report(1, 1).ok()["commands"]] == [2]
