"""Rules and commands of an elastic job: all nodes receive them, and each firing and result is recorded once."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from functions.domain.errors import StorageUnavailable
from functions.domain.jobs.transaction import Transaction
from tests.functional.api.test_elastic_jobs import NODES, claim, states
from tests.kits.api.harness import NOW, Api, Held

STOP = "rules: [{name: high, when: loss > 9, do: {stop: failed}}]"
SLOWER = "rules: [{name: high, when: loss > 9, do: {set: {knob: lr, factor: 0.5}}}]"
BY = {"rule": "high", "revision": 1, "step": 7, "message": "loss = 12"}


@pytest.fixture
def job(api: Api) -> str:
    return str(api.submit(nodes=NODES, rules=STOP)["id"])


def events(api: Api, job: str) -> list[tuple[str, dict[str, Any]]]:
    return [(one["type"], one["data"]) for one in api.get(f"/job/{job}/events").ok()]


def give(api: Api, job: str, **body: Any) -> int:
    return int(api.post(f"/job/{job}/commands", body).ok()["seq"])


def test_every_node_receives_the_rules_and_each_new_revision(api: Api, job: str) -> None:
    nodes = claim(api, 2)
    assert [one.item["control"]["rules"] for one in nodes] == [{"revision": 1, "text": STOP}] * 2
    assert all(one.report(1, step=0).ok().get("rules") is None for one in nodes)
    api.call("PUT", f"/job/{job}/rules", {"text": SLOWER}).ok()
    assert [one.report(1).ok()["rules"] for one in nodes] == [{"revision": 2, "text": SLOWER}] * 2
    assert [one.report(2, step=7).ok().get("rules") for one in nodes] == [None, None]
    third = claim(api, 1)[0]
    assert third.item["control"]["rules"]["revision"] == 2
    shown = api.get(f"/job/{job}/rules").ok()
    assert (shown["newest"]["revision"], shown["acknowledged"]["revision"]) == (2, 2)


def test_a_revision_that_a_node_has_reported_costs_no_more_writes(api: Api, job: str) -> None:
    nodes = claim(api, 2)
    for one in nodes:
        one.report(1, step=0).ok()
    before = [api.context.jobs.get(one.id).rev for one in nodes]  # type: ignore[union-attr]
    status = {"rule": "high", "state": "armed", "said": "loss = 1", "fires": 0}
    nodes[0].report(1, step=0, statuses=[status]).ok()
    nodes[1].report(1, step=0).ok()
    assert api.get(f"/job/{job}/rules").ok()["acknowledged"]["statuses"] == [status]
    assert [api.context.jobs.get(one.id).rev for one in nodes] == before  # type: ignore[union-attr]


def test_a_command_reaches_every_node_and_has_one_result(api: Api, job: str) -> None:
    nodes = claim(api, 2)
    seq = give(api, job, kind="set", knob="lr", factor=0.5)
    for one in nodes:
        answer = one.report(1, 0).ok()
        assert [(each["seq"], each["kind"]) for each in answer["commands"]] == [(seq, "set")]
        assert answer["commands_seq"] == seq
    nodes[1].report(1, seq, results=[{"seq": seq, "status": "applied", "step": 7, "message": "lr: 1 -> 0.5"}]).ok()
    nodes[0].report(1, seq, results=[{"seq": seq, "status": "rejected", "step": 8, "message": "late"}]).ok()
    (shown,) = api.get(f"/job/{job}/commands").ok()["commands"]
    assert (shown["status"], shown["step"], shown["message"]) == ("applied", 7, "lr: 1 -> 0.5")
    third = claim(api, 1)[0]
    again = third.item["control"]["commands"]
    assert [(one["seq"], one["status"], one["step"]) for one in again] == [(seq, "applied", 7)]


def test_a_command_waits_for_the_first_node(api: Api, job: str) -> None:
    seq = give(api, job, kind="save", tag="first")
    first = claim(api, 1)[0]
    assert [one["seq"] for one in first.item["control"]["commands"]] == [seq]
    api.post(f"/job/{job}/stop").ok()
    api.post(f"/job/{job}/commands", {"kind": "save"}).refused(ErrorCode.JOB_FINISHED)


def test_a_command_meets_the_end_of_an_attempt(api: Api, job: str) -> None:
    nodes = claim(api, 2)
    nodes[0].fail(message="x").ok()
    seq = give(api, job, kind="save")
    assert [one["seq"] for one in nodes[1].report(1, 0).ok()["commands"]] == [seq]


def complete(node: Held) -> None:
    node.post("/complete", {"job_id": node.id, "artifacts": [], "ended_by": BY}).ok()


def test_a_rule_completes_the_job(api: Api, job: str) -> None:
    nodes = claim(api, 2)
    complete(nodes[1])
    view = api.job(job)
    assert (view["state"], view["ended_by"]["rule"], states(api, job)) == (
        "complete",
        "high",
        ["canceled", "complete", "canceled"],
    )


def test_a_rule_fails_the_job_at_once(api: Api, job: str) -> None:
    nodes = claim(api, 2)
    nodes[0].fail(failure_class="stopped_by_rule", message="rule high at step 7", ended_by=BY).ok()
    view = api.job(job)
    assert (view["state"], view["reason"]["code"], view["ended_by"]["rule"]) == ("failed", "stopped_by_rule", "high")
    (failed,) = [data for kind, data in events(api, job) if kind == "job.failed"]
    assert failed["ended_by"]["rule"] == "high"


def test_a_rule_pauses_the_job_once(api: Api, job: str) -> None:
    nodes = claim(api, 2)
    for one in nodes:
        body = {"job_id": one.id, "reason": "pause", "by_rule": {"kind": "pause", "ended_by": BY}}
        one.post("/release", body).ok()
    view = api.job(job)
    assert (view["state"], view["ended_by"]["rule"], states(api, job)) == ("paused", "high", ["paused"] * 3)
    assert [kind for kind, _ in events(api, job)].count("job.pause_requested") == 1
    api.post(f"/job/{job}/resume").ok()
    assert [one.item["control"]["rules"]["revision"] for one in claim(api, 2)] == [1, 1]


def test_one_node_cannot_be_rolled_back(api: Api, job: str) -> None:
    node = claim(api, 1)[0]
    wish = {"kind": "rollback", "ended_by": BY, "rollback": {"before_step": 7}}
    body = {"job_id": node.id, "reason": "rollback", "by_rule": wish}
    with api.unchanged():
        node.post("/release", body).refused(ErrorCode.NOT_FOR_ELASTIC, "by_rule.kind", remedy="without by_rule")


def test_a_firing_is_an_event_of_the_job(api: Api, job: str) -> None:
    node = claim(api, 2)[1]
    fired = {"number": 1, "type": "rule.fired", "rule": "high", "revision": 1, "step": 7, "at": NOW}
    for _ in range(2):
        node.report(1, decisions=[fired]).ok()
    assert [data["rule"] for kind, data in events(api, job) if kind == "rule.fired"] == ["high"]


@pytest.mark.parametrize("call", ["heartbeat", "complete", "release"])
def test_the_first_members_decisions_are_events_of_a_job_that_another_member_has_completed(
    api: Api, job: str, call: str
) -> None:
    """Only the first member reports decisions, and a `stop` ends all members at once."""
    first, second = claim(api, 2)
    fired = {"number": 1, "type": "rule.fired", "rule": "high", "revision": 1, "step": 7, "at": NOW}
    control = {"rules_revision": 1, "commands_seq": 0, "decisions": [fired]}
    complete(second)
    for _ in range(2):
        if call == "heartbeat":
            assert first.heartbeat(control=control).ok()["directive"] == "cancel"
        else:
            more = {"artifacts": []} if call == "complete" else {"reason": "sigterm"}
            first.post(f"/{call}", {"job_id": first.id, "control": control, **more}).refused(ErrorCode.JOB_CANCELED)
    assert [data["rule"] for kind, data in events(api, job) if kind == "rule.fired"] == ["high"]
    assert (api.job(job)["state"], states(api, job)) == ("complete", ["canceled", "complete", "canceled"])


def test_decisions_outlive_a_job_that_another_member_ends_during_the_report(
    api: Api, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = claim(api, 2)
    fired = {"number": 1, "type": "rule.fired", "rule": "high", "revision": 1, "step": 7, "at": NOW}
    control = {"rules_revision": 1, "commands_seq": 0, "decisions": [fired]}
    write = api.context.jobs.apply

    def apply(change: Transaction) -> None:
        monkeypatch.undo()
        complete(second)
        write(change)

    monkeypatch.setattr(api.context.jobs, "apply", apply)
    body = {"job_id": first.id, "artifacts": [], "control": control}
    assert first.post("/complete", body).status >= 400
    assert [data["rule"] for kind, data in events(api, job) if kind == "rule.fired"] == ["high"]


@pytest.mark.parametrize("call", ["heartbeat", "complete"])
def test_decisions_of_a_frozen_machine_are_events_of_a_job_that_has_ended_meanwhile(
    api: Api, job: str, call: str
) -> None:
    first, second = claim(api, 2)
    fired = {"number": 1, "type": "rule.fired", "rule": "high", "revision": 1, "step": 7, "at": NOW}
    control = {"rules_revision": 1, "commands_seq": 0, "decisions": [fired]}
    for _ in range(20):
        api.clock.advance(15)
        second.heartbeat().ok()
    api.sweep()
    assert states(api, job) == ["pending", "running", "pending"]
    complete(second)
    for _ in range(2):
        if call == "heartbeat":
            assert first.heartbeat(control=control).status == 409
        else:
            assert first.post("/complete", {"job_id": first.id, "artifacts": [], "control": control}).status == 409
    assert [data["rule"] for kind, data in events(api, job) if kind == "rule.fired"] == ["high"]
    assert states(api, job) == ["canceled", "complete", "canceled"]


def test_decisions_outlive_a_job_that_has_ended_before_its_nodes(
    api: Api, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job ends by one write and each of its other nodes by a later one; a report may arrive in between."""
    first, second = claim(api, 2)
    fired = {"number": 1, "type": "rule.fired", "rule": "high", "revision": 1, "step": 7, "at": NOW}
    write = api.context.jobs.apply

    def apply(change: Transaction) -> None:
        if api.job(job)["state"] == "complete":
            monkeypatch.undo()
            assert first.report(1, decisions=[fired]).ok()["directive"] == "continue"
        write(change)

    monkeypatch.setattr(api.context.jobs, "apply", apply)
    complete(second)
    assert first.report(1, decisions=[fired]).ok()["directive"] == "cancel"
    assert [data["rule"] for kind, data in events(api, job) if kind == "rule.fired"] == ["high"]


def test_decisions_of_an_earlier_training_are_no_events_of_a_retried_job_whose_nodes_still_run(
    api: Api, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = claim(api, 2)
    fired = {"number": 1, "type": "rule.fired", "rule": "high", "revision": 1, "step": 7, "at": NOW}
    write = api.context.jobs.apply
    reports = []

    def fail(change: Transaction) -> None:
        if api.job(job)["state"] == "failed":
            raise StorageUnavailable("the storage is away")
        write(change)

    def apply(change: Transaction) -> None:
        elastic = api.context.jobs.get(job)
        if elastic is not None and elastic.generation:
            monkeypatch.undo()
            reports.append(first.report(1, decisions=[fired]).ok()["directive"])
        write(change)

    monkeypatch.setattr(api.context.jobs, "apply", fail)
    second.fail(failure_class="stopped_by_rule", message="rule high at step 7", ended_by=BY).ok()
    monkeypatch.setattr(api.context.jobs, "apply", apply)
    api.post(f"/job/{job}/retry").ok()
    assert reports == ["continue"]
    assert "rule.fired" not in [kind for kind, _ in events(api, job)]


def test_decisions_of_an_earlier_training_are_no_events_of_a_retried_job(api: Api, job: str) -> None:
    first, second = claim(api, 2)
    second.fail(failure_class="stopped_by_rule", message="rule high at step 7", ended_by=BY).ok()
    api.post(f"/job/{job}/retry").ok()
    fired = {"number": 1, "type": "rule.fired", "rule": "high", "revision": 1, "step": 7, "at": NOW}
    control = {"rules_revision": 1, "commands_seq": 0, "decisions": [fired]}
    assert first.heartbeat(control=control).ok()["directive"] == "cancel"
    assert "rule.fired" not in [kind for kind, _ in events(api, job)]


@pytest.mark.parametrize(
    ("rule", "place", "reason", "remedy"),
    [
        ("{name: n, when: loss > 9, do: [log: x, rollback: {skip: 1}]}", "rules.0.do", "rollback", "Remove rollback."),
        ("{name: n, when: loss > 9, do: requeue}", "rules.0.do", "machine", "Remove requeue."),
        ("{name: n, when: loss > 9, do: skip_batch}", "rules.0.do", "round", "Remove skip_batch."),
        ("{name: n, when: loss > 9, on: [save, step], do: evaluate}", "rules.0.on", "after save", "Leave 'on' out."),
        ("{name: n, when: queue.age > 1m, do: {alert: x}}", "rules.0", "queue.age", "Remove queue.age."),
        ("{name: n, when: group_rank(loss) > 1, do: {alert: x}}", "rules.0", "a group", "Remove a group."),
        ("{name: n, when: loss > 9, do: {scale: {group: g, delta: 1}}}", "rules.0", "scale", "Remove scale."),
        ("{name: n, when: cost > 9, on: heartbeat, do: {alert: x}}", "rules.0", "heartbeat", "Remove the event"),
    ],
)
def test_rules_that_cannot_be_right_for_nodes(
    api: Api, job: str, rule: str, place: str, reason: str, remedy: str
) -> None:
    text = f"rules: [{rule}]"
    body = {"command": ["train"], "nodes": NODES, "rules": text}
    with api.unchanged():
        for answer, field in (
            (api.post("/job", body), "rules"),
            (api.post("/jobs/batch", {"jobs": [body]}), "jobs.0.rules"),
            (api.call("PUT", f"/job/{job}/rules", {"text": text}), "text"),
        ):
            answer.refused(ErrorCode.NOT_FOR_ELASTIC, field, remedy=remedy)
            assert answer.error["problems"][0]["field"].endswith(place)
            assert reason in answer.error["problems"][0]["reason"]


def test_presets_and_rules_on_rounds_are_accepted(api: Api) -> None:
    text = "presets: off\nrules: [{name: n, when: world.nodes < 2, on: log, do: {alert: 'x'}}]"
    assert api.submit(nodes=NODES, rules=text)["state"] == "pending"


def watch(api: Api, *rules: str) -> str:
    return str(api.submit(nodes=NODES, rules=f"rules: [{', '.join(rules)}]")["id"])


def test_a_bound_of_the_cost_counts_the_running_nodes(api: Api) -> None:
    job = watch(api, "{name: broke, when: cost > 5, do: {stop: failed}}")
    nodes = claim(api, 2, price_usd_per_hour=3.6)
    for seconds, state in ((2400, "running"), (120, "failed")):
        api.clock.advance(seconds)
        assert [one.heartbeat().status for one in nodes] == [200, 200]
        api.sweep()
        assert api.job(job)["state"] == state
    view = api.job(job)
    assert (view["reason"]["code"], view["ended_by"]["rule"]) == ("stopped_by_rule", "broke")
    assert states(api, job) == ["canceled"] * 3
    assert nodes[0].heartbeat().ok()["directive"] == "cancel"


def test_the_control_plane_tells_all_nodes(api: Api) -> None:
    job = watch(
        api,
        "{name: flaky, when: failures >= 1 and loss < 2, do: {set: {knob: lr, factor: 0.5}}}",
        "{name: lost, when: interruptions >= 9 or heartbeat.age > 1d, do: pause}",
    )
    nodes = claim(api, 3)
    nodes[0].fail(message="x").ok()
    metrics = {"loss": 9.0, "world.loss": 1.5}
    nodes[1].heartbeat(step=7, metrics=metrics, control={"rules_revision": 1, "commands_seq": 0}).ok()
    api.clock.advance(60)
    api.sweep()
    told = [one.report(1, 0).ok()["commands"] for one in nodes[1:]]
    assert [[(one["kind"], one["rule"]) for one in each] for each in told] == [[("set", "flaky")]] * 2
    fired = [data for kind, data in events(api, job) if kind == "rule.fired"]
    assert [(one["rule"], one["operands"]["loss"], one["step"]) for one in fired] == [("flaky", 1.5, 7)]


def test_the_control_plane_pauses_all_nodes(api: Api) -> None:
    job = watch(api, "{name: enough, when: failures >= 1, do: pause}")
    nodes = claim(api, 3)
    nodes[0].fail(message="x").ok()
    api.clock.advance(60)
    api.sweep()
    assert [one.heartbeat().ok()["directive"] for one in nodes[1:]] == ["pause", "pause"]
    for one in nodes[1:]:
        one.release(reason="pause").ok()
    assert (api.job(job)["state"], api.job(job)["reason"]["code"]) == ("paused", "paused_by_rule")
