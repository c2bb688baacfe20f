"""The call that leases shards: nodes hold different shards, and the shards of a lost node come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.contract.elastic.data import MAX_LEASES, DataProgress
from baton.contract.elastic.nodes import MAX_NODES
from baton.contract.errors import ErrorCode
from functions.domain.jobs.transaction import Transaction
from functions.domain.worlds.data_pool import DataRecord
from tests.functional.api.calls import PROGRAM
from tests.kits.api.harness import Answer, Api, Held

PLAN = "9f" * 32


@pytest.fixture
def nodes(api: Api) -> list[Held]:
    """Two members of epoch 1, by seat."""
    api.submit(nodes={"min": 2, "max": 2})
    held = sorted(
        [api.claim(machine_id=f"m-{one}") for one in range(2)], key=lambda one: int(one.item["world"]["seat"])
    )
    for seat in range(2):
        join(held, seat).ok()
    propose(held, 0, 0, 0, 1).ok()
    return held


def name(nodes: list[Held], seat: int) -> str:
    return f"{seat}.{nodes[seat].epoch}.0000000{seat}"


def join(nodes: list[Held], seat: int) -> Answer:
    return nodes[seat].post(f"/job/{nodes[seat].id}/world/join", {"node": name(nodes, seat), "program": PROGRAM})


def propose(nodes: list[Held], seat: int, epoch: int, *members: int) -> Answer:
    body = {"node": name(nodes, seat), "epoch": epoch, "members": [name(nodes, one) for one in members]}
    return nodes[seat].post(f"/job/{nodes[seat].id}/world/epoch", body)


def lease(nodes: list[Held], seat: int, want: int, **more: object) -> Answer:
    body = {"node": name(nodes, seat), "plan_sha256": PLAN, "positions": 12, "epoch": 1, "want": want, **more}
    return nodes[seat].post(f"/job/{nodes[seat].id}/world/data", body)


def test_each_shard_has_one_node_and_a_repeat_returns_the_same_shards(api: Api, nodes: list[Held]) -> None:
    for _ in range(2):
        assert lease(nodes, 0, 2).ok() == {"leases": [[0, 0], [1, 0]], "exhausted": False}
    assert lease(nodes, 1, 2).ok()["leases"] == [[2, 0], [3, 0]]
    pending = {"finished": [[0, 1]], "offsets": [[1, 70]]}
    assert lease(nodes, 0, 2, pending=pending).ok()["leases"] == [[1, 70], [4, 0]]
    committed = {"round": 1, "concluded": True, "trained": pending}
    # Of 11 shards, each of two nodes may hold 2: the other half goes to the node that is faster.
    assert lease(nodes, 1, 4, **committed).ok() == {"leases": [[2, 0], [3, 0]], "exhausted": False}
    # Node 0 has not seen round 1 yet; what the world has committed stays trained.
    assert lease(nodes, 0, 9).ok() == {"leases": [[1, 70], [4, 0]], "exhausted": False}
    # Members of one round may know of different shards that ended without a further batch.
    lease(nodes, 1, 2, round=1, trained={"finished": [[0, 2]]}).ok()
    assert lease(nodes, 0, 2, round=1, trained=pending).ok()["leases"] == [[4, 0], [5, 0]]


def test_users_see_the_shards_and_an_unchanged_world_costs_no_body(api: Api, nodes: list[Held]) -> None:
    job = str(nodes[0].item["world"]["job"])
    answer = api.get(f"/job/{job}/world")
    assert answer.ok()["shards"] is None
    lease(nodes, 0, 2).ok()
    lease(nodes, 1, 2, round=1, concluded=True, trained={"finished": [[0, 1]], "offsets": [[1, 70]]}).ok()
    seen = api.get(f"/job/{job}/world")
    held = {name(nodes, 0): 1, name(nodes, 1): 2}
    assert seen.ok()["shards"] == {"total": 12, "finished": 1, "held": held}
    api.clock.advance(5)
    assert api.get(f"/job/{job}/world", headers={"if-none-match": seen.headers["etag"]}).status == 304
    of_node = api.get(f"/job/{nodes[0].id}/world", headers=nodes[0].headers, key="worker").ok()
    assert of_node["shards"] is None, "a node asks every 2 s and needs no more than the members"


def test_the_shards_of_a_lost_node_return_after_a_round_without_the_node(api: Api, nodes: list[Held]) -> None:
    lease(nodes, 1, 2).ok()
    nodes[1].release().ok()
    # The process of the ended attempt may live on, and contribute until the members exclude the node.
    assert lease(nodes, 0, 1, concluded=True).ok()["leases"] == [[2, 0]]
    propose(nodes, 0, 1, 0).ok()
    partly = {"trained": {"finished": [[0, 1]], "offsets": [[1, 30]]}, "round": 1}
    assert lease(nodes, 0, 3, epoch=2).ok()["leases"] == [[2, 0], [3, 0], [4, 0]]
    assert lease(nodes, 0, 4, epoch=2, concluded=True, **partly).ok()["leases"] == [[1, 30], [2, 0], [3, 0], [4, 0]]


def test_a_world_formed_anew_takes_the_data_of_its_checkpoint(api: Api, nodes: list[Held]) -> None:
    lease(nodes, 0, 2).ok()
    lease(nodes, 0, 0, round=9, concluded=True, trained={"finished": [[0, 5]]}).ok()
    for held in nodes:
        held.release().ok()
    again = sorted(
        [api.claim(machine_id=f"n-{one}") for one in range(2)], key=lambda one: int(one.item["world"]["seat"])
    )
    for seat in range(2):
        join(again, seat).ok()
    propose(again, 0, 1, 0, 1).ok()
    with api.unchanged():
        assert lease(again, 1, 2, epoch=0).ok() == {"leases": [], "exhausted": False}
    resumed = {"epoch": 2, "round": 4, "trained": {"finished": [[0, 3]]}, "plan_sha256": "ab" * 32}
    assert lease(again, 0, 1, **resumed).ok()["leases"] == [[3, 0]]
    refused = lease(again, 1, 1, epoch=2).refused(ErrorCode.DATA_MISMATCH, "plan_sha256")
    assert "the nodes of epoch 2" in refused["message"]


def test_requests_of_other_nodes_and_in_other_orders_are_refused(api: Api, nodes: list[Held]) -> None:
    with api.unchanged():
        lease(nodes, 0, 1, node=name(nodes, 1)).refused(ErrorCode.INVALID_VALUE, "node")
        lease(nodes, 0, 1, trained={"finished": [[3, 4], [0, 2]]}).refused(ErrorCode.INVALID_VALUE, "trained")


def before_the_write(api: Api, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    write = api.context.jobs.apply

    def apply(change: Transaction) -> None:
        monkeypatch.undo()
        call()
        write(change)

    monkeypatch.setattr(api.context.jobs, "apply", apply)


def test_of_two_requests_at_once_each_shard_goes_to_one_node(
    api: Api, nodes: list[Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    before_the_write(api, monkeypatch, lambda: lease(nodes, 1, 2).ok())
    assert lease(nodes, 0, 2).ok()["leases"] == [[2, 0], [3, 0]]


def test_a_lease_that_ends_before_the_write_receives_no_shards(
    api: Api, nodes: list[Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    before_the_write(api, monkeypatch, lambda: nodes[0].release().ok())
    lease(nodes, 0, 2).refused(ErrorCode.LEASE_LOST)
    assert lease(nodes, 1, 2).ok()["leases"] == [[0, 0], [1, 0]]


def test_the_record_of_the_greatest_world_fits_into_an_item() -> None:
    single = [[10**12 - 2 * one, 10**12 - 2 * one + 1] for one in range(MAX_LEASES * MAX_NODES, 0, -1)]
    held = {f"{seat}.999999999.{seat:08x}": single[seat::MAX_NODES] for seat in range(MAX_NODES)}
    trained = DataProgress(finished=single, offsets=[[10**12, 10**12]])
    record = DataRecord(version=1, plan_sha256=PLAN, positions=10**12, trained=trained, leases=held)
    assert len(record.model_dump_json()) < 390 * 1024
