"""The life of an elastic job: seats are claimed and lost, the job follows, and what users do reaches all seats."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from functions.api.operations.sweeper import SweepResult
from functions.domain.jobs.attempt_end import LATE_AFTER_S
from functions.domain.records import Event, Job
from functions.domain.worlds.seat_ids import seat_ids
from tests.kits.api.harness import NOW, Api, Held, memory_api
from tests.properties.elastic_machine import check_agreement
from tests.properties.scaling_machine import MortalJobs
from tests.properties.watching_machine import Died

NODES = {"min": 2, "max": 3}


@pytest.fixture
def job(api: Api) -> str:
    return str(api.submit(nodes=NODES)["id"])


def claim(api: Api, count: int = 3, **query: Any) -> list[Held]:
    """Claim seats; the result is in the order of the seats."""
    held = [api.claim(**{"machine_id": f"m-{number}", **query}) for number in range(count)]
    return sorted(held, key=lambda one: int(one.item["world"]["seat"]))


def seats(api: Api, job_id: str) -> list[Job]:
    return list(api.context.jobs.get_many(seat_ids(job_id, NODES["max"])))


def states(api: Api, job_id: str) -> list[str]:
    return [seat.state.value for seat in seats(api, job_id)]


def tell(api: Api, job_id: str) -> list[tuple[str, int | None]]:
    """The job's history: types, and the numbers of nodes."""
    return [(one["type"], one["data"].get("seat")) for one in api.get(f"/job/{job_id}/events").ok()]


def test_a_life(api: Api, job: str) -> None:
    assert api.job(job)["nodes"] == NODES and api.job(job)["state"] == "pending"
    nodes = claim(api, price_usd_per_hour=3.6)
    api.no_work()
    view = api.job(job)
    assert (view["state"], view["epoch"], view["started_at"], view["counters"]["attempts"]) == ("running", 3, NOW, 3)
    assert sorted(one.item["world"]["epoch"] for one in nodes) == [1, 2, 3]
    api.clock.advance(60)
    nodes[1].heartbeat(step=40, metrics={"loss": 0.5}).ok()
    assert api.job(job)["progress"]["step"] == 40
    nodes[0].fail(message="no such file").ok()
    nodes[2].release().ok()
    view = api.job(job)
    assert (view["state"], view["counters"]) == (
        "running",
        {"attempts": 3, "failures": 1, "interruptions": 0, "node_faults": 0, "releases": 1, "runtime_s": 120},
    )
    api.clock.advance(60)
    (again,) = claim(api, 1, machine_id="m-9")
    assert again.item["world"]["epoch"] == 4
    api.clock.advance(60)
    nodes[1].heartbeat().ok()
    nodes[1].complete({"model.bin": b"weights"}, step=90).ok()
    view = api.job(job)
    assert (view["state"], view["completed_at"], view["progress"]["step"]) == ("complete", NOW + 180, 90)
    assert [one["path"] for one in view["artifacts"]] == ["model.bin"]
    assert [one["path"] for one in api.get(f"/job/{job}/artifacts").ok()["artifacts"]] == ["model.bin"]
    assert sorted(states(api, job)) == ["canceled", "canceled", "complete"] and api.job(job)["reason"] is None
    assert again.heartbeat().ok()["directive"] == "cancel"
    api.no_work()
    assert tell(api, job) == [
        ("job.submitted", None),
        *[("job.started", place) for place in by_epoch(nodes)],
        ("attempt.failed", 0),
        ("attempt.released", 2),
        ("job.started", int(again.item["world"]["seat"])),
        ("job.completed", 1),
    ]
    stored = api.context.jobs.get(job)
    assert stored is not None and stored.settled
    assert (stored.cost_usd, stored.priced_s, stored.counters.runtime_s) == (pytest.approx(0.3), 300, 360)


def by_epoch(nodes: list[Held]) -> list[int]:
    """The seats in the order of their claims."""
    return [int(one.item["world"]["seat"]) for one in sorted(nodes, key=lambda one: int(one.item["world"]["epoch"]))]


def test_seats_are_no_jobs_of_the_user(api: Api, job: str) -> None:
    (node,) = claim(api, 1)
    assert [one["id"] for one in api.get("/jobs").ok()] == [job]
    assert [one["id"] for one in api.get("/jobs", query={"status": "running"}).ok()] == [job]
    calls = [
        ("GET", ""),
        ("POST", "/stop"),
        ("POST", "/pause"),
        ("POST", "/retry"),
        ("GET", "/events"),
        ("GET", "/logs"),
    ]
    calls += [("GET", "/checkpoints"), ("GET", "/rules"), ("GET", "/machines"), ("GET", "/world")]
    for (method, path), headers in product(calls, ({}, {"x-lease-token": "x"})):
        with api.unchanged():
            error = api.call(method, f"/job/{node.id}{path}", key="submit", headers=headers).refused(
                ErrorCode.JOB_NOT_FOUND, "id", remedy=f"Call with the id {job}."
            )
        assert f"node {node.item['world']['seat']} of job {job}" in error["message"]
    node.heartbeat(step=1).ok()


def test_a_worker_of_an_earlier_release_receives_no_node(api: Api, job: str) -> None:
    for query in ({}, {"runs_plans": "true"}, {"runs_nodes": "false"}):
        api.no_work(machine_id="m-1", **query)
    assert states(api, job) == ["pending"] * 3
    assert claim(api, 1, runs_plans="true")[0].item["world"]["job"] == job


def test_attempts_of_all_nodes_are_listed_seat_by_seat(api: Api, job: str) -> None:
    nodes = claim(api)
    nodes[1].heartbeat(step=7).ok()
    for node in (nodes[2], nodes[0]):
        node.release().ok()
    (again,) = claim(api, 1, machine_id="m-9")
    place = int(again.item["world"]["seat"])
    said = sorted([(0, 1, "released"), (1, 1, None), (2, 1, "released"), (place, 2, None)])
    listed = api.get(f"/job/{job}/attempts").ok()
    assert [(one["seat"], one["epoch"], one["end"]) for one in listed["attempts"]] == said
    assert [one["progress"]["step"] for one in listed["attempts"] if one["progress"]] == [7]
    for limit in (1, 2, 3):
        found, cursor = [], {}
        while True:
            page = api.get(f"/job/{job}/attempts", query={"limit": limit, **cursor}).ok()
            found += page["attempts"]
            cursor = {"cursor": page["next_cursor"]}
            if page["next_cursor"] is None:
                break
        assert found == listed["attempts"]
    for wrong in ("x", "0.x", "7.1.1"):
        api.get(f"/job/{job}/attempts", query={"cursor": wrong}).refused(ErrorCode.INVALID_CURSOR, "cursor")


def test_output_and_metrics_of_each_node(api: Api, job: str) -> None:
    for node in claim(api):
        seat = node.item["world"]["seat"]
        body = {"first_line": 0, "lines": [f"node {seat}"], "points": [{"step": seat, "at": 1}]}
        node.post(f"/job/{node.id}/logs", body).ok()
    for query, seat in (({"seat": 0}, 0), ({"seat": 2}, 2)):
        page = api.get(f"/job/{job}/logs", query=query).ok()
        assert [line["text"] for line in page["lines"]] == [f"node {seat}"]
        assert api.get(f"/job/{job}/logs", query={**query, "cursor": page["next_cursor"]}).ok()["lines"] == []
        assert [one["step"] for one in api.get(f"/job/{job}/metrics", query=query).ok()["points"]] == [seat]
    for kind, name in (("logs", "lines"), ("metrics", "points")):
        seen: list[Any] = []
        cursor: dict[str, Any] = {}
        while len(seen) < 3:
            page = api.get(f"/job/{job}/{kind}", query={"limit": 1, **cursor}).ok()
            seen += [one["seat"] for one in page[name]]
            cursor = {"cursor": page["next_cursor"]}
        assert seen == [0, 1, 2]
        assert api.get(f"/job/{job}/{kind}", query=cursor).ok()[name] == []
        assert [one["seat"] for one in api.get(f"/job/{job}/{kind}").ok()[name]] == [0, 1, 2]
        api.get(f"/job/{job}/{kind}", query={"seat": 1, **cursor}).refused(ErrorCode.INVALID_CURSOR, "cursor")
    api.get(f"/job/{job}/logs", query={"seat": 3}).refused(
        ErrorCode.INVALID_VALUE, "seat", remedy="The nodes are 0 to 2."
    )
    other = api.submit()["id"]
    api.get(f"/job/{other}/logs", query={"seat": 0}).refused(ErrorCode.NOT_ELASTIC, "seat", remedy="Omit seat.")


def test_pages_list_all_outputs(api: Api, job: str) -> None:
    names = [f"part-{number}.bin" for number in range(4)]
    claim(api)[1].complete(dict.fromkeys(names, b"weights"), step=1).ok()
    for limit in (1, 3, 4):
        found, cursor = [], {}
        while cursor is not None:
            page = api.get(f"/job/{job}/artifacts", query={"limit": limit, **cursor}).ok()
            found += [one["path"] for one in page["artifacts"]]
            cursor = {"cursor": page["next_cursor"]} if page["next_cursor"] else None
        assert found == names


def test_reports_of_a_node_are_events_of_the_job(api: Api, job: str) -> None:
    """The seat itself has no history, and the bus receives no event of a hidden job."""
    nodes = claim(api, 2)
    fired = {"number": 1, "type": "rule.fired", "rule": "preset-stuck", "step": 7, "at": NOW, "message": "no step"}
    for _ in range(2):
        nodes[1].report(decisions=[fired]).ok()
    cleared = {**fired, "number": 2, "type": "rule.cleared"}
    nodes[1].fail(control={"rules_revision": 0, "commands_seq": 0, "decisions": [fired, cleared]}).ok()
    seat, epoch = (nodes[1].item["world"][name] for name in ("seat", "epoch"))
    events = [one for one in api.get(f"/job/{job}/events").ok() if one["type"].startswith("rule.")]
    assert [(one["type"], one["epoch"], one["data"]["seat"], one["data"]["number"]) for one in events] == [
        ("rule.fired", epoch, seat, 1),
        ("rule.cleared", epoch, seat, 2),
    ]
    assert [one.type for held in nodes for one in api.context.jobs.history(Event, held.id, limit=9).items] == []


def test_submissions_that_are_refused(api: Api, job: str) -> None:
    with api.unchanged():
        flat = {"instance_prompt": "dog", "instance_data_prefix": "dogs/", "max_train_steps": 2, "nodes": NODES}
        api.post("/job", flat).refused(ErrorCode.UNKNOWN_FIELD, "nodes")
        crossed = {"command": ["train"], "nodes": {"min": 3, "max": 2}}
        error = api.post("/job", crossed).refused(ErrorCode.INVALID_VALUE, "nodes")
        assert "'min' is 3, which is above 'max' (2)" in error["message"]
        many = {"jobs": [{"command": ["train"], "nodes": {"max": 64}}] * 5}
        api.post("/jobs/batch", many).refused(ErrorCode.INVALID_VALUE, "jobs", remedy="several batches")
        large = {"command": ["train"], "parameters": {"p": "x" * 30_000}, "environment": {}, "nodes": {"max": 64}}
        large["environment"] = {f"E{n}": "x" * 4000 for n in range(10)}
        api.post("/job", large).refused(ErrorCode.PAYLOAD_TOO_LARGE, "nodes")


def test_the_stored_files_of_all_nodes_are_listed_while_they_train(api: Api, job: str) -> None:
    nodes = claim(api, 2)
    for number, held in enumerate(nodes):
        held.store_artifacts({f"step-{number}.png": b"picture", "model.bin": b"weights"})
    whole = api.get(f"/job/{job}/artifacts").ok()
    first, second = (int(held.item["world"]["seat"]) for held in nodes)
    expected = [(first, "model.bin"), (first, "step-0.png"), (second, "model.bin"), (second, "step-1.png")]
    assert [(one["seat"], one["path"]) for one in whole["artifacts"]] == expected
    assert (whole["final"], whole["next_cursor"], {one["epoch"] for one in whole["artifacts"]}) == (False, None, {1})
    assert api.send("GET", whole["artifacts"][3]["url"]).text == "picture"
    for limit in (1, 2, 3):
        found: list[tuple[int, str]] = []
        query: dict[str, Any] = {"limit": limit}
        while query:
            page = api.get(f"/job/{job}/artifacts", query=query).ok()
            found += [(one["seat"], one["path"]) for one in page["artifacts"]]
            query = {"limit": limit, "cursor": page["next_cursor"]} if page["next_cursor"] else {}
        assert found == expected, limit
    foreign = base64.urlsafe_b64encode(b"7/1/model.bin").decode().rstrip("=")
    api.get(f"/job/{job}/artifacts", query={"cursor": f"{job[:8]}.{foreign}"}).refused(
        ErrorCode.INVALID_CURSOR, "cursor"
    )


def test_a_repeated_submission_is_one_job(api: Api) -> None:
    first = api.submit(nodes=NODES, headers={"idempotency-key": "k"})
    claim(api, 1)
    assert api.submit(nodes=NODES, headers={"idempotency-key": "k"})["id"] == first["id"]
    api.post("/job", {"command": ["train"], "nodes": {"max": 3}}, headers={"idempotency-key": "k"}).refused(
        ErrorCode.IDEMPOTENCY_MISMATCH, "idempotency-key"
    )
    assert len(seats(api, first["id"])) == 3


def test_stop_and_retry(api: Api, job: str) -> None:
    nodes = claim(api, 2)
    assert api.post(f"/job/{job}/stop", {"message": "wrong data"}).ok()["state"] == "canceled"
    assert states(api, job) == ["canceled"] * 3
    assert {seat.reason.code for seat in seats(api, job) if seat.reason} == {"world_ended"}
    assert api.job(job)["reason"] == {"code": "canceled_by_user", "message": "wrong data"}
    assert nodes[0].heartbeat().ok()["directive"] == "cancel"
    api.post(f"/job/{job}/stop").refused(ErrorCode.JOB_CANCELED)
    assert api.post(f"/job/{job}/retry").ok()["state"] == "pending"
    assert states(api, job) == ["pending"] * 3
    fresh = claim(api)
    assert [one.item["world"]["epoch"] for one in sorted(fresh, key=lambda one: one.item["world"]["epoch"])] == [
        3,
        4,
        5,
    ]
    view = api.job(job)
    assert (view["state"], view["counters"]["attempts"], view["counters"]["runtime_s"]) == ("running", 5, 0)
    nodes[0].complete().refused(ErrorCode.LEASE_LOST, "x-lease-token")


def test_pause_and_resume(api: Api, job: str) -> None:
    nodes = claim(api, 2)
    assert api.post(f"/job/{job}/pause").ok()["state"] == "running"
    assert sorted(states(api, job)) == ["paused", "running", "running"]
    for node in nodes:
        assert node.heartbeat().ok()["directive"] == "pause"
        assert api.job(job)["state"] == "running"
        node.release(reason="pause").ok()
    view = api.job(job)
    assert (view["state"], view["reason"]["code"], states(api, job)) == ("paused", "paused_by_user", ["paused"] * 3)
    api.no_work()
    api.post(f"/job/{job}/pause").refused(ErrorCode.ILLEGAL_TRANSITION)
    assert api.post(f"/job/{job}/resume").ok()["state"] == "pending"
    assert states(api, job) == ["pending"] * 3
    (node,) = claim(api, 1)
    api.post(f"/job/{job}/pause").ok()
    assert api.post(f"/job/{job}/resume").ok()["state"] == "running"
    assert node.heartbeat().ok()["directive"] == "continue"
    assert sorted(states(api, job)) == ["pending", "pending", "running"]
    assert api.post(f"/job/{job}/pause").ok()["state"] == "running"
    node.complete().ok()
    assert api.job(job)["state"] == "complete"


ANYWHERE = {"backoff_s": 0, "avoid_machine_s": 0}


def test_a_script_that_fails_on_every_node_fails_the_job(api: Api) -> None:
    job = api.submit(nodes=NODES, policy={"max_failures": 2, **ANYWHERE})["id"]
    for _ in range(2):
        for node in claim(api, 3):
            assert api.job(job)["state"] == "running"
            node.fail(message="no such file").ok()
    view = api.job(job)
    assert (view["state"], view["reason"]["code"], view["failed_at"]) == ("failed", "failure_cap", NOW)
    assert view["reason"]["message"] == (
        "its 3 nodes failed without committing a checkpoint, 6 times; the policy allows 2 for each"
    )
    assert states(api, job) == ["canceled"] * 3
    api.post(f"/job/{job}/retry", {"reset_counters": False}).ok()
    assert states(api, job) == ["pending"] * 3 and api.job(job)["counters"]["failures"] == 6


@pytest.mark.parametrize(("failure", "counter"), [("script_error", "failures"), ("disk_full", "node_faults")])
def test_one_node_that_fails_again_and_again_does_not_fail_a_training_that_goes_on(
    api: Api, failure: str, counter: str
) -> None:
    job = api.submit(nodes=NODES, policy={"max_failures": 1, "max_node_faults": 1, **ANYWHERE})["id"]
    steady, flaky = claim(api, 2)
    for step in range(1, 7):
        flaky.fail(failure_class=failure, message="x").ok()
        steady.commit(step).ok()
        flaky = api.claim(machine_id="m-9")
    view = api.job(job)
    assert (view["state"], view["counters"][counter]) == ("running", 6)
    for node in (flaky, steady, *claim(api, 1)):
        node.fail(failure_class=failure, message="x").ok()
    assert api.job(job)["state"] == "failed"


def test_lost_machines(api: Api) -> None:
    job = api.submit(nodes={"min": 1, "max": 2}, policy={"max_fruitless_interruptions": 2})["id"]
    for round_ in range(2):
        for node in claim(api, 2):
            node.heartbeat().ok()
        api.clock.advance(1000)
        assert api.sweep().reclaimed == 2
        assert api.job(job)["counters"]["interruptions"] == 2 * (round_ + 1)
    view = api.job(job)
    assert (view["state"], view["reason"]["code"]) == ("failed", "fruitless_interruption_cap")


def test_a_recovered_attempt(api: Api, job: str) -> None:
    (node,) = claim(api, 1)
    api.clock.advance(1000)
    assert api.sweep().reclaimed == 1 and api.job(job)["state"] == "pending"
    node.heartbeat().ok()
    api.sweep()
    assert api.job(job)["state"] == "running" and api.job(job)["epoch"] == 1
    assert [type_ for type_, _ in tell(api, job)][-2:] == ["attempt.interrupted", "attempt.recovered"]


def test_a_deadline_ends_job_and_seats(api: Api) -> None:
    job = api.submit(nodes=NODES, policy={"deadline_at": NOW + 100})["id"]
    (node,) = claim(api, 1)
    for seconds in (60, 40):
        api.clock.advance(seconds)
        node.heartbeat().ok()
    api.sweep()
    view = api.job(job)
    assert (view["state"], view["reason"]["code"]) == ("failed", "deadline")
    assert all(one.state.terminal for one in seats(api, job)) and not api.events(job).count("job.canceled")
    assert node.heartbeat().ok()["directive"] == "cancel"


def test_late_retention_is_the_jobs(api: Api, job: str) -> None:
    claim(api, 1)
    api.post(f"/job/{job}/stop").ok()
    assert api.context.jobs.get(job).retention_at == NOW + LATE_AFTER_S  # type: ignore[union-attr]
    assert {seat.retention_at for seat in seats(api, job)} == {None}
    assert api.context.jobs.due_retentions(NOW + LATE_AFTER_S, limit=9) == [job]


def test_rules_on_a_group_end_an_elastic_job_and_copy_none(api: Api) -> None:
    job = api.submit(nodes=NODES, tags={"group": "g"})["id"]
    (node,) = claim(api, 1)
    for delta, queue in ((1, "up"), (-1, "down")):
        rule = f"{{name: r, when: wall > 1m, on: heartbeat, do: {{scale: {{group: g, delta: {delta}}}}}}}"
        api.submit(queue=queue, rules=f"rules: [{rule}]")
    up, down = (api.claim(queue=queue, machine_id=queue) for queue in ("up", "down"))
    api.clock.advance(70)
    up.heartbeat(step=1).ok()
    failed = next(one for one in api.get(f"/job/{up.id}/events").ok() if one["type"] == "action.rejected")
    assert "have nodes, and no rule copies such jobs" in failed["data"]["message"]
    down.heartbeat(step=1).ok()
    assert (api.job(job)["state"], api.job(job)["reason"]["code"]) == ("canceled", "canceled_by_rule")
    api.sweep()
    assert states(api, job) == ["canceled"] * 3 and len(api.get("/jobs").ok()) == 3
    assert node.heartbeat().ok()["directive"] == "cancel"


DEATHS = [(write, behind) for write in range(1, 9) for behind in (False, True)]


@pytest.mark.parametrize(("dies_at", "behind"), DEATHS)
@pytest.mark.parametrize("call", ["claim", "complete", "fail", "release", "stop", "pause", "retry", "sweep"])
def test_functions_that_die_at_any_write(call: str, dies_at: int, behind: bool) -> None:
    """The next sweep finishes what a function that died has begun."""
    api = memory_api()
    assert api.memory is not None
    store = MortalJobs(api.memory.state)
    api.context = dataclasses.replace(api.context, jobs=store)
    job = api.submit(nodes=NODES, policy={"max_failures": 1})["id"]
    nodes = claim(api, 2)
    if call == "retry":
        api.post(f"/job/{job}/stop").ok()
    if call == "sweep":
        api.clock.advance(1000)
    run: dict[str, Callable[[], object]] = {
        "claim": lambda: api.claim(machine_id="m-9"),
        "complete": nodes[0].complete,
        "fail": nodes[0].fail,
        "release": nodes[0].release,
        "sweep": api.sweep,
    }
    store.dies_at, store.behind = dies_at, behind
    with contextlib.suppress(Died):
        run.get(call, lambda: api.post(f"/job/{job}/{call}"))()
    store.dies_at = 0
    swept: SweepResult = api.sweep()
    assert not swept.more
    check_agreement(api, job)


def test_the_list_shows_the_progress_of_the_longest_running_node(api: Api, job: str) -> None:
    first, second = api.claim(machine_id="m-0"), api.claim(machine_id="m-1")
    second.heartbeat(step=12, total_steps=30, metrics={"loss": 0.5}).ok()
    (listed,) = api.get("/jobs", query={"limit": 10}).ok()["jobs"]
    assert listed["progress"] is None
    first.heartbeat(step=11, total_steps=30, metrics={"loss": 0.6}).ok()
    (listed,) = api.get("/jobs", query={"limit": 10}).ok()["jobs"]
    assert (listed["id"], listed["progress"]["step"], listed["progress"]["metrics"]) == (job, 11, {"loss": 0.6})
    first.release().ok()
    (listed,) = api.get("/jobs", query={"limit": 10}).ok()["jobs"]
    assert listed["progress"]["step"] == 12
