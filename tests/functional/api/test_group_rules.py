"""Rules over a group of jobs stop the worst half at a step, in any order of heartbeats."""

from __future__ import annotations

import random

import pytest

from tests.kits.api.harness import RIVAL, Api, Held

JOBS = 8
WORST = """
rules:
  - name: worst-half
    when: group_count(loss, 500) >= 8 and group_rank(loss, 500) >= 0.5
    do: {stop: failed}
"""
LIKELY = WORST.replace(">= 8 and", ">= 4 and")


def started(api: Api, rules: str, jobs: int = JOBS, **tags: str) -> list[Held]:
    """Running jobs of one group."""
    for _ in range(jobs):
        api.submit(rules=rules, tags={"group": "sweep-1", **tags}, policy={"heartbeat_interval_s": 600})
    return [api.claim(machine_id=f"m-{number}") for number in range(jobs)]


def states(api: Api, jobs: list[Held]) -> list[str]:
    return [str(api.job(held.id)["state"]) for held in jobs]


@pytest.mark.parametrize("seed", range(12))
def test_exactly_the_worst_half_is_stopped_whatever_the_order(api: Api, seed: int) -> None:
    chance = random.Random(seed)
    jobs = started(api, WORST)
    losses = chance.sample(range(100), JOBS)
    steps = [0] * JOBS
    while min(steps) < 800:
        api.clock.advance(chance.randrange(1, 4))
        one = chance.randrange(JOBS)
        steps[one] += chance.randrange(1, 120)
        # Reports after step 500 change no value that the rule reads.
        at_500 = losses[one] if steps[one] >= 500 else chance.random()
        loss = at_500 if steps[one] < 620 else chance.random() * 1000
        jobs[one].heartbeat(step=steps[one], metrics={"loss": float(loss)})
        if chance.random() < 0.05:
            api.sweep()
    api.clock.advance(60)
    api.sweep()
    better = sorted(losses)[: JOBS // 2]
    expected = ["running" if loss in better else "failed" for loss in losses]
    assert states(api, jobs) == expected
    for held, state in zip(jobs, expected, strict=True):
        fired = api.events(held.id).count("rule.fired")
        assert fired == (state == "failed")


def test_how_a_rule_stands_says_what_is_known_of_the_group(api: Api) -> None:
    jobs = started(api, LIKELY.replace("stop: failed", "alert: x"), 3)
    api.submit(rules=LIKELY)
    alone = api.claim(machine_id="m-9")

    def said(held: Held) -> str:
        (status,) = api.get(f"/job/{held.id}/rules").ok()["control_plane"]["statuses"]
        return str(status["said"])

    for held, loss in ((jobs[0], 3.0), (jobs[1], 2.0), (jobs[2], 1.0), (alone, 1.0)):
        held.heartbeat(step=500, metrics={"loss": loss}).ok()
        api.clock.advance(1)
    jobs[0].heartbeat(step=501, metrics={"loss": 0.0}).ok()
    with api.unchanged():
        assert "group_count(loss, 500) = 3, group_rank(loss, 500) = 0.6667" in said(jobs[0])
        assert "group_rank(loss, 500) = 0" in said(jobs[2])
        assert "group_count(loss, 500) = unknown" in said(alone), "it is in no group"


def test_who_was_stopped_stays_in_the_statistics(api: Api) -> None:
    jobs = started(api, LIKELY, 6)
    for number, held in enumerate(jobs[:4]):
        held.heartbeat(step=500, metrics={"loss": float(number)}).ok()
        api.clock.advance(1)
    for _ in range(2):
        for held in jobs[:4]:
            held.heartbeat(step=501, metrics={"loss": 9.0})
            api.clock.advance(1)
    assert states(api, jobs[:4]) == ["running", "running", "failed", "failed"]
    jobs[4].heartbeat(step=500, metrics={"loss": 1.5}).ok()
    assert states(api, jobs) == ["running", "running", "failed", "failed", "running", "running"]
    jobs[5].heartbeat(step=500, metrics={"loss": 10.0}).ok()
    assert states(api, jobs)[5] == "failed", "of six it is the worst"


def test_the_value_at_a_step_is_that_of_the_first_report_after_it(api: Api) -> None:
    (held,) = started(api, 'rules: [{name: one, when: "group_mean(loss, 500) > 3", do: {alert: x}}]', 1)
    for step, loss in ((499, 9.0), (503, 2.0), (510, 9.0)):
        api.clock.advance(30)
        held.heartbeat(step=step, metrics={"loss": loss}).ok()
    assert "rule.fired" not in api.events(held.id)
    (member,) = api.context.jobs.members("acme", "sweep-1").values()
    assert [(one.metric, one.step, one.value) for one in member.values] == [("loss", 500, 2.0)]


def test_newest_values_follow_the_reports(api: Api) -> None:
    rule = "rules: [{name: one, when: group_max(loss) - group_min(loss) > 5, do: {alert: x}}]"
    jobs = started(api, rule, 2)
    for losses in ((1.0, 2.0), (2.0, 8.0)):
        for held, loss in zip(jobs, losses, strict=True):
            held.heartbeat(step=int(loss), metrics={"loss": loss}).ok()
    assert [api.events(held.id).count("rule.fired") for held in jobs] == [0, 1]
    api.clock.advance(60)
    api.sweep()
    assert [api.events(held.id).count("rule.fired") for held in jobs] == [1, 1]


def test_other_groups_other_tenants_and_jobs_without_a_group_are_not_compared(api: Api) -> None:
    rule = "rules: [{name: many, when: group_count(loss) >= 2, do: {alert: x}}]"
    jobs = [*started(api, rule, 1), *started(api, rule, 1, group="sweep-2")]
    api.submit(rules=rule)
    jobs.append(api.claim())
    job = {"command": ["train"], "rules": rule, "tags": {"group": "sweep-1"}}
    api.post("/job", job, key="rival_submit").ok()
    work = api.get("/work", headers={"x-lease-aware": "1"}, key="rival_worker").ok()
    rival = Held(api, work[0])
    rival.post(f"/heartbeat/{rival.id}", {"step": 1, "metrics": {"loss": 1.0}}, key="rival_worker").ok()
    for held in jobs:
        held.heartbeat(step=1, metrics={"loss": 1.0}).ok()
    for held in jobs:
        held.heartbeat(step=2, metrics={"loss": 1.0}).ok()
    assert len(api.context.jobs.members(RIVAL, "sweep-1")) == 1
    assert [api.events(held.id).count("rule.fired") for held in jobs] == [0, 0, 0]


def test_a_complete_member_counts_on(api: Api) -> None:
    jobs = started(api, 'rules: [{name: two, when: "group_count(loss, 5) >= 2", do: {alert: x}}]', 2)
    jobs[0].heartbeat(step=5, metrics={"loss": 1.0}).ok()
    jobs[0].complete().ok()
    jobs[1].heartbeat(step=5, metrics={"loss": 1.0}).ok()
    assert "rule.fired" in api.events(jobs[1].id)


def test_a_member_that_was_not_written_is_written_by_the_next_look(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    (held,) = started(api, WORST, 1)
    store = api.context.jobs
    with monkeypatch.context() as broken:

        def lost(*_: object) -> None:
            raise RuntimeError("the function was ended")

        broken.setattr(store, "join", lost)
        held.heartbeat(step=500, metrics={"loss": 1.0}).ok()
    assert store.members("acme", "sweep-1") == {}
    held.heartbeat(step=510, metrics={"loss": 7.0}).ok()
    (member,) = store.members("acme", "sweep-1").values()
    assert [one.value for one in member.values] == [1.0]


def test_what_rules_once_asked_for_is_not_kept_without_end(api: Api) -> None:
    """A job's item keeps the steps of the newest rules and some older ones: each revision may ask for other steps."""
    (held,) = started(api, WORST, 1)
    for number in range(20):
        whens = " or ".join(f"group_count(loss, {number * 16 + step}) > 99" for step in range(16))
        text = f'rules: [{{name: r, when: "{whens}", do: {{alert: x}}}}]'
        api.call("PUT", f"/job/{held.id}/rules", {"text": text}).ok()
        api.clock.advance(30)
        held.heartbeat(step=1000, metrics={"loss": 1.0}).ok()
    (member,) = api.context.jobs.members("acme", "sweep-1").values()
    steps = {one.step for one in member.values}
    assert set(range(19 * 16, 20 * 16)) <= steps, "what the newest rules ask for"
    assert 18 * 16 in steps, "other jobs may go by the revision before for a while"
    assert len(steps) <= 64
