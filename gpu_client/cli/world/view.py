"""Format the world of an elastic training: nodes as a table, rounds as a line of bars, states as sentences. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from baton.contract.elastic.world import NodeView, RoundReport, WorldView
from baton.contract.jobs.history import EventType, EventView
from gpu_client.cli.core.formats import age, count, duration, size, sparkline
from gpu_client.cli.core.output import FOLDED, TableColumn

NODES = (
    TableColumn("node", right=True),
    "state",
    TableColumn("machine", FOLDED),
    TableColumn("tokens", right=True),
    TableColumn("share", right=True),
    TableColumn("Mbit/s", right=True),
    TableColumn("round", right=True),
    TableColumn("joined", right=True),
)
WORLD_EVENTS = (EventType.WORLD_JOINED, EventType.WORLD_LOST, EventType.WORLD_REPAIRED)
_CELLS = 32
"""Rounds in the line of bars."""


def node_rows(view: WorldView, now: float) -> list[list[str]]:
    """Return the rows of the table `NODES`: members in the order of their ranks, then joining nodes."""
    tokens = sum(one.tokens for one in view.nodes)
    return [
        [
            str(one.seat),
            "ended" if view.state == "ended" else describe_state(one),
            one.machine_id or "",
            f"{one.tokens:,}" if one.tokens else "",
            f"{one.tokens / tokens:.0%}" if one.tokens else "",
            "" if one.link_mbit_s is None else f"{one.link_mbit_s:.0f}",
            "" if one.member else f"{one.round:,}",
            "" if one.joined_at is None else f"{age(now - one.joined_at)} ago",
        ]
        for one in view.nodes
    ]


def describe_state(node: NodeView) -> str:
    """Return `training`, `joining, fetches the state`, `training, relay`, or `training, lease lost`."""
    joining = "joining" if node.ready else "joining, fetches the state"
    state = (node.state or "member") if node.member else joining
    state = f"{state}, relay" if node.relay else state
    return state if node.lease_live else f"{state}, lease lost"


def world_fields(view: WorldView, *, unicode: bool) -> list[tuple[str, str]]:
    """Return state, membership, program and newest rounds of a world."""
    program = view.program
    described = (
        f"{program.parameters:,} values, codec {program.codec}, engine {program.engine}, torch {program.torch}"
        if program is not None
        else ""
    )
    return [
        ("state", f"{view.state}: {describe_nodes(view)}; begins with {view.min}"),
        ("epoch", f"{view.epoch}" if view.epoch else ""),
        ("round", f"{view.round:,}" if view.epoch else ""),
        ("program", described),
        ("rounds", describe_rounds(view.rounds, unicode=unicode)),
        ("advice", view.advice),
    ]


def describe_nodes(view: WorldView) -> str:
    """Return `3 of 4 nodes train`, with the joining nodes."""
    joining = f", {len(view.joining)} joining" if view.joining else ""
    return f"{len(view.members) if view.state != 'forming' else 0} of {count(view.max, 'node')}{joining}"


def describe_rounds(rounds: Sequence[RoundReport], *, unicode: bool) -> str:
    """Return bars of the seconds of the newest rounds, then the last round in words; empty without rounds."""
    if not rounds:
        return ""
    last, shown = rounds[-1], rounds[-_CELLS:]
    bars = f"{sparkline([one.round_s for one in shown], _CELLS)} " if unicode else ""
    repaired = sum(one.repaired for one in shown)
    parts = [
        f"{duration(last.round_s)}, {duration(last.reduce_s)} of it reduce",
        f"{count(last.contributors, 'contributor')}",
        f"{last.tokens:,} tokens",
    ]
    parts += [f"{count(repaired, 'bucket')} reduced again in {count(len(shown), 'round')}"] if repaired else []
    return f"{bars}last: {', '.join(parts)}"


def waiting_sentence(view: WorldView) -> str:
    """Return `waiting: 1 of 2 nodes has joined`, for a world that has no members."""
    joined = len(view.joining)
    return f"waiting: {joined} of {count(view.min, 'node')} {'has' if 1 in (joined, view.min) else 'have'} joined"


def watch_text(view: WorldView) -> str:
    """Return the nodes and the round in short, for one line."""
    return waiting_sentence(view) if view.state == "forming" else f"{describe_nodes(view)}, round {view.round:,}"


def describe_rates(view: WorldView) -> str:
    """Return `, 853 tokens/s, a node sent 15.0 MB at 60 Mbit/s` of the last round; empty without rounds."""
    last = view.rounds[-1] if view.rounds else None
    if last is None or not last.round_s:
        return ""
    rate = f" at {last.sent_bytes * 8 / 1e6 / last.reduce_s:.0f} Mbit/s" if last.reduce_s else ""
    sent = f", a node sent {size(last.sent_bytes)}{rate}" if last.sent_bytes else ""
    return f", {last.tokens / last.round_s:,.0f} tokens/s{sent}"


def event_line(event: EventView) -> str:
    """Return `node 2 joined: 3 nodes, round 12` for an event of a world."""
    data, round_ = event.data, f"round {event.data.get('round')}"
    members = data.get("members") or []
    if event.type is EventType.WORLD_REPAIRED:
        return f"{round_}: {count(int(data.get('repaired') or 0), 'bucket')} reduced again"
    if event.type is EventType.WORLD_JOINED:
        names = ", ".join(map(str, data.get("joined") or []))
        return f"{_nodes(data.get('joined') or [])} {names} joined: {count(len(members), 'node')}, {round_}"
    lost = data.get("lost") or []
    names = ", ".join(f"{one.get('seat')}{f' ({cause})' if (cause := one.get('cause')) else ''}" for one in lost)
    return f"{_nodes(lost)} {names} lost: {count(len(members), 'node')}, {round_}"


def _nodes(items: Sequence[object]) -> str:
    return "node" if len(items) == 1 else "nodes"
