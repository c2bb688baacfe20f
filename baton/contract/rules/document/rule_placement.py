"""Placement: the training evaluates a rule unless only the control plane knows its metrics or events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from baton.contract.rules.document.actions import (
    NAMES,
    HookAction,
    Pause,
    ProfileAction,
    Requeue,
    RollbackAction,
    Scale,
    SkipBatch,
    Stop,
)
from baton.contract.rules.document.lint import find_outcomes
from baton.contract.rules.document.rule import CONTROL_PLANE_EVENTS, Rule, RuleSet
from baton.contract.rules.engine.group_statistics import GroupValue
from baton.contract.rules.language.faults import Code
from baton.contract.rules.language.typed_ast import Aggregate, Grouped, Typed, walk
from baton.contract.rules.metrics import MetricCatalog
from baton.contract.yaml_documents import Document, Location

TRAINING_ONLY = (RollbackAction, SkipBatch, ProfileAction, HookAction)
"""Actions that only the training can execute, between two steps."""

_ENDS = (Stop, RollbackAction, Pause, Requeue)

CONTROL_PLANE_ONLY = (Scale,)
"""Actions that need the records of other jobs."""


class PlacedRules(NamedTuple):
    """The rules of a document by host, each in the document's order."""

    training: RuleSet
    control_plane: RuleSet


def split(rules: RuleSet) -> PlacedRules:
    """Split the rules by the host that evaluates them."""
    metrics = rules.metrics()
    mine = tuple(runs_in_control_plane(rule, metrics) for rule in rules.rules)
    pairs = list(zip(rules.rules, mine, strict=True))
    return PlacedRules(
        rules._replace(rules=tuple(rule for rule, there in pairs if not there)),
        rules._replace(rules=tuple(rule for rule, there in pairs if there)),
    )


def runs_in_control_plane(rule: Rule, metrics: MetricCatalog) -> bool:
    """Check whether a rule reads, does or subscribes to something that only the control plane has."""
    if rule.on & CONTROL_PLANE_EVENTS or any(isinstance(part, Grouped) for part in _parts(rule)):
        return True
    if any(isinstance(action, CONTROL_PLANE_ONLY) for action in rule.actions):
        return True
    return any(metrics[name].control_plane for name in rule.metrics if name in metrics)


def collect_group_values(rules: RuleSet) -> frozenset[GroupValue]:
    """Collect the values that every job of a group must keep for these rules."""
    parts = (part for rule in rules.rules for part in _parts(rule))
    return frozenset(GroupValue(part.metric, part.step) for part in parts if isinstance(part, Grouped))


def check_placement(
    rule: Rule, metrics: MetricCatalog, location: Location, document: Document, warnings: Document
) -> None:
    """Record faults and warnings about a rule on its host."""
    if not runs_in_control_plane(rule, metrics):
        _check_texts(rule, metrics, location, warnings)
        _check_start(rule, location, warnings)
        _check_after_stop(rule, location, warnings)
        return
    for number, action in enumerate(rule.actions):
        if isinstance(action, TRAINING_ONLY):
            place = (*location, "do", number)
            reason = f"{NAMES[type(action)]} needs a training, and the control plane evaluates this rule"
            remedy = "Use it in a rule that reads the training's metrics alone, without 'on'."
            document.fault(place if place in document.places else place[:-1], reason, remedy, code=Code.MISPLACED)
    if rule.on and not rule.on & CONTROL_PLANE_EVENTS:
        reason = "the control plane evaluates this rule and does not receive these events"
        remedy = f"Leave 'on' out, or write {', '.join(sorted(CONTROL_PLANE_EVENTS))}."
        warnings.fault((*location, "on"), reason, remedy, code=Code.NEVER_FIRES)
    if any(fault.code == Code.HEARTBEAT_PACE for fault in warnings.faults):
        return
    for part in _parts(rule):
        if isinstance(part, Aggregate) and not (
            part.summary.metric in metrics and metrics[part.summary.metric].control_plane
        ):
            metric = part.summary.metric
            reason = f"heartbeats bring {metric} to the control plane: {part.text} covers only their values"
            remedy = "To cover every step, write a rule that the training evaluates."
            warnings.fault((*location, "when"), reason, remedy, code=Code.HEARTBEAT_PACE)
            return


def _check_texts(rule: Rule, metrics: MetricCatalog, location: Location, warnings: Document) -> None:
    for name in rule.text_metrics:
        if name in metrics and metrics[name].control_plane:
            reason = f"{{{name}}} is not known in the training, where this rule is evaluated"
            remedy = "Leave it out, or read it in the condition too: then the control plane evaluates the rule."
            warnings.fault((*location, "do"), reason, remedy, code=Code.MISPLACED)


def _check_start(rule: Rule, location: Location, warnings: Document) -> None:
    """Warn about `on: start` with metrics: a starting training has reported none."""
    if rule.on == {"start"} and True not in find_outcomes(rule.when, {"step"}):
        reason = "a starting training knows its step alone: the condition is never true then"
        remedy = "Leave 'on' out, or write evaluate, log or step."
        warnings.fault((*location, "on"), reason, remedy, code=Code.NEVER_FIRES)


def _check_after_stop(rule: Rule, location: Location, warnings: Document) -> None:
    """Warn about an end behind a stop. The host can reject pause or requeue, but never a stop, therefore a later end
    is unreachable.
    """
    stops = [number for number, action in enumerate(rule.actions) if isinstance(action, Stop)]
    for number in range(stops[0] + 1, len(rule.actions)) if stops else ():
        if isinstance(rule.actions[number], _ENDS):
            name = NAMES[type(rule.actions[number])]
            reason = f"this {name} is never executed: the stop before it ends the training"
            warnings.fault((*location, "do", number), reason, "Leave one of them out.", code=Code.NEVER_FIRES)


def _parts(rule: Rule) -> Iterator[Typed]:
    for expression in (rule.when, rule.clear):
        if expression is not None:
            yield from walk(expression)
