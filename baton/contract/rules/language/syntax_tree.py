"""Syntax tree of an expression, and its canonical text."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Number(NamedTuple):
    """A literal: `30s` is 30 with the unit `s`; never negative or infinite."""

    value: float
    unit: str
    offset: int = 0


class Truth(NamedTuple):
    """`true` or `false`."""

    value: bool
    offset: int = 0


class Name(NamedTuple):
    """A metric, or one of the words `inf`, `min`, `max`."""

    name: str
    offset: int = 0


class Unary(NamedTuple):
    """`-x`, `+x`, `not x`."""

    operator: str
    operand: Node
    offset: int = 0


class Binary(NamedTuple):
    """An arithmetic operation."""

    operator: str
    left: Node
    right: Node
    offset: int = 0


class Comparison(NamedTuple):
    """`a < b <= c`: one operator less than operands."""

    operators: tuple[str, ...]
    operands: tuple[Node, ...]
    offset: int = 0


class Logic(NamedTuple):
    """`a and b and c`, or a chain of `or`."""

    operator: str
    operands: tuple[Node, ...]
    offset: int = 0


class FunctionCall(NamedTuple):
    """A function call."""

    function: str
    arguments: tuple[Node, ...]
    offset: int = 0


Node: TypeAlias = Number | Truth | Name | Unary | Binary | Comparison | Logic | FunctionCall

OR, AND, NOT, COMPARE, ADD, MULTIPLY, SIGN, ATOM = range(1, 9)
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
BINDING = {"or": OR, "and": AND, "+": ADD, "-": ADD, "*": MULTIPLY, "/": MULTIPLY, "%": MULTIPLY} | dict.fromkeys(
    COMPARISONS, COMPARE
)
"""Binding strength of each operator."""


def get_children(node: Node) -> tuple[Node, ...]:
    """Return the child nodes."""
    match node:
        case Unary(_, operand):
            return (operand,)
        case Binary(_, left, right):
            return (left, right)
        case Comparison(_, operands) | Logic(_, operands) | FunctionCall(_, operands):
            return operands
        case _:
            return ()


def measure_depth(node: Node) -> int:
    """Measure the depth in levels, without recursion."""
    depth, level = 0, [node]
    while level:
        depth += 1
        level = [child for one in level for child in get_children(one)]
    return depth


def format_node(node: Node) -> str:
    """Format a tree as its shortest text; equal expressions have equal texts."""
    match node:
        case Number(value, unit):
            return format_number(value) + unit
        case Truth(value):
            return "true" if value else "false"
        case Name(name):
            return name
        case Unary("not", operand):
            return f"not {_within(operand, NOT)}"
        case Unary(operator, operand):
            return f"{operator}{_within(operand, SIGN)}"
        case Binary(operator, left, right):
            binding = BINDING[operator]
            return f"{_within(left, binding)} {operator} {_within(right, binding + 1)}"
        case Comparison(operators, operands):
            parts = [_within(operands[0], COMPARE + 1)]
            for operator, operand in zip(operators, operands[1:], strict=True):
                parts += [operator, _within(operand, COMPARE + 1)]
            return " ".join(parts)
        case Logic(operator, operands):
            binding = BINDING[operator]
            return f" {operator} ".join(_within(operand, binding + 1) for operand in operands)
        case FunctionCall(function, arguments):
            return f"{function}({', '.join(format_node(argument) for argument in arguments)})"


def format_number(value: float) -> str:
    """Format a number as the shortest text that reads back as the same value."""
    return str(int(value)) if value == value // 1 and abs(value) < 1e15 else repr(value)


def _within(node: Node, binding: int) -> str:
    text = format_node(node)
    return f"({text})" if _binding_of(node) < binding else text


def _binding_of(node: Node) -> int:
    match node:
        case Unary(operator, _):
            return NOT if operator == "not" else SIGN
        case Binary(operator, _, _) | Logic(operator, _):
            return BINDING[operator]
        case Comparison():
            return COMPARE
        case _:
            return ATOM
