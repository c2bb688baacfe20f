"""From an expression's text to its words. One pass, no backtracking: the time is that of the text's length."""

from __future__ import annotations

import re
from typing import NamedTuple

from contract.rules.faults import Code, ExpressionError
from contract.rules.limits import LIMITS, MAX_NAME_CHARS, MAX_NUMBER_CHARS, Limits

WORDS = frozenset(("and", "or", "not", "true", "false"))
_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+)"
    r"|(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(?P<unit>[A-Za-z_][A-Za-z0-9_]*)?"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)"
    r"|(?P<op>==|!=|<=|>=|[-+*/%<>(),])"
)
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


def tokens_of(text: str, limits: Limits = LIMITS) -> list[Token]:
    """The words, closed by one of kind `end`. Raises ExpressionError."""
    if len(text) > limits.text_chars:
        reason = f"the expression has {len(text)} characters; at most {limits.text_chars} are allowed"
        raise ExpressionError(Code.TOO_LARGE, reason, "Split it into several rules.", 0)
    found: list[Token] = []
    offset = 0
    while offset < len(text):
        match = _TOKEN.match(text, offset)
        if match is None or (match["op"] and text[offset : offset + 2] in _FOREIGN):
            raise _foreign(text, offset)
        if match["number"]:
            found.append(_number(match, offset))
        elif match["name"]:
            if len(match["name"]) > MAX_NAME_CHARS:
                reason = f"a name has {len(match['name'])} characters; at most {MAX_NAME_CHARS} are allowed"
                raise ExpressionError(Code.TOO_LARGE, reason, "Give the metric a shorter name.", offset)
            found.append(Token("name", match["name"], offset))
        elif match["op"]:
            found.append(Token("op", match["op"], offset))
        offset = match.end()
    found.append(Token("end", "", len(text)))
    return found


def _number(match: re.Match[str], offset: int) -> Token:
    if len(match["number"]) > MAX_NUMBER_CHARS:
        reason = f"a number has {len(match['number'])} characters; at most {MAX_NUMBER_CHARS} are allowed"
        raise ExpressionError(Code.TOO_LARGE, reason, "Round it.", offset)
    if float(match["number"]) == float("inf"):
        raise ExpressionError(Code.SYNTAX, "the number is too large", "Write inf, or a smaller one.", offset)
    return Token("number", match["number"], offset, match["unit"] or "")


def _foreign(text: str, offset: int) -> ExpressionError:
    for length in (2, 1):
        known = _FOREIGN.get(text[offset : offset + length])
        if known:
            return ExpressionError(Code.SYNTAX, *known, offset)
    reason = f"the character {text[offset]!a} means nothing here"
    return ExpressionError(Code.SYNTAX, reason, "Leave it out.", offset)
