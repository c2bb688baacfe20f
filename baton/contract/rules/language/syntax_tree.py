"""An expression as it was written: its tree, and the tree as text again."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Number(NamedTuple):
    """`30s` is 30 with the unit `s`; never negative, never infinite."""

    value: float
    unit: str
    offset: int = 0


class Truth(NamedTuple):
    """`true` or `false`."""

    value: bool
    offset: int = 0


class Name(NamedTuple):
    """A metric, or one of the words `inf`, `min`, `max` where they stand alone."""

    name: str
    offset: int = 0


class Unary(NamedTuple):
    """`-x`, `+x`, `not x`."""

    operator: str
    operand: Node
    offset: int = 0


class Binary(NamedTuple):
    """Arithmetic."""

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
    """`a and b and c`, or the same with `or`."""

    operator: str
    operands: tuple[Node, ...]
    offset: int = 0


class Call(NamedTuple):
    """A function and its arguments."""

    function: str
    arguments: tuple[Node, ...]
    offset: int = 0


Node: TypeAlias = Number | Truth | Name | Unary | Binary | Comparison | Logic | Call

OR, AND, NOT, COMPARE, ADD, MULTIPLY, SIGN, ATOM = range(1, 9)
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
BINDING = {"or": OR, "and": AND, "+": ADD, "-": ADD, "*": MULTIPLY, "/": MULTIPLY, "%": MULTIPLY} | dict.fromkeys(
    COMPARISONS, COMPARE
)
"""How tightly an operator binds its operands."""


def children(node: Node) -> tuple[Node, ...]:
    """What an inner node is made of."""
    match node:
        case Unary(_, operand):
            return (operand,)
        case Binary(_, left, right):
            return (left, right)
        case Comparison(_, operands) | Logic(_, operands) | Call(_, operands):
            return operands
        case _:
            return ()


def depth_of(node: Node) -> int:
    """Levels of the tree, without recursion."""
    depth, level = 0, [node]
    while level:
        depth += 1
        level = [child for one in level for child in children(one)]
    return depth


def text_of(node: Node) -> str:
    """The shortest text that reads as this tree: equal expressions have equal texts."""
    match node:
        case Number(value, unit):
            return number_text(value) + unit
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
        case Call(function, arguments):
            return f"{function}({', '.join(text_of(argument) for argument in arguments)})"


def number_text(value: float) -> str:
    """A number as short as it can be read back."""
    return str(int(value)) if value == value // 1 and abs(value) < 1e15 else repr(value)


def _within(node: Node, binding: int) -> str:
    text = text_of(node)
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
