"""Describe changes of a world as events of the elastic job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.contract.elastic.world import EpochProposal, WorldReport
from baton.contract.jobs.history import EventType
from functions.domain.worlds.world_record import WorldNode, WorldRecord

WorldEvent = tuple[EventType, dict[str, Any]]


def describe_epoch(before: WorldRecord, after: WorldRecord, proposal: EpochProposal) -> list[WorldEvent]:
    """Return the events of a new epoch: the nodes that joined, and the members that are lost, with the causes."""
    here = {"world_epoch": after.epoch, "round": after.round, "members": _list_seats(after.members)}
    present, members = {one.node for one in before.members}, {one.node for one in after.members}
    joined = [one for one in after.members if one.node not in present]
    lost = [one for one in before.members if one.node not in members]
    causes = {one.node: one.model_dump(include={"cause", "message"}, exclude_defaults=True) for one in proposal.lost}
    events: list[WorldEvent] = []
    if lost:
        found = [{"seat": one.seat, **causes.get(one.node, {})} for one in lost]
        events.append((EventType.WORLD_LOST, {**here, "lost": found}))
    if joined:
        events.append((EventType.WORLD_JOINED, {**here, "joined": _list_seats(joined)}))
    return events


def describe_exclusion(before: WorldRecord, after: WorldRecord) -> WorldEvent:
    """Return the event of an exclusion by an operator."""
    kept = {one.node for one in after.members}
    lost = [{"seat": one.seat, "cause": "excluded_by_operator"} for one in before.members if one.node not in kept]
    here = {"world_epoch": after.epoch, "round": after.round, "members": _list_seats(after.members)}
    return EventType.WORLD_LOST, {**here, "lost": lost}


def describe_repairs(before: WorldRecord | None, report: WorldReport) -> list[WorldEvent]:
    """Return one event for each newly reported round with repaired buckets."""
    known = {one.round for one in before.rounds} if before is not None else set()
    return [
        (EventType.WORLD_REPAIRED, {"world_epoch": one.epoch, "round": one.round, "repaired": one.repaired})
        for one in report.rounds
        if one.repaired and one.round not in known
    ]


def _list_seats(nodes: Sequence[WorldNode]) -> list[int]:
    return [one.seat for one in nodes]
