"""From an expression's text to its words. One pass, no backtracking: the time is that of the text's length."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from baton.contract.rules.faults import Code, ExpressionError
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
    """A word; `kind` is number, name, op or end."""

    kind: str
    text: str
    offset: int
    unit: str = ""


def tokens_of(text: str, limits: Limits = LIMITS) -> Iterator[Token]:
    """The words, closed by one of kind `end`, one at a time: who has read enough of them reads no more.

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
    """Each number and name is a part of the tree: too many of them are refused before any is looked at."""
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
