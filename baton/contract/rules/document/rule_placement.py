"""Where a rule is evaluated: in the training, or in the control plane, which alone knows some metrics and events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from baton.contract.documents import Document, Location
from baton.contract.rules.document.actions import NAMES, Hook, Pause, Profile, Requeue, Rollback, Scale, SkipBatch, Stop
from baton.contract.rules.document.lint import outcomes
from baton.contract.rules.document.rule import CONTROL_PLANE_EVENTS, Rule, RuleSet
from baton.contract.rules.engine.group_statistics import GroupValue
from baton.contract.rules.language.faults import Code
from baton.contract.rules.language.typed_ast import Aggregate, Grouped, Typed, walk
from baton.contract.rules.metrics import Metrics

TRAINING_ONLY = (Rollback, SkipBatch, Profile, Hook)
"""Actions that nobody but the training can do, between two of its steps."""

_ENDS = (Stop, Rollback, Pause, Requeue)

CONTROL_PLANE_ONLY = (Scale,)
"""Actions that need what the control plane knows of other jobs."""


class Placed(NamedTuple):
    """The rules of a document, by where they are evaluated; each in the document's order."""

    training: RuleSet
    control_plane: RuleSet


def split(rules: RuleSet) -> Placed:
    """A rule is the control plane's if it reads or does what only that can, or names one of its events."""
    metrics = rules.metrics()
    mine = tuple(is_control_planes(rule, metrics) for rule in rules.rules)
    pairs = list(zip(rules.rules, mine, strict=True))
    return Placed(
        rules._replace(rules=tuple(rule for rule, there in pairs if not there)),
        rules._replace(rules=tuple(rule for rule, there in pairs if there)),
    )


def is_control_planes(rule: Rule, metrics: Metrics) -> bool:
    """Whether the control plane evaluates it. `metrics`: those of its document."""
    if rule.on & CONTROL_PLANE_EVENTS or any(isinstance(part, Grouped) for part in _parts(rule)):
        return True
    if any(isinstance(action, CONTROL_PLANE_ONLY) for action in rule.actions):
        return True
    return any(metrics[name].control_plane for name in rule.metrics if name in metrics)


def needed_group_values(rules: RuleSet) -> frozenset[GroupValue]:
    """What has to be kept of every job of a group, so that these rules can be evaluated."""
    parts = (part for rule in rules.rules for part in _parts(rule))
    return frozenset(GroupValue(part.metric, part.step) for part in parts if isinstance(part, Grouped))


def look_at_place(rule: Rule, metrics: Metrics, location: Location, document: Document, warnings: Document) -> None:
    """Note what cannot be done, or is otherwise than it may seem, where that rule is evaluated."""
    if not is_control_planes(rule, metrics):
        _look_at_texts(rule, metrics, location, warnings)
        _look_at_start(rule, location, warnings)
        _look_behind_stop(rule, location, warnings)
        return
    for number, action in enumerate(rule.actions):
        if isinstance(action, TRAINING_ONLY):
            place = (*location, "do", number)
            reason = f"{NAMES[type(action)]} can only be done by a training, and this rule is the control plane's"
            remedy = "Do it in a rule that reads nothing but the training's metrics, without 'on'."
            document.fault(place if place in document.places else place[:-1], reason, remedy, code=Code.MISPLACED)
    if rule.on and not rule.on & CONTROL_PLANE_EVENTS:
        reason = "this rule is the control plane's, which does not see these events"
        remedy = f"Leave 'on' out, or write {', '.join(sorted(CONTROL_PLANE_EVENTS))}."
        warnings.fault((*location, "on"), reason, remedy, code=Code.NEVER_FIRES)
    if any(fault.code == Code.HEARTBEAT_PACE for fault in warnings.faults):
        return
    for part in _parts(rule):
        if isinstance(part, Aggregate) and not (
            part.summary.metric in metrics and metrics[part.summary.metric].control_plane
        ):
            reason = f"the control plane hears of {part.summary.metric} with heartbeats: {part.text} is over theirs"
            remedy = "What has to see every step belongs into a rule that the training evaluates."
            warnings.fault((*location, "when"), reason, remedy, code=Code.HEARTBEAT_PACE)
            return


def _look_at_texts(rule: Rule, metrics: Metrics, location: Location, warnings: Document) -> None:
    for name in rule.told:
        if name in metrics and metrics[name].control_plane:
            reason = f"{{{name}}} is not known in the training, where this rule is evaluated"
            remedy = "Leave it out, or read it in the condition too: then the control plane evaluates the rule."
            warnings.fault((*location, "do"), reason, remedy, code=Code.MISPLACED)


def _look_at_start(rule: Rule, location: Location, warnings: Document) -> None:
    """When a training starts it has reported nothing yet."""
    if rule.on == {"start"} and True not in outcomes(rule.when, {"step"}):
        reason = "at the start of a training nothing is known but its step: the condition is never true then"
        remedy = "Check it when its metrics come: leave 'on' out, or write evaluate, log or step."
        warnings.fault((*location, "on"), reason, remedy, code=Code.NEVER_FIRES)


def _look_behind_stop(rule: Rule, location: Location, warnings: Document) -> None:
    """A training ends once. What hands it back can be rejected, a stop cannot: another end behind it never comes."""
    stops = [number for number, action in enumerate(rule.actions) if isinstance(action, Stop)]
    for number in range(stops[0] + 1, len(rule.actions)) if stops else ():
        if isinstance(rule.actions[number], _ENDS):
            name = NAMES[type(rule.actions[number])]
            reason = f"this {name} is never done: the stop before it ends the training"
            warnings.fault((*location, "do", number), reason, "Leave one of them out.", code=Code.NEVER_FIRES)


def _parts(rule: Rule) -> Iterator[Typed]:
    for expression in (rule.when, rule.clear):
        if expression is not None:
            yield from walk(expression)
