"""Joining conditions as the original reads them: from left to right, given up at the first metric that is not there.

This language goes on: `unknown or true` is true. Where that would decide otherwise, the first operand is said twice, so
that the whole is unknown when it is.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.contract.rules.faults import Code
from baton.contract.rules.ibm_metrics import refusal
from baton.contract.rules.limits import LIMITS
from baton.contract.rules.tree import Logic, Node, Unary, children


class Context(NamedTuple):
    """What a part is needed for."""

    positive: bool = True
    """The rule is true if it is; under a `not` it is the other way round."""
    exact: bool = False
    """False and unknown have to be told apart: a patience is reset by the one, and not by the other."""
    beside: bool = False
    """What stands after it may decide without it, where the original gives the rule up at it."""
    full: frozenset[str] = frozenset()
    """Metrics whose windows are full wherever it decides anything."""


class Part(NamedTuple):
    """A condition, translated."""

    node: Node
    may: frozenset[str] = frozenset()
    """Metrics that the original gives the rule up for, on one way or another through it."""
    sure: frozenset[str] = frozenset()
    """Metrics without any of which the translation is unknown, whatever the others are."""


def joined(operator: str, first: Part, rest: Part, context: Context) -> Part:
    """`first and rest`, or the same with `or`."""
    inner = rest.node.operands if isinstance(rest.node, Logic) and rest.node.operator == operator else (rest.node,)
    plain = Part(Logic(operator, (first.node, *inner)), first.may | rest.may, first.sure & rest.sure)
    decides = context.exact or context.beside or (operator == "or") is context.positive
    if not (first.may <= rest.sure or not decides):
        other = "or" if operator == "and" else "and"
        plain = Part(Logic(other, (plain.node, settled(first.node, operator))), plain.may, first.sure)
    # operands that are said several times, within each other, multiply
    if _is_large(plain.node):
        reason = f"its translation has more than {LIMITS.nodes} parts"
        raise refusal(reason, "Split it into several controllers.", Code.TOO_LARGE)
    return plain


def _is_large(node: Node) -> bool:
    seen, pending = 0, [node]
    while pending and seen <= LIMITS.nodes:
        seen += 1
        pending += children(pending.pop())
    return seen > LIMITS.nodes


def settled(node: Node, operator: str) -> Node:
    """Unknown when the condition is; else true for `or`, false for `and`."""
    return Logic(operator, (node, Unary("not", node)))
