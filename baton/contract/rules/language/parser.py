"""Parser: expression text becomes tokens in one pass without backtracking, then a syntax tree (Pratt parser).

Limits bound the text's length, the number of nodes and the depth.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from baton.contract.rules.language.faults import Code, ExpressionError
from baton.contract.rules.language.syntax_tree import (
    BINDING,
    COMPARE,
    COMPARISONS,
    NOT,
    SIGN,
    Binary,
    Comparison,
    FunctionCall,
    Logic,
    Name,
    Node,
    Number,
    Truth,
    Unary,
    measure_depth,
)
from baton.contract.rules.limits import LIMITS, MAX_NAME_CHARS, MAX_NUMBER_CHARS, Limits

WORDS = frozenset(("and", "or", "not", "true", "false"))
_TOKEN = re.compile(
    r"[ \t\r\n]*(?:"
    r"((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)([A-Za-z_][A-Za-z0-9_]*)?"
    r"|([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)"
    r"|([-+%(),]|[*](?![*])|/(?!/)|<=|>=|<(?!<)|>(?!>)|==|!=)"
    r"|\Z)"
)
_OPERANDS = re.compile(
    r"(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)?[A-Za-z_][A-Za-z0-9_.]*"
    r"|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
)
_NUMBER, _UNIT, _NAME, _OPERATOR = 1, 2, 3, 4
_FOREIGN = {
    "**": ("there are no powers", "Multiply."),
    "//": ("there is no whole division", "Divide with '/'."),
    "<<": ("there are no shifts", "Multiply."),
    ">>": ("there are no shifts", "Divide."),
    ":=": ("nothing can be assigned", "Write an expression that is true or false."),
    "&&": ("'&&' is no operator", "Write 'and'."),
    "||": ("'||' is no operator", "Write 'or'."),
    "=": ("'=' compares nothing", "Write '=='."),
    "!": ("'!' is no operator", "Write 'not'."),
    "&": ("there are no bit operators", "Write 'and'."),
    "|": ("there are no bit operators", "Write 'or'."),
    "^": ("there are no bit operators", "Write 'and', 'or', 'not'."),
    "~": ("there are no bit operators", "Write 'not'."),
    "[": ("there is no indexing and there are no lists", "Use a window: mean(loss, 50), delta(loss, 5)."),
    "]": ("there is no indexing and there are no lists", "Use a window: mean(loss, 50), delta(loss, 5)."),
    "{": ("there are no mappings and no sets", "Write metrics by their names."),
    "'": ("there are no texts", "Write metrics without quotes."),
    '"': ("there are no texts", "Write metrics without quotes."),
    ".": ("a name does not begin or end with '.'", "Write it like eval.loss."),
    ";": ("there is one expression, without statements", "Join conditions with 'and'."),
    "\\": ("lines need no '\\'", "Leave it out."),
}


class Token(NamedTuple):
    """A token; `kind` is number, name, op or end."""

    kind: str
    text: str
    offset: int
    unit: str = ""


def tokenize(text: str, limits: Limits = LIMITS) -> Iterator[Token]:
    """Yield tokens lazily, closed by one of kind `end`, so that an early fault stops the scan.

    Raises ExpressionError.
    """
    if len(text) > limits.text_chars:
        reason = f"the expression has {len(text)} characters; at most {limits.text_chars} are allowed"
        raise ExpressionError(Code.TOO_LARGE, reason, "Split it into several rules.", 0)
    if len(text) > 2 * limits.nodes:
        _require_few(text, limits)
    next_of, offset = _TOKEN.match, 0
    while True:
        match = next_of(text, offset)
        if match is None:
            raise _foreign(text, offset)
        kind, offset = match.lastindex, match.end()
        if kind == _NAME:
            name = match[_NAME]
            if len(name) > MAX_NAME_CHARS:
                reason = f"a name has {len(name)} characters; at most {MAX_NAME_CHARS} are allowed"
                raise ExpressionError(Code.TOO_LARGE, reason, "Give the metric a shorter name.", match.start(_NAME))
            yield Token("name", name, offset - len(name))
        elif kind == _OPERATOR:
            operator = match[_OPERATOR]
            yield Token("op", operator, offset - len(operator))
        elif kind is None:
            yield Token("end", "", len(text))
            return
        else:
            yield _number(match, match.start(_NUMBER))


def _require_few(text: str, limits: Limits) -> None:
    """Refuse a text with too many operands before any node is built; each operand is one node."""
    operands = 0
    for operand in _OPERANDS.finditer(text):
        operands += operand[0] not in ("and", "or")
        if operands > limits.nodes:
            reason = f"the expression has more than {limits.nodes} parts"
            raise ExpressionError(Code.TOO_LARGE, reason, "Split it into several rules.", operand.start())


def _number(match: re.Match[str], offset: int) -> Token:
    if len(match[_NUMBER]) > MAX_NUMBER_CHARS:
        reason = f"a number has {len(match[_NUMBER])} characters; at most {MAX_NUMBER_CHARS} are allowed"
        raise ExpressionError(Code.TOO_LARGE, reason, "Round it.", offset)
    if float(match[_NUMBER]) == float("inf"):
        raise ExpressionError(Code.SYNTAX, "the number is too large", "Write inf, or a smaller one.", offset)
    return Token("number", match[_NUMBER], offset, match[_UNIT] or "")


def _foreign(text: str, offset: int) -> ExpressionError:
    offset += len(text[offset:]) - len(text[offset:].lstrip(" \t\r\n"))
    for length in (2, 1):
        known = _FOREIGN.get(text[offset : offset + length])
        if known:
            return ExpressionError(Code.SYNTAX, *known, offset)
    reason = f"the character {text[offset]!a} means nothing here"
    return ExpressionError(Code.SYNTAX, reason, "Leave it out.", offset)


_FOREIGN_WORDS = {
    "if": "Write 'a and b or c', or two rules.",
    "else": "Write 'a and b or c', or two rules.",
    "in": "Compare with each value.",
    "is": "Write '=='; missing(x) tests for a value that is not there.",
    "lambda": "There are only the functions of docs/rules.md.",
    "for": "Use a window: mean(loss, 50).",
    "None": "missing(x) tests for a value that is not there.",
    "null": "missing(x) tests for a value that is not there.",
    "True": "Write 'true'.",
    "False": "Write 'false'.",
    "AND": "Write 'and'.",
    "OR": "Write 'or'.",
    "NOT": "Write 'not'.",
}


def parse(text: str, limits: Limits = LIMITS) -> Node:
    """Parse an expression into its syntax tree. Raises ExpressionError."""
    return _Parser(tokenize(text, limits), limits).whole()


class _Parser:
    def __init__(self, tokens: Iterator[Token], limits: Limits) -> None:
        self._tokens = tokens
        self._next = next(tokens)
        self._limits = limits
        self._nodes = 0
        self._level = 0

    def whole(self) -> Node:
        if self._next.kind == "end":
            raise ExpressionError(Code.SYNTAX, "the expression is empty", "Write one like loss > 4.", 0)
        found = self._expression(0)
        if self._next.kind != "end":
            raise self._unexpected()
        if measure_depth(found) > self._limits.depth:
            raise self._too_deep(0)
        return found

    def _take(self) -> Token:
        """Consume the next token; the end token remains."""
        token = self._next
        if token.kind != "end":
            self._next = next(self._tokens)
        return token

    def _skip(self, text: str) -> bool:
        if self._next.kind == "op" and self._next.text == text:
            self._take()
            return True
        return False

    def _count(self, node: Node) -> Node:
        self._nodes += 1
        if self._nodes > self._limits.nodes:
            reason = f"the expression has more than {self._limits.nodes} parts"
            raise ExpressionError(Code.TOO_LARGE, reason, "Split it into several rules.", node.offset)
        return node

    def _expression(self, binding: int) -> Node:
        """Parse operators that bind at least as tightly as `binding`."""
        self._level += 1
        # Parentheses create no node, therefore the recursion has its own bound.
        if self._level > 2 * self._limits.depth:
            raise self._too_deep(self._next.offset)
        left = self._operand()
        while (found := self._binding()) and found >= max(binding, 1):
            left = self._infix(left, found)
        self._level -= 1
        return left

    def _binding(self) -> int | None:
        token = self._next
        return BINDING.get(token.text) if token.kind in ("op", "name") else None

    def _infix(self, left: Node, binding: int) -> Node:
        token = self._next
        if binding == COMPARE:
            operators, operands = [], [left]
            while self._next.kind == "op" and self._next.text in COMPARISONS:
                operators.append(self._take().text)
                operands.append(self._expression(binding + 1))
            return self._count(Comparison(tuple(operators), tuple(operands), token.offset))
        if token.kind == "name":
            operands = [left]
            while self._next.kind == "name" and self._next.text == token.text:
                self._take()
                operands.append(self._expression(binding + 1))
            return self._count(Logic(token.text, tuple(operands), token.offset))
        self._take()
        return self._count(Binary(token.text, left, self._expression(binding + 1), token.offset))

    def _operand(self) -> Node:
        token = self._next
        if token.kind == "number":
            self._take()
            return self._count(Number(float(token.text), token.unit, token.offset))
        if token.kind == "name":
            return self._named(token)
        if token.kind == "op" and token.text in ("-", "+"):
            self._take()
            return self._count(Unary(token.text, self._expression(SIGN), token.offset))
        if token.text == "(":
            self._take()
            inner = self._expression(0)
            self._close(token)
            return inner
        raise self._unexpected()

    def _named(self, token: Token) -> Node:
        if token.text in WORDS and token.text not in ("not", "true", "false"):
            raise self._unexpected()
        if token.text in _FOREIGN_WORDS:
            raise ExpressionError(
                Code.SYNTAX, f"there is no '{token.text}' here", _FOREIGN_WORDS[token.text], token.offset
            )
        self._take()
        if token.text == "not":
            return self._count(Unary("not", self._expression(NOT), token.offset))
        if token.text in ("true", "false"):
            return self._count(Truth(token.text == "true", token.offset))
        if not self._skip("("):
            return self._count(Name(token.text, token.offset))
        arguments: list[Node] = []
        while not self._skip(")"):
            arguments.append(self._expression(0))
            if not self._skip(","):
                self._close(token)
                break
        return self._count(FunctionCall(token.text, tuple(arguments), token.offset))

    def _close(self, opened: Token) -> None:
        if not self._skip(")"):
            if self._next.kind == "end":
                reason = "a parenthesis is not closed"
                raise ExpressionError(Code.SYNTAX, reason, "Add ')'.", opened.offset)
            raise self._unexpected()

    def _unexpected(self) -> ExpressionError:
        token = self._next
        if token.kind == "end":
            return ExpressionError(Code.SYNTAX, "the expression ends too early", "Complete it.", token.offset)
        known = _FOREIGN_WORDS.get(token.text)
        if known and token.kind == "name":
            return ExpressionError(Code.SYNTAX, f"there is no '{token.text}' here", known, token.offset)
        if token.text == "(":
            return ExpressionError(
                Code.SYNTAX, "only functions can be called", "Write one like mean(loss, 50).", token.offset
            )
        text = token.text + token.unit
        reason = f"'{text}' is not expected here"
        remedy = "Put an operator before it." if token.kind in ("number", "name") else "Leave it out, or complete it."
        return ExpressionError(Code.SYNTAX, reason, remedy, token.offset)

    def _too_deep(self, offset: int) -> ExpressionError:
        reason = f"the expression is nested deeper than {self._limits.depth} levels"
        return ExpressionError(Code.TOO_LARGE, reason, "Split it into several rules.", offset)
