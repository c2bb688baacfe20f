"""Refuse Python constructs without a counterpart in the rule language, with reason and remedy."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from baton.contract.rules.language.faults import Code, ExpressionError
from gpu_client.importers.ibm.metrics import refuse

_NO_POWERS = ("powers can take seconds, at every check", "Multiply.")
_NO_BITS = ("there are no bit operators", "Write 'and', 'or', 'not'.")
_NO_LISTS = ("there are no lists", "Name metrics and numbers.")
_NO_LOOPS = ("there are no loops", "Write a rule of this language with a window: mean(loss, 5) > 2.")
_NODES: Mapping[type[ast.AST], tuple[str, str]] = {
    ast.Pow: _NO_POWERS,
    ast.FloorDiv: ("there is no whole division", "Divide with '/'."),
    ast.MatMult: ("there are no matrices", "Compare numbers."),
    ast.LShift: _NO_BITS,
    ast.RShift: _NO_BITS,
    ast.BitAnd: _NO_BITS,
    ast.BitOr: _NO_BITS,
    ast.BitXor: _NO_BITS,
    ast.Invert: _NO_BITS,
    ast.Is: ("'is' distinguishes a missing metric from None", "Write '=='."),
    ast.IsNot: ("'is not' distinguishes a missing metric from None", "Write '!='."),
    ast.In: ("there are no lists to look into", "Compare with each value."),
    ast.NotIn: ("there are no lists to look into", "Compare with each value."),
    ast.Lambda: ("functions cannot be made", "Write an expression of metrics."),
    ast.NamedExpr: ("nothing can be assigned", "Write '==' to compare."),
    ast.ListComp: _NO_LOOPS,
    ast.SetComp: _NO_LOOPS,
    ast.DictComp: _NO_LOOPS,
    ast.GeneratorExp: _NO_LOOPS,
    ast.List: _NO_LISTS,
    ast.Tuple: _NO_LISTS,
    ast.Set: _NO_LISTS,
    ast.Dict: _NO_LISTS,
    ast.Slice: ("there are no slices", "Use an index, or a window in a rule of this language: mean(loss, 5) > 2."),
    ast.Starred: _NO_LISTS,
    ast.JoinedStr: ("there are no texts", "Compare numbers."),
    ast.Await: ("there is nothing to wait for", "Write an expression of metrics."),
    ast.Yield: ("there is nothing to yield to", "Write an expression of metrics."),
    ast.YieldFrom: ("there is nothing to yield to", "Write an expression of metrics."),
}
_CALLS: Mapping[str, tuple[str, str]] = {
    "rand": ("a random number differs on every rank", "Leave it out."),
    "randint": ("a random number differs on every rank", "Leave it out."),
    "sum": ("there is no sum of a window", "Write a rule of this language: mean(loss, 5) > 2."),
    "round": ("nothing is rounded here", "Compare the number itself, with bounds: 1.5 <= x < 2.5 for round(x) == 2."),
    "int": ("nothing is rounded here", "Compare the number itself, with bounds: 2 <= x < 3 for int(x) == 2."),
    "math_trunc": ("nothing is rounded here", "Compare the number itself, with bounds."),
    "math_floor": ("nothing is rounded here", "Compare the number itself, with bounds."),
    "math_ceil": ("nothing is rounded here", "Compare the number itself, with bounds."),
    "math_sqrt": ("there are no roots", "Compare the square: x*x > 4 for math_sqrt(x*x) > 2."),
    "str": ("there are no texts", "Compare numbers."),
    "len": ("there is the length of a window alone, compared with a number", 'Write len(w["metrics"]) > 0.'),
    "abs": ("abs takes one number", "Write abs(x)."),
    "float": ("float takes one number", "Leave it out."),
}


def refuse_node(node: ast.AST) -> ExpressionError | None:
    """Return the refusal of a node; None if the node itself is acceptable."""
    kind: ast.AST = node
    if isinstance(node, (ast.BinOp, ast.UnaryOp)):
        kind = node.op
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        return refuse("there are no texts", "Texts are keys of metrics alone.")
    if isinstance(node, ast.Constant) and isinstance(node.value, complex):
        return refuse("there are no complex numbers", "Compare numbers.")
    found = _NODES.get(type(kind))
    return refuse(*found) if found else None


def refuse_call(node: ast.Call) -> ExpressionError:
    """Return the refusal of a call."""
    if isinstance(node.func, ast.Name):
        name = node.func.id
        if name in _CALLS:
            return refuse(*_CALLS[name])
        remedy = "There are abs and len; others are of this language: docs/rules.md."
        return refuse(f"there is no function {name[:40]!r}", remedy, Code.UNKNOWN_FUNCTION)
    if isinstance(node.func, ast.Attribute):
        return refuse("a method can change or write what it belongs to", "Name metrics and numbers.")
    return refuse("only functions can be called", "Name metrics and numbers.")
