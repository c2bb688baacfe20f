"""The world's calls: three machines join one training, one is lost, another comes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.contract.errors import ErrorCode
from functions.domain.errors import WriteConflict
from functions.domain.jobs.transaction import Transaction
from tests.functional.api.calls import PROGRAM
from tests.kits.api.harness import NO_JOB, Answer, Api, Held


@pytest.fixture
def nodes(api: Api) -> list[Held]:
    """Claimed seats of an elastic job, by seat."""
    api.submit(nodes={"min": 2, "max": 3})
    held = [api.claim(machine_id=f"m-{number}") for number in range(3)]
    return sorted(held, key=lambda one: int(one.item["world"]["seat"]))


def job_of(nodes: list[Held]) -> str:
    return str(nodes[0].item["world"]["job"])


def name(nodes: list[Held], seat: int) -> str:
    return f"{seat}.{nodes[seat].epoch}.0000000{seat}"


def join(nodes: list[Held], seat: int, **more: object) -> Answer:
    body = {"node": name(nodes, seat), "program": PROGRAM, "addresses": [f"203.0.113.{seat}:47100"], **more}
    return nodes[seat].post(f"/job/{nodes[seat].id}/world/join", body)


def propose(nodes: list[Held], seat: int, epoch: int, *members: int, **more: object) -> Answer:
    body = {"node": name(nodes, seat), "epoch": epoch, "members": [name(nodes, one) for one in members], **more}
    return nodes[seat].post(f"/job/{nodes[seat].id}/world/epoch", body)


def test_machines_come_and_go(api: Api, nodes: list[Held]) -> None:
    assert api.get(f"/job/{job_of(nodes)}/world").ok()["state"] == "forming"
    for seat in (0, 1):
        join(nodes, seat).ok()
    with api.unchanged():
        join(nodes, 1).ok()
    formed = propose(nodes, 1, 0, 1, 0).ok()
    assert (formed["epoch"], formed["state"], [one["seat"] for one in formed["nodes"]]) == (1, "training", [1, 0])
    join(nodes, 2, ready=False).ok()
    seen = api.get(f"/job/{nodes[0].id}/world", headers=nodes[0].headers, key="worker").ok()
    assert [(one["seat"], one["member"], one["ready"]) for one in seen["nodes"]] == [
        (1, True, True),
        (0, True, True),
        (2, False, False),
    ]
    assert seen["nodes"][2]["addresses"] == ["203.0.113.2:47100"] and seen["nodes"][2]["machine_id"].startswith("m-")
    propose(nodes, 0, 1, 1, 0, 2).refused(ErrorCode.WORLD_CHANGED, "members")
    join(nodes, 2, round=4).ok()
    assert propose(nodes, 0, 1, 1, 0, 2, round=4).ok()["epoch"] == 2
    propose(nodes, 2, 1, 1, 2).refused(ErrorCode.WORLD_CHANGED, "epoch")
    propose(nodes, 2, 2, 2).refused(ErrorCode.NO_MAJORITY, "members")
    nodes[1].release().ok()
    lost = {"lost": [{"node": name(nodes, 1), "cause": "left"}]}
    assert [one["seat"] for one in propose(nodes, 2, 2, 0, 2, **lost).ok()["nodes"]] == [0, 2]
    round_ = {"round": 5, "epoch": 3, "contributors": 2, "repaired": 7}
    report = {"node": name(nodes, 0), "epoch": 3, "rounds": [round_]}
    for _ in range(2):
        nodes[0].post(f"/job/{nodes[0].id}/world/report", report).ok()
    assert api.get(f"/job/{job_of(nodes)}/world").ok()["round"] == 5
    events = [one for one in api.get(f"/job/{job_of(nodes)}/events").ok() if one["type"].startswith("world.")]
    assert [(one["type"], one["data"]) for one in events] == [
        ("world.joined", {"world_epoch": 1, "round": 0, "members": [1, 0], "joined": [1, 0]}),
        ("world.joined", {"world_epoch": 2, "round": 4, "members": [1, 0, 2], "joined": [2]}),
        ("world.lost", {"world_epoch": 3, "round": 0, "members": [0, 2], "lost": [{"seat": 1, "cause": "left"}]}),
        ("world.repaired", {"world_epoch": 3, "round": 5, "repaired": 7}),
    ]


def test_slow_rounds_are_told_with_their_remedies(api: Api, nodes: list[Held]) -> None:
    for seat in (0, 1):
        join(nodes, seat).ok()
    propose(nodes, 0, 0, 0, 1).ok()
    times = {"round_s": 80.0, "reduce_s": 40.0, "sent_bytes": 20_000_000}
    for number, told in ((2, False), (3, True)):
        rounds = [{"round": at, "epoch": 1, "contributors": 2, **times} for at in range(1, number + 1)]
        report = {"node": name(nodes, 0), "epoch": 1, "rounds": rounds}
        nodes[0].post(f"/job/{nodes[0].id}/world/report", report).ok()
        advice = api.get(f"/job/{job_of(nodes)}/world").ok()["advice"]
        assert advice.startswith("The reduces take 50% of the time, at 4 Mbit/s. Remedies:") is told, advice
    assert "times the inner_steps" in advice and "codec int4" in advice


def test_an_operator_excludes_nodes_without_a_majority(api: Api, nodes: list[Held]) -> None:
    job = job_of(nodes)
    path = f"/job/{job}/world/exclude"
    remedy = "Name members of the present epoch, as `baton world` shows the members."
    api.post(path, {"seats": [0]}).refused(ErrorCode.NOT_A_MEMBER, "seats", remedy=remedy)
    for seat in range(3):
        join(nodes, seat).ok()
    propose(nodes, 0, 0, 0, 1, 2).ok()
    with api.unchanged():
        error = api.post(path, {"seats": [0, 3]}).refused(ErrorCode.NOT_A_MEMBER, "seats", remedy=remedy)
        assert "the members are: 0, 1, 2" in error["message"]
        api.post(path, {"seats": [0]}, key="worker").refused(ErrorCode.WRONG_SCOPE, "x-api-key")
        api.post(f"/job/{nodes[0].id}/world/exclude", {"seats": [0]}).refused(
            ErrorCode.JOB_NOT_FOUND, "id", remedy=f"Call with the id {job}."
        )
    after = api.post(path, {"seats": [0, 1]}).ok()
    assert (after["epoch"], [one["seat"] for one in after["nodes"]]) == (2, [2])
    propose(nodes, 0, 1, 0, 1).refused(ErrorCode.WORLD_CHANGED, "epoch")
    join(nodes, 0).ok()
    assert propose(nodes, 2, 2, 2, 0).ok()["epoch"] == 3
    lost = [one["data"]["lost"] for one in api.get(f"/job/{job}/events").ok() if one["type"] == "world.lost"]
    assert lost == [[{"seat": 0, "cause": "excluded_by_operator"}, {"seat": 1, "cause": "excluded_by_operator"}]]
    api.post(f"/job/{job}/stop").ok()
    api.post(path, {"seats": [2]}).refused(ErrorCode.JOB_FINISHED, "id")


def test_an_exclusion_that_meets_another_write_is_decided_again(
    api: Api, nodes: list[Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, apply, meanwhile = job_of(nodes), api.context.jobs.apply, [2]
    for seat in (0, 1):
        join(nodes, seat).ok()
    propose(nodes, 0, 0, 0, 1).ok()

    def overtaken(change: Transaction) -> object:
        if meanwhile:
            seat = meanwhile.pop()
            join(nodes, seat).ok()
            propose(nodes, 0, 1, 0, 1, seat).ok()
        return apply(change)

    monkeypatch.setattr(api.context.jobs, "apply", overtaken)
    after = api.post(f"/job/{job}/world/exclude", {"seats": [1, 1]}).ok()
    assert (after["epoch"], [one["seat"] for one in after["nodes"]]) == (3, [0, 2])
    after = api.post(f"/job/{job}/world/exclude", {"seats": [0, 2]}).ok()
    assert (after["epoch"], after["state"], after["nodes"]) == (4, "forming", [])
    with api.unchanged():
        api.post(f"/job/{job}/world/exclude", {"seats": [64]}).refused(ErrorCode.INVALID_VALUE, "seats.0")
    for seat in (0, 1):
        join(nodes, seat).ok()
    assert propose(nodes, 1, 4, 0, 1).ok()["epoch"] == 5


def test_another_program_names_the_first_difference(api: Api, nodes: list[Held]) -> None:
    tensor = {"name": "head", "dtype": "float32", "shape": [2]}
    join(nodes, 0, program={**PROGRAM, "tensors": [tensor]}).ok()
    other = {**PROGRAM, "model_sha256": "00" * 32, "tensors": [{**tensor, "shape": [3]}]}
    error = join(nodes, 1, program=other).refused(ErrorCode.WORLD_MISMATCH, "program")
    assert "head (float32, 3), the world's is head (float32, 2)" in error["message"]
    nodes[0].release().ok()
    assert join(nodes, 1, program=other).ok()["program"]["model_sha256"] == "00" * 32


def test_callers_without_a_seat(api: Api, nodes: list[Held]) -> None:
    api.submit(queue="other")
    other = api.claim(queue="other")
    body = {"node": "0.1.00000000", "program": PROGRAM}
    other.post(f"/job/{other.id}/world/join", body).refused(ErrorCode.NOT_ELASTIC, "id")
    other.post(f"/job/{job_of(nodes)}/world/join", body).refused(
        ErrorCode.NOT_ELASTIC, "id", remedy="Call with the id of the claimed job."
    )
    api.get(f"/job/{other.id}/world").refused(ErrorCode.NOT_ELASTIC, "id")
    api.get(f"/job/{job_of(nodes)}/world", key="worker").refused(ErrorCode.WRONG_SCOPE, "x-api-key")
    api.get(f"/job/{job_of(nodes)}/world", key="rival_submit").refused(ErrorCode.JOB_NOT_FOUND, "id")
    api.get(f"/job/{NO_JOB}/world").refused(ErrorCode.JOB_NOT_FOUND, "id")


@pytest.mark.parametrize("path", ["", "/join", "/epoch", "/report", "/relay", "/data"])
def test_every_call_needs_the_live_lease_of_the_seat(api: Api, nodes: list[Held], path: str) -> None:
    node, me = nodes[0], name(nodes, 0)
    body = {
        "/join": {"node": me, "program": PROGRAM},
        "/epoch": {"node": me, "epoch": 0, "members": [me]},
        "/report": {"node": me, "epoch": 0},
        "/relay": {"node": me, "calls": True},
        "/data": {"node": me, "plan_sha256": "9f" * 32},
    }.get(path)

    def call(token: str | None) -> Answer:
        headers = {} if token is None else {"x-lease-token": token}
        method = "GET" if body is None else "POST"
        return api.call(method, f"/job/{node.id}/world{path}", body, headers=headers, key="worker")

    with api.unchanged():
        call("x" * 43).refused(ErrorCode.LEASE_LOST, "x-lease-token")
        call(nodes[1].token).refused(ErrorCode.LEASE_LOST, "x-lease-token")
        call(None).refused(ErrorCode.JOB_NOT_FOUND, "id", remedy=f"Call with the id {job_of(nodes)}.")
        api.clock.advance(90)
        call(node.token).refused(ErrorCode.LEASE_EXPIRED, "x-lease-token")


def test_of_two_proposals_at_once_one_is_accepted(api: Api, nodes: list[Held], monkeypatch: pytest.MonkeyPatch) -> None:
    for seat in range(3):
        join(nodes, seat).ok()
    propose(nodes, 0, 0, 0, 1, 2).ok()
    between(api, monkeypatch, lambda: propose(nodes, 1, 1, 0, 1).ok())
    propose(nodes, 0, 1, 0, 2).refused(ErrorCode.WORLD_CHANGED, "epoch")


def test_a_lease_that_ends_before_the_write_refuses_it(
    api: Api, nodes: list[Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    between(api, monkeypatch, lambda: nodes[0].release().ok())
    join(nodes, 0).refused(ErrorCode.LEASE_LOST)
    assert api.get(f"/job/{job_of(nodes)}/world").ok()["nodes"] == []


def between(api: Api, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Make `call` between the decision and the first write of the next call."""
    write = api.context.jobs.apply

    def apply(change: Transaction) -> None:
        monkeypatch.undo()
        call()
        write(change)

    monkeypatch.setattr(api.context.jobs, "apply", apply)


def test_a_world_that_others_change_all_the_time(api: Api, nodes: list[Held], monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(_: Transaction) -> None:
        raise WriteConflict

    monkeypatch.setattr(api.context.jobs, "apply", apply)
    join(nodes, 0).refused(ErrorCode.CONFLICT)
