"""Check which rules an elastic job can have, and notify the leases of its seats. Loads the rule language on use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from baton.contract.errors import ErrorCode, Fault
from functions.domain.errors import Refusal
from functions.domain.jobs.transaction import SteerLease, Transaction
from functions.domain.worlds.seat_ids import seat_id

if TYPE_CHECKING:
    from baton.contract.rules.document.rule import Rule

_REFUSED = {
    "rollback": "nodes that stay hold the state of later rounds",
    "requeue": "each node has a machine of its own",
    "skip_batch": "the nodes evaluate rules after a round, whose batches are in the model already",
}
"""Actions that cannot be right for several nodes, with the reason."""


def notify_seats(change: Transaction) -> Transaction:
    """Write the newest revision and command number of an elastic job into the leases of its running seats."""
    job = change.job
    return change.also(
        *(
            SteerLease(
                job_id=seat_id(job.id, place),
                epoch=mark.epoch,
                rules_revision=job.rules_revision,
                commands_seq=job.commands_seq,
            )
            for place, mark in enumerate(job.seats)
            if mark.running
        )
    )


def require_for_nodes(text: str, field: str) -> None:
    """Refuse sound rules that cannot be right for several nodes, with all faults."""
    faults = tuple(_find_faults(text)) if text.strip() else ()
    if faults:
        first = faults[0]
        raise Refusal(
            ErrorCode.NOT_FOR_ELASTIC,
            f"{first.field}: {first.reason}.",
            field=field,
            problems=faults,
            remedy=first.remedy,
        )


def _find_unknown(rule: Rule, place: str) -> Iterator[Fault]:
    """Find what the control plane does not know of an elastic job."""
    from baton.contract.rules.document.actions import Scale
    from baton.contract.rules.language.typed_ast import Grouped, walk
    from baton.contract.rules.metrics import SIGNALS

    parts = [part for one in (rule.when, rule.clear) if one is not None for part in walk(one)]
    unknown = [name for name in rule.metrics if name == "queue.age" or name.startswith(SIGNALS)]
    unknown += ["a group"] if any(isinstance(one, Grouped) for one in parts) else []
    unknown += ["scale"] if any(isinstance(one, Scale) for one in rule.actions) else []
    unknown += ["the event heartbeat"] if "heartbeat" in rule.on else []
    for name in unknown:
        reason = f"rule {rule.name} uses {name}, which the control plane does not know of a job with nodes"
        yield Fault(place, reason, f"Remove {name}.")


def _find_faults(text: str) -> Iterator[Fault]:
    from baton.contract.rules.document.actions import NAMES
    from baton.contract.rules.document.loader import load
    from baton.contract.rules.document.rule import CONTROL_PLANE_EVENTS
    from baton.contract.rules.document.rule_placement import runs_in_control_plane

    rules = load(text).rules
    if rules is None:
        return
    metrics = rules.metrics()
    for number, rule in enumerate(rules.rules):
        place = f"rules.{number}"
        if runs_in_control_plane(rule, metrics):
            yield from _find_unknown(rule, place)
        events = sorted(rule.on - CONTROL_PLANE_EVENTS - {"step", "log"})
        if events:
            reason = f"rule {rule.name} is due after {' and '.join(events)}; the nodes evaluate rules after each round"
            yield Fault(f"{place}.on", reason, "Leave 'on' out.")
        for action in rule.actions:
            name = NAMES[type(action)]
            if name in _REFUSED:
                yield Fault(f"{place}.do", f"{name} is not possible with nodes: {_REFUSED[name]}", f"Remove {name}.")
