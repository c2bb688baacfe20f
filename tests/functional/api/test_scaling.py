"""Rules that scale a group: copies of the newest job, removal of the newest jobs, bounds."""

from __future__ import annotations

import pytest

from functions.api.rules.group_scaling import JOBS_PER_CALL
from functions.domain.errors import StorageUnavailable
from functions.domain.jobs.transaction import Transaction
from functions.domain.records import RuleStateRecord
from tests.functional.api.scaling_kit import GROUP, generators, live, scaling, told, training
from tests.kits.api.harness import RIVAL, Api
from tests.twins.jobs import MemoryJobStore


def test_copies_of_the_newest_job_are_submitted(api: Api) -> None:
    generators(api)
    newest = api.submit(
        queue="generators",
        tags={**GROUP, "kind": "fast"},
        recipe="generator@1",
        parameters={"ring": "pool", "function": "made:samples"},
        priority=70,
        environment={"A": "b"},
        policy={"max_failures": 7},
        rules="rules: [{name: dear, when: cost > 40, do: {stop: failed}}]",
    )
    held = training(api, scaling(2))
    held.heartbeat(step=4).ok()
    assert len(live(api)) == 2
    held.heartbeat(step=5).ok()
    copies = [job for job in live(api) if job["copy_of"]]
    assert len(copies) == 2 and len(live(api)) == 4
    own = {"id", "created_at", "updated_at", "checkpoint_prefix", "copy_of"}
    for copied in copies:
        assert copied["copy_of"] == newest["id"]
        assert {name: copied[name] for name in copied.keys() - own} == {
            name: newest[name] for name in newest.keys() - own
        }
        (submitted,) = api.get(f"/job/{copied['id']}/events").ok()
        assert submitted["data"] == {
            "queue": "generators",
            "priority": 70,
            "copy_of": newest["id"],
            "rule": "grow",
            "by_job": held.id,
            "group": "generators",
        }
        rules = api.get(f"/job/{copied['id']}/rules").ok()
        assert rules["newest"]["revision"] == 1 and "cost > 40" in rules["newest"]["text"]
        assert rules["control_plane"] is not None
    said = f"group 'generators' has 2 jobs: 2 copies of job {newest['id']}"
    assert told(api, held.id) == [("rule.fired", ""), ("action.applied", said)]
    assert {api.claim(queue="generators").id for _ in range(4)} == {job["id"] for job in live(api)}
    held.heartbeat(step=6).ok()
    api.sweep()
    assert len(live(api)) == 4


def test_the_newest_jobs_are_taken_out_those_that_wait_first(api: Api) -> None:
    one, two, three, four = generators(api, 4)
    api.post(f"/job/{four}/pause").ok()
    claimed = [api.claim(queue="generators", machine_id=f"m-{number}") for number in range(3)]
    running = sorted(claimed, key=lambda job: (one, two, three).index(job.id))
    api.post(f"/job/{four}/resume").ok()
    held = training(api, scaling(-3))
    held.heartbeat(step=5).ok()
    assert [api.job(job)["state"] for job in (one, two, three, four)] == ["running", "running", "running", "canceled"]
    canceled = api.job(four)
    said = f"rule grow of job {held.id} takes it out of group generators"
    assert canceled["reason"] == {"code": "canceled_by_rule", "message": said}
    assert canceled["ended_by"]["rule"] == "grow"
    assert told(api, held.id)[-1] == (
        "action.applied",
        f"group 'generators' has 4 jobs: 3 taken out: {four}, {three}, {two}",
    )
    for job in running[1:]:
        (command,) = job.report(1).ok()["commands"]
        assert (command["kind"], command["arguments"], command["rule"]) == (
            "stop",
            {"outcome": "complete", "save": True},
            "grow",
        )
        assert told(api, job.id) == [("action.applied", f"{said}: command 1, stop")]
    assert running[0].report(1).ok()["commands"] == []
    api.sweep()
    assert [len(api.get(f"/job/{job.id}/commands").ok()["commands"]) for job in running] == [0, 1, 1]


def test_who_decides_is_taken_out_last(api: Api) -> None:
    older = api.submit(queue="generators", tags=GROUP)["id"]
    api.clock.advance(1)
    api.claim(queue="generators", machine_id="m-0")
    held = training(api, scaling(-1), tags=GROUP)
    held.heartbeat(step=5).ok()
    assert len(api.get(f"/job/{older}/commands").ok()["commands"]) == 1
    api.call("PUT", f"/job/{held.id}/rules", {"text": scaling(-1, when="step >= 6")}).ok()
    held.heartbeat(step=6).ok()
    assert [one["kind"] for one in held.report(2).ok()["commands"]] == ["stop"]


@pytest.mark.parametrize(
    ("there", "delta", "more", "after", "said"),
    [
        (3, 5, ", most: 4", 4, "1 copy of job {newest} of 5: the rule allows 4 jobs at most"),
        (1, 100, "", 16, "15 copies of job {newest} of 100: the rule allows 16 jobs at most"),
        (3, -5, ", least: 1", 1, "2 taken out of 5: the rule wants 1 job at least"),
        (3, -5, "", 0, "3 taken out of 5"),
    ],
)
def test_bounds_cut_what_a_rule_wants(api: Api, there: int, delta: int, more: str, after: int, said: str) -> None:
    newest = generators(api, there)[-1]
    held = training(api, scaling(delta, more=more))
    held.heartbeat(step=5).ok()
    assert len(live(api)) == after
    kind, message = told(api, held.id)[-1]
    assert (kind, message.split(": ", 1)[1][: len(said.format(newest=newest))]) == (
        "action.applied",
        said.format(newest=newest),
    )


@pytest.mark.parametrize(
    ("prepare", "delta", "said"),
    [
        ("", 1, "group 'generators' has no job that has not ended"),
        ("stop", 1, "group 'generators' has no job that has not ended"),
        ("pause", 1, "all jobs of group 'generators' that have not ended are paused"),
        ("pause", -1, "all jobs of group 'generators' that have not ended are paused"),
        ("go on", 1, "group 'generators' has 1 job, and the rule allows 1 at most"),
        ("go on", -1, "of group 'generators' 1 job would go on, and the rule wants 1 at least"),
        ("rival", 1, "group 'generators' has no job that has not ended"),
    ],
)
def test_what_cannot_be_done_is_rejected_with_the_reason(api: Api, prepare: str, delta: int, said: str) -> None:
    if prepare == "rival":
        job = api.post("/job", {"command": ["train"], "tags": GROUP}, key="rival_submit").ok()
        assert api.context.jobs.get(job["id"]).tenant == RIVAL  # type: ignore[union-attr]
    elif prepare:
        (job_id,) = generators(api)
        if prepare != "go on":
            api.post(f"/job/{job_id}/{prepare}").ok()
    before = live(api)
    held = training(api, scaling(delta, more=", least: 1, most: 1"))
    held.heartbeat(step=5).ok()
    assert told(api, held.id) == [("rule.fired", ""), ("action.rejected", said)]
    assert live(api) == before


def test_what_could_not_be_submitted_any_more_is_told_and_leaves_no_place_taken(api: Api) -> None:
    (job_id,) = generators(api, policy={"deadline_at": api.clock.now() + 100})
    held = training(api, scaling(3), policy={"heartbeat_interval_s": 600})
    api.clock.advance(200)
    held.heartbeat(step=5).ok()
    assert [job["id"] for job in live(api)] == [job_id]
    kinds = [kind for kind, _ in told(api, held.id)]
    assert kinds == ["rule.fired", "action.applied", "action.failed"]
    assert "group 'generators': The deadline" in told(api, held.id)[-1][1]
    record = api.context.jobs.scaling("acme", "generators")
    assert record is not None and record.copies == []
    rule_state = api.context.jobs.read(RuleStateRecord, held.id)
    assert rule_state is not None and rule_state.orders == []


def test_copies_do_not_multiply(api: Api) -> None:
    api.submit(queue="generators", tags=GROUP, rules=scaling(1))
    first = api.claim(queue="generators", machine_id="m-0")
    first.heartbeat(step=5).ok()
    assert len(live(api)) == 2
    copied = api.claim(queue="generators", machine_id="m-1")
    copied.heartbeat(step=5).ok()
    said = "this job is a copy, made by a rule: its own rules do not scale 'generators'"
    assert told(api, copied.id) == [("rule.fired", ""), ("action.rejected", said)]
    assert len(live(api)) == 2


def test_a_dry_run_says_what_it_would_do(api: Api) -> None:
    newest = generators(api, 2)[-1]
    held = training(api, scaling(20, rule=", mode: dry_run"))
    held.heartbeat(step=5).ok()
    copies = f"14 copies of job {newest} of 20: the rule allows 16 jobs at most"
    assert told(api, held.id) == [("rule.fired", f"would be applied: group 'generators' has 2 jobs: {copies}")]
    assert len(live(api)) == 2
    assert api.context.jobs.scaling("acme", "generators") is None
    other = training(api, scaling(1, group="nobody", rule=", mode: dry_run"))
    other.heartbeat(step=5).ok()
    said = "would be rejected: group 'nobody' has no job that has not ended"
    assert told(api, other.id) == [("rule.fired", said)]


def test_rules_of_several_jobs_count_each_other_s_copies(api: Api) -> None:
    """Eight jobs with one rule fire at the same moment: no more than it allows."""
    rules = scaling(3, more=", most: 12")
    held = []
    for number in range(8):
        api.submit(queue="generators", tags=GROUP, rules=rules)
        held.append(api.claim(queue="generators", machine_id=f"m-{number}"))
    for job in held:
        job.heartbeat(step=5).ok()
    assert len(live(api)) == 12
    kinds = [told(api, job.id)[-1][0] for job in held]
    assert kinds == ["action.applied"] * 2 + ["action.rejected"] * 6


def test_a_hundred_copies_are_more_than_one_call_s_and_are_all_made(api: Api) -> None:
    generators(api)
    held = training(api, scaling(100, more=", most: 100"))
    held.heartbeat(step=5).ok()
    assert len(live(api)) == 1 + JOBS_PER_CALL
    held.heartbeat(step=5).ok()
    assert len(live(api)) == 1 + 2 * JOBS_PER_CALL
    api.sweep()
    assert len(live(api)) == 100
    api.call("PUT", f"/job/{held.id}/rules", {"text": scaling(-100, when="step >= 6")}).ok()
    held.heartbeat(step=6).ok()
    assert len(live(api)) == 100 - JOBS_PER_CALL
    api.sweep()
    assert live(api) == []
    api.sweep()
    rule_state = api.context.jobs.read(RuleStateRecord, held.id)
    assert rule_state is not None and rule_state.orders == []


def test_it_is_carried_out_though_its_job_has_ended(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    generators(api)
    held = training(api, scaling(2))
    apply = MemoryJobStore.apply

    def away_for_copies(store: MemoryJobStore, change: Transaction) -> None:
        if change.job.copy_of:
            raise StorageUnavailable("away")
        apply(store, change)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryJobStore, "apply", away_for_copies)
        held.heartbeat(step=5).ok()
    assert len(live(api)) == 1
    held.complete().ok()
    api.sweep()
    assert len(live(api)) == 3
    rule_state = api.context.jobs.read(RuleStateRecord, held.id)
    assert rule_state is not None and rule_state.orders == []
    api.sweep()
    assert held.id not in api.context.jobs.due_rules(2**40, limit=99)


def test_who_is_leaving_is_not_taken_out_again_and_does_not_count_as_going_on(api: Api) -> None:
    generators(api, 3)
    running = [api.claim(queue="generators", machine_id=f"m-{number}") for number in range(3)]
    one, other = (training(api, scaling(-1, more=", least: 1")) for _ in range(2))
    one.heartbeat(step=5).ok()
    other.heartbeat(step=5).ok()
    commands = [len(api.get(f"/job/{job.id}/commands").ok()["commands"]) for job in running]
    assert sorted(commands) == [0, 1, 1]
    last = training(api, scaling(-1, more=", least: 1"))
    last.heartbeat(step=5).ok()
    said = "of group 'generators' 1 job would go on, and the rule wants 1 at least"
    assert told(api, last.id)[-1] == ("action.rejected", said)


def test_a_retried_job_is_of_its_group_again(api: Api) -> None:
    (job_id,) = generators(api)
    worker = api.claim(queue="generators", machine_id="m-0")
    held = training(api, scaling(-1))
    held.heartbeat(step=5).ok()
    worker.report(1).ok()
    worker.complete().ok()
    api.post(f"/job/{job_id}/retry").ok()
    again = api.claim(queue="generators", machine_id="m-0")
    api.call("PUT", f"/job/{held.id}/rules", {"text": scaling(-1, when="step >= 6")}).ok()
    held.heartbeat(step=6).ok()
    assert told(api, held.id)[-1][0] == "action.applied"
    assert [one["kind"] for one in again.report(1).ok()["commands"]] == ["stop"]
