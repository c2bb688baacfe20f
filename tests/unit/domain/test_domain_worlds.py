"""Test who may join a world, which epoch may follow, and which refusal names what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.elastic.world import (
    EpochProposal,
    JoinRequest,
    NodeProgram,
    NodeReport,
    RoundReport,
    TensorShape,
    WorldReport,
)
from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal
from functions.domain.records import Lease
from functions.domain.seat_records import Seat
from functions.domain.worlds import membership
from functions.domain.worlds.world_record import WorldRecord, view_world
from tests.kits.api.factories import JOB_ID, NOW, make_lease

HEAD = TensorShape(name="head.weight", dtype="float32", shape=[256, 64])
PROGRAM = NodeProgram(
    torch="2.13.0",
    engine="wire",
    codec="int8",
    parameters=64,
    model_sha256="9f" * 32,
    tensors=[HEAD],
    settings={"outer_lr": 0.7},
)
A, B, C, D = (f"{seat}.1.0000000{seat}" for seat in range(4))
LEASES = {seat: make_lease(machine_id=f"m-{seat}") for seat in range(4)}
CLOSED = {"closed": "interrupted"}


def seat_of(node: str) -> Seat:
    return Seat(job=JOB_ID, seat=int(node.split(".", maxsplit=1)[0]), min=2, max=4)


def joined(world: WorldRecord | None, node: str, leases: dict[int, Lease] | None = None, **more: Any) -> WorldRecord:
    request = JoinRequest(**{"node": node, "program": PROGRAM, **more})
    leases = leases or LEASES
    seat = seat_of(node)
    after = membership.join(world, request, seat, leases[seat.seat], leases, tensors=[HEAD])
    return after or world or WorldRecord(version=0)


def proposed(
    world: WorldRecord | None, by: str, members: list[str], leases: dict[int, Lease] | None = None, **more: Any
) -> WorldRecord | None:
    epoch = world.epoch if world else 0
    proposal = EpochProposal(**{"node": by, "epoch": epoch, "members": members, "round": 7, **more})
    leases = leases or LEASES
    seat = seat_of(by)
    return membership.propose(world, proposal, seat, leases[seat.seat], leases, now=NOW)


def formed(*nodes: str) -> WorldRecord:
    world: WorldRecord | None = None
    for node in nodes:
        world = joined(world, node)
    world = proposed(world, nodes[0], list(nodes))
    assert world is not None
    return world


def ended(*seats: int) -> dict[int, Lease]:
    """All leases; those of `seats` were revoked."""
    return {seat: one.model_copy(update=CLOSED if seat in seats else {}) for seat, one in LEASES.items()}


def refused(code: ErrorCode, field: str, call: Any) -> str:
    with pytest.raises(Refusal) as caught:
        call()
    assert (caught.value.code, caught.value.field) == (code, field), caught.value
    return caught.value.message


def members(world: WorldRecord | None) -> list[str]:
    assert world is not None
    return [one.node for one in world.members]


def test_the_first_formation_waits_for_the_least_number_of_ready_nodes() -> None:
    world = joined(None, A)
    assert "1 nodes" in refused(ErrorCode.NO_MAJORITY, "members", lambda: proposed(world, A, [A]))
    world = joined(world, B, ready=False)
    assert "not ready" in refused(ErrorCode.WORLD_CHANGED, "members", lambda: proposed(world, A, [A, B]))
    after = proposed(joined(world, B, round=7), A, [A, B])
    assert after is not None and (after.epoch, after.round, members(after), after.joining) == (1, 7, [A, B], [])
    assert [one.joined_at for one in after.members] == [NOW, NOW] and after.members[1].machine_id == "m-1"


def test_a_repeated_join_changes_nothing_and_a_new_process_replaces_the_joining_node() -> None:
    world = joined(joined(None, A), B)
    again = joined(world, A)
    assert again == world
    restarted = joined(world, "0.1.ffffffff", addresses=["203.0.113.7:47100"])
    assert [one.node for one in restarted.joining] == ["0.1.ffffffff", B] and restarted.version == world.version + 1
    other = membership.join(world, JoinRequest(node=B, program=PROGRAM), seat_of(B), LEASES[1], ended(0))
    assert other is not None and [one.node for one in other.joining] == [B]


@pytest.mark.parametrize("node", ["1.1.00000000", "0.2.00000000"])
def test_a_node_of_another_seat_or_attempt(node: str) -> None:
    request = JoinRequest(node=node, program=PROGRAM)
    refused(ErrorCode.INVALID_VALUE, "node", lambda: membership.join(None, request, seat_of(A), LEASES[0], LEASES))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"torch": "2.14.0"}, "torch is '2.14.0', the world's is '2.13.0'"),
        ({"codec": "fp32"}, "codec is 'fp32'"),
        ({"settings": {"outer_lr": 0.5}}, "the setting outer_lr is 0.5, the world's is 0.7"),
        (
            {"model_sha256": "00" * 32, "tensors": [HEAD.model_copy(update={"shape": [1]})]},
            "head.weight (float32, 1), the world's is head.weight (float32, 256x64)",
        ),
        ({"model_sha256": "00" * 32, "parameters": 65}, "65 trained values"),
    ],
)
def test_another_program_is_refused_until_no_other_node_is_left(change: dict[str, Any], named: str) -> None:
    world, other = formed(A, B), PROGRAM.model_copy(update=change)
    assert named in refused(ErrorCode.WORLD_MISMATCH, "program", lambda: joined(world, C, program=other))
    anew = joined(world, C, ended(0, 1), program=other)
    assert anew.program == other.model_copy(update={"tensors": []})


@pytest.mark.parametrize(
    ("by", "kept", "gone", "accepted"),
    [
        (A, [A, B, C], (), True),
        (A, [A, B], (), True),
        (D, [C, D], (), False),
        (B, [B], (), False),
        (D, [D], (0, 1, 2), True),
        (D, [C, D], (0,), True),
        (C, [C, D], (0, 1), True),
        (D, [D], (0, 1), False),
        (C, [C], (0, 1), True),
        (A, [B, C], (), True),
        (A, [C, D], (), True),
        (A, [B], (2, 3), True),
        (A, [D], (), False),
    ],
)
def test_majority(by: str, kept: list[str], gone: tuple[int, ...], accepted: bool) -> None:
    """More than half of the members that go on stay, or half with the first; a leaving proposer does not count."""
    world = formed(A, B, C, D)
    if accepted:
        assert members(proposed(world, by, kept, ended(*gone))) == kept
    else:
        refused(ErrorCode.NO_MAJORITY, "members", lambda: proposed(world, by, kept, ended(*gone)))


def test_an_expired_lease_that_no_sweep_has_revoked_counts() -> None:
    """All leases run out during an outage, after which the first caller must not take over the world."""
    leases = {seat: one.model_copy(update={"expires_at": NOW}) for seat, one in LEASES.items()}
    refused(ErrorCode.NO_MAJORITY, "members", lambda: proposed(formed(A, B, C), C, [C], leases))


def test_a_member_whose_process_restarted_is_lost() -> None:
    world = joined(formed(A, B), "0.1.ffffffff")
    assert members(proposed(world, B, [B, "0.1.ffffffff"])) == [B, "0.1.ffffffff"]
    refused(ErrorCode.NOT_A_MEMBER, "node", lambda: proposed(world, A, [A, B]))
    refused(ErrorCode.INVALID_VALUE, "members", lambda: proposed(world, B, [A, B, "0.1.ffffffff"]))


def test_joining_nodes_form_the_world_anew_after_the_loss_of_all_members() -> None:
    world, again = formed(A, B), {0: make_lease(2), 1: make_lease(2)}
    first, second = "0.2.aaaaaaaa", "1.2.bbbbbbbb"
    leases = {**ended(0, 1), **again}
    world = joined(joined(world, first, leases), second, leases)
    refused(ErrorCode.NO_MAJORITY, "members", lambda: proposed(world, first, [first], leases))
    refused(ErrorCode.INVALID_VALUE, "members", lambda: proposed(world, first, [A, first, second], leases))
    refused(ErrorCode.INVALID_VALUE, "members", lambda: proposed(world, first, [second], leases))
    # The other node has vanished since the proposer's view of the world.
    refused(ErrorCode.WORLD_CHANGED, "members", lambda: proposed(world, first, [first, "2.1.cccccccc"], leases))
    after = proposed(world, second, [second, first], leases, round=3)
    assert after is not None and (after.epoch, members(after), after.round) == (2, [second, first], 3)


@pytest.mark.parametrize(
    ("by", "named", "epoch", "code", "field"),
    [
        (A, [A, B, C], 0, ErrorCode.WORLD_CHANGED, "epoch"),
        (C, [A, B, C], 1, ErrorCode.NOT_A_MEMBER, "node"),
        (D, [A, B, D], 1, ErrorCode.NOT_A_MEMBER, "node"),
        (A, [A, B, D], 1, ErrorCode.WORLD_CHANGED, "members"),
        (A, [B, A, C], 1, ErrorCode.INVALID_VALUE, "members"),
        (A, [A, C, B], 1, ErrorCode.INVALID_VALUE, "members"),
        (A, [A, A, B], 1, ErrorCode.INVALID_VALUE, "members"),
        (A, [A, B, C, C], 1, ErrorCode.INVALID_VALUE, "members"),
    ],
)
def test_wrong_proposals(by: str, named: list[str], epoch: int, code: ErrorCode, field: str) -> None:
    """C is joining; D has not joined."""
    world = joined(formed(A, B), C)
    refused(code, field, lambda: proposed(world, by, named, epoch=epoch))


def test_a_repeated_proposal_is_accepted_and_another_one_is_not() -> None:
    world = formed(A, B)
    assert proposed(world, A, [A, B], epoch=0) is None
    refused(ErrorCode.WORLD_CHANGED, "epoch", lambda: proposed(world, A, [A], epoch=0))


def test_a_joining_node_whose_attempt_has_ended_is_dropped_and_never_admitted() -> None:
    world = joined(joined(formed(A, B), C), D)
    refused(ErrorCode.WORLD_CHANGED, "members", lambda: proposed(world, A, [A, B, C], ended(2)))
    expired = {**LEASES, 2: make_lease(expires_at=NOW)}
    refused(ErrorCode.WORLD_CHANGED, "members", lambda: proposed(world, A, [A, B, C], expired))
    after = proposed(world, A, [A, B], ended(2))
    assert after is not None and [one.node for one in after.joining] == [D]


def test_reports() -> None:
    def reported(world: WorldRecord, *rounds: int, by: str = A, **more: Any) -> WorldRecord:
        found = [RoundReport(round=number, epoch=1, contributors=2) for number in rounds]
        body = WorldReport(**{"node": by, "epoch": 1, "rounds": found, **more})
        return membership.report(world, body, seat_of(by), LEASES[int(by[0])])

    world = joined(formed(A, B), C)
    busy = [NodeReport(node=B, state="training", tokens=12, link_mbit_s=480)]
    after = reported(reported(world, 8, 9, nodes=busy), 9, 10)
    assert (after.round, [one.round for one in after.rounds]) == (10, [8, 9, 10])
    assert (after.members[1].state, after.members[1].tokens, after.members[1].link_mbit_s) == ("training", 12, 480)
    assert len(reported(world, *range(8, 60)).rounds) == membership.MAX_ROUNDS
    assert after.members[1].recent_tokens == [12], "the second report does not name the node"
    for number in range(11, 22):
        shown = [NodeReport(node=node, state="training", tokens=number) for node in (B, C)]
        after = reported(reported(after, number, nodes=shown), number, nodes=shown)
    assert [one.recent_tokens for one in (*after.members, *after.joining)] == [[], [*range(14, 22)], []]
    refused(ErrorCode.NOT_A_MEMBER, "node", lambda: reported(world, by=C))
    refused(ErrorCode.WORLD_CHANGED, "epoch", lambda: reported(world, epoch=2))
    after = reported(world, 8, 9)
    back = proposed(after, A, [A], round=8)
    assert back is not None and (back.round, [one.round for one in back.rounds]) == (8, [8])


def test_the_view() -> None:
    world = joined(formed(A, B), C, addresses=["203.0.113.7:47100"])
    view = view_world(JOB_ID, world, ended(1), least=2, most=4, now=NOW)
    assert (view.state, [one.node for one in view.members], [one.node for one in view.joining]) == (
        "training",
        [A, B],
        [C],
    )
    assert [one.lease_live for one in view.nodes] == [True, False, True]
    assert (view.nodes[2].seat, view.nodes[2].addresses) == (2, ["203.0.113.7:47100"])
    assert view.program is not None and view.program.tensors == []
    assert view_world(JOB_ID, world, ended(0, 1), least=2, most=4, now=NOW).state == "forming"
    assert view_world(JOB_ID, None, {}, least=2, most=4, ended=True, now=NOW).state == "ended"
