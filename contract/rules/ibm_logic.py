"""Joining conditions as the original reads them: from left to right, given up at the first metric that is not there.

This language goes on: `unknown or true` is true. Where that would decide otherwise, the first operand is said twice, so
that the whole is unknown when it is.
"""

from __future__ import annotations

from typing import NamedTuple

from contract.rules.tree import Logic, Node, Unary


class Context(NamedTuple):
    """What a part is needed for."""

    positive: bool = True
    """The rule is true if it is; under a `not` it is the other way round."""
    exact: bool = False
    """False and unknown have to be told apart: a patience is reset by the one, and not by the other."""
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
    decides = context.exact or (operator == "or") is context.positive
    if first.may <= rest.sure or not decides:
        return plain
    other = "or" if operator == "and" else "and"
    return Part(Logic(other, (plain.node, settled(first.node, operator))), plain.may, first.sure)


def settled(node: Node, operator: str) -> Node:
    """Unknown when the condition is; else true for `or`, false for `and`."""
    return Logic(operator, (node, Unary("not", node)))
