"""Decide the membership of a world: which nodes join, and which epoch follows the present epoch.

Each function takes the world and the leases of the seats as they were read, and returns the next world, or refuses. The
caller writes the world by compare-and-swap, in one transaction with a check of the calling node's lease.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.contract.elastic.world import (
    EpochProposal,
    JoinRequest,
    NodeProgram,
    TensorShape,
    WorldReport,
)
from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal
from functions.domain.records import Lease
from functions.domain.seat_records import Seat
from functions.domain.worlds.world_record import RECENT_ROUNDS, Leases, WorldNode, WorldRecord

MAX_ROUNDS = 32
"""Newest rounds that a world keeps."""


def require_own_node(node: str, seat: Seat, lease: Lease) -> None:
    """Refuse a node that is not of the seat and the attempt of the calling lease."""
    if node.split(".")[:2] != [str(seat.seat), str(lease.epoch)]:
        raise Refusal(
            ErrorCode.INVALID_VALUE,
            f"Node {node} is not of seat {seat.seat} and attempt {lease.epoch}, whose lease the call bears.",
            field="node",
        )


def join(
    world: WorldRecord | None,
    request: JoinRequest,
    seat: Seat,
    lease: Lease,
    leases: Leases,
    *,
    tensors: Sequence[TensorShape] = (),
) -> WorldRecord | None:
    """Return the world in which the node asks to join; None if nothing changes.

    A node of a new process replaces the joining node of the same seat. A member's repeated request updates its
    addresses. `tensors`: the first tensors of the world's program.
    """
    require_own_node(request.node, seat, lease)
    world = world or WorldRecord(version=0)
    program = request.program.model_copy(update={"tensors": []})
    if not defines_program(world, seat, leases):
        assert world.program is not None
        difference = find_difference(world.program, request.program, tensors)
        if difference is not None:
            detail = f"The program of node {request.node} differs from the program of the world: {difference}."
            raise Refusal(ErrorCode.WORLD_MISMATCH, detail, field="program")
        program = world.program
    given = {"addresses": request.addresses, "certificate": request.certificate, "round": request.round}
    if any(one.node == request.node for one in world.members):
        members = [one.model_copy(update=given) if one.node == request.node else one for one in world.members]
        after = world.model_copy(update={"members": members, "program": program})
    else:
        relay = any(one.node == request.node and one.relay for one in world.joining)
        node = WorldNode(node=request.node, machine_id=lease.machine_id, ready=request.ready, relay=relay, **given)
        joining = [one for one in world.joining if one.seat == seat.seat or not one.has_ended(leases)]
        places = [place for place, one in enumerate(joining) if one.seat == seat.seat]
        joining[slice(places[0], places[0] + 1) if places else slice(len(joining), None)] = [node]
        after = world.model_copy(update={"joining": joining, "program": program})
    return None if after == world else after.model_copy(update={"version": world.version + 1})


def mark_relayed(world: WorldRecord, nodes: Sequence[str]) -> WorldRecord | None:
    """Return the world that shows the nodes as relayed; None if the world shows them already."""

    def mark(present: Sequence[WorldNode]) -> list[WorldNode]:
        return [one.model_copy(update={"relay": one.relay or one.node in nodes}) for one in present]

    after = world.model_copy(update={"members": mark(world.members), "joining": mark(world.joining)})
    return None if after == world else after.model_copy(update={"version": world.version + 1})


def defines_program(world: WorldRecord | None, seat: Seat, leases: Leases) -> bool:
    """Return True if the next node to join at `seat` defines the program, because no other seat has a present node."""
    if world is None or world.program is None:
        return True
    others = [one for one in (*world.members, *world.joining) if one.seat != seat.seat]
    return all(one.has_ended(leases) for one in others)


def find_difference(ours: NodeProgram, theirs: NodeProgram, tensors: Sequence[TensorShape]) -> str | None:
    """Return the first difference between the world's program and a node's program; None for equal programs."""
    for name in ("torch", "engine", "codec"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return f"{name} is {other!r}, the world's is {mine!r}"
    for name in sorted({*ours.settings, *theirs.settings}):
        mine, other = ours.settings.get(name), theirs.settings.get(name)
        if mine != other:
            return f"the setting {name} is {other!r}, the world's is {mine!r}"
    if ours.model_sha256 == theirs.model_sha256 and ours.parameters == theirs.parameters:
        return None
    for mine, other in zip(tensors, theirs.tensors, strict=False):
        if mine != other:
            return f"a parameter is {_describe(other)}, the world's is {_describe(mine)}"
    return f"the model has {theirs.parameters} trained values in other tensors, the world's has {ours.parameters}"


def _describe(tensor: TensorShape) -> str:
    return f"{tensor.name} ({tensor.dtype}, {'x'.join(map(str, tensor.shape)) or 'scalar'})"


def propose(
    world: WorldRecord | None, proposal: EpochProposal, seat: Seat, lease: Lease, leases: Leases, *, now: int
) -> WorldRecord | None:
    """Return the world of the next epoch; None for a repeat of the proposal that made the present epoch.

    More than half of the members that are not lost must stay, or exactly half with the first of these members. A
    proposer that leaves by its own proposal does not count. If all members are lost, a ready joining node forms the
    world anew, from at least `seat.min` ready joining nodes.
    """
    require_own_node(proposal.node, seat, lease)
    world = world or WorldRecord(version=0)
    present = [one.node for one in world.members]
    if proposal.epoch == world.epoch - 1 and proposal.members == present and proposal.node in present:
        return None
    if proposal.epoch != world.epoch:
        raise Refusal(
            ErrorCode.WORLD_CHANGED,
            f"The proposal follows epoch {proposal.epoch}; the world is at epoch {world.epoch}.",
            field="epoch",
        )
    live = [one.node for one in world.members if not world.is_lost(one, leases)]
    if proposal.node not in live:
        _require_forming(world, proposal, live)
    chosen = _choose(world, proposal, leases, now)
    voters = [one for one in live if one in proposal.members or one != proposal.node]
    kept = [one for one in voters if one in proposal.members]
    if voters and (2 * len(kept) < len(voters) or (2 * len(kept) == len(voters) and voters[0] not in kept)):
        raise Refusal(
            ErrorCode.NO_MAJORITY,
            f"The proposal keeps {len(kept)} of the {len(voters)} members whose attempts have not ended.",
            field="members",
        )
    if not voters and len(chosen) < seat.min:
        raise Refusal(
            ErrorCode.NO_MAJORITY,
            f"The proposal forms the world from {len(chosen)} nodes; the job begins with {seat.min}.",
            field="members",
        )
    joined = {one.node for one in chosen}
    return world.model_copy(
        update={
            "version": world.version + 1,
            "epoch": world.epoch + 1,
            "formed_epoch": world.formed_epoch if set(present) & set(proposal.members) else world.epoch + 1,
            "round": proposal.round,
            "rounds": [one for one in world.rounds if one.round <= proposal.round],
            "members": [one if one.joined_at is not None else _admit(one, now) for one in chosen],
            "joining": [one for one in world.joining if one.node not in joined and not one.has_ended(leases)],
        }
    )


def exclude(world: WorldRecord | None, seats: Sequence[int]) -> WorldRecord:
    """Return the world of the next epoch without the members at `seats`, by an operator's decision, not by majority.

    The other members form the next epoch. Excluded nodes that still run read their exclusion, and join again.
    """
    world = world or WorldRecord(version=0)
    present = [one.seat for one in world.members]
    unknown = [one for one in seats if one not in present]
    if unknown:
        listed = ", ".join(map(str, sorted(present))) or "none"
        raise Refusal(
            ErrorCode.NOT_A_MEMBER,
            f"Node {unknown[0]} is no member of epoch {world.epoch}; the members are: {listed}.",
            field="seats",
            remedy="Name members of the present epoch, as `baton world` shows the members.",
        )
    members = [one for one in world.members if one.seat not in seats]
    update = {"version": world.version + 1, "epoch": world.epoch + 1, "members": members}
    return world.model_copy(update=update)


def _admit(node: WorldNode, now: int) -> WorldNode:
    return node.model_copy(update={"joined_at": now})


def _require_forming(world: WorldRecord, proposal: EpochProposal, live: Sequence[str]) -> None:
    """Refuse a proposer that is no member, unless the proposer and other joining nodes form the world anew."""
    joining = {one.node for one in world.joining}
    if live or proposal.node not in joining:
        state = "joining" if proposal.node in joining else "neither a member nor joining"
        detail = f"Node {proposal.node} is {state}, and epoch {world.epoch} has {len(live)} members that go on."
        raise Refusal(ErrorCode.NOT_A_MEMBER, detail, field="node")
    if proposal.node not in proposal.members or {one.node for one in world.members} & set(proposal.members):
        raise Refusal(
            ErrorCode.INVALID_VALUE,
            "A world that is formed anew consists of joining nodes only, and of the proposer.",
            field="members",
        )


def _choose(world: WorldRecord, proposal: EpochProposal, leases: Leases, now: int) -> list[WorldNode]:
    """Return the proposed members: present members in their order, then ready and live joining nodes."""
    nodes = {one.node: one for one in (*world.members, *world.joining)}
    gone = [name for name in proposal.members if name not in nodes]
    if gone:
        raise Refusal(
            ErrorCode.WORLD_CHANGED,
            f"Node {gone[0]} is neither a member of epoch {world.epoch} nor joining.",
            field="members",
        )
    chosen = [nodes[name] for name in proposal.members]
    members = [one.node for one in chosen if one.joined_at is not None]
    in_order = [one.node for one in world.members if one.node in members]
    if members != in_order or proposal.members[: len(members)] != members:
        raise Refusal(
            ErrorCode.INVALID_VALUE,
            "Present members come first, each once and in the order of their epoch, then joining nodes.",
            field="members",
        )
    seats = [one.seat for one in chosen]
    if len(set(seats)) < len(seats):
        raise Refusal(ErrorCode.INVALID_VALUE, "A seat has one node at most.", field="members")
    for one in chosen[len(members) :]:
        if not one.ready or not one.is_live(leases, now):
            state = "has no live lease" if one.ready else "is not ready"
            raise Refusal(ErrorCode.WORLD_CHANGED, f"The joining node {one.node} {state}.", field="members")
    return chosen


def report(world: WorldRecord | None, body: WorldReport, seat: Seat, lease: Lease) -> WorldRecord:
    """Return the world with a member's newest rounds and the states of its nodes."""
    require_own_node(body.node, seat, lease)
    if world is None or body.epoch != world.epoch:
        epoch = 0 if world is None else world.epoch
        detail = f"The report is about epoch {body.epoch}; the world is at epoch {epoch}."
        raise Refusal(ErrorCode.WORLD_CHANGED, detail, field="epoch")
    if all(one.node != body.node for one in world.members):
        detail = f"Node {body.node} is no member of epoch {world.epoch}."
        raise Refusal(ErrorCode.NOT_A_MEMBER, detail, field="node")
    by_round = {one.round: one for one in (*world.rounds, *body.rounds)}
    rounds = [by_round[number] for number in sorted(by_round)][-MAX_ROUNDS:]
    states = {one.node: one.model_dump(exclude={"node"}) for one in body.nodes}

    newest = max([world.round, *(one.round for one in body.rounds)])

    def update(nodes: Sequence[WorldNode]) -> list[WorldNode]:
        found = [one.model_copy(update=states.get(one.node, {})) for one in nodes]
        return [_remember(one) if newest > world.round and one.node in states else one for one in found]

    return world.model_copy(
        update={
            "version": world.version + 1,
            "round": newest,
            "rounds": rounds,
            "members": update(world.members),
            "joining": update(world.joining),
        }
    )


def _remember(node: WorldNode) -> WorldNode:
    """Return a member with the tokens of the newest round among its recent ones; a joining node trains in no round."""
    if node.joined_at is None:
        return node
    return node.model_copy(update={"recent_tokens": [*node.recent_tokens, node.tokens][-RECENT_ROUNDS:]})
