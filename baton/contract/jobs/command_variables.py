"""Substitute the variables of a job's command: `$BATON_NAME`, `${BATON_NAME}` and `${BATON_NAME:+WORD}`.

`${BATON_NAME:+WORD}` becomes `WORD` if the variable has a value, and nothing if the variable is empty. `WORD` may
contain `$BATON_...` and `${BATON_...}`, and otherwise any text without braces. The command omits an argument that
becomes empty by `:+`. Variables that the worker does not set, and all other text, stay unchanged. No shell is involved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_NAME = r"BATON_[A-Z_]+"
_PLAIN = re.compile(rf"\$(?:\{{({_NAME})\}}|({_NAME}))")
_WHEN_SET = re.compile(rf"\$\{{({_NAME}):\+((?:[^{{}}]|\$\{{{_NAME}\}})*)\}}")
_BEGINNING = re.compile(rf"\$\{{{_NAME}:")

FORM = "${BATON_NAME:+WORD}, WORD without braces but for ${BATON_NAME}"


def substituted(text: str, variables: Mapping[str, str]) -> str:
    """Return the text with its variables replaced."""

    def word(found: re.Match[str]) -> str:
        value = variables.get(found[1])
        return found[0] if value is None else found[2] if value else ""

    return _PLAIN.sub(lambda found: variables.get(found[1] or found[2], found[0]), _WHEN_SET.sub(word, text))


def substituted_arguments(command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Return the command with its variables replaced, without the arguments that became empty by `:+`."""
    replaced = ((argument, substituted(argument, variables)) for argument in command)
    return [text for argument, text in replaced if text or not _WHEN_SET.search(argument)]


def command_problem(command: Sequence[str]) -> str:
    """Return the first fault of the command's `:+` forms; "" if there is none.

    The check reads only arguments that begin with such a form, because braces elsewhere may belong to a shell script.
    """
    for number, argument in enumerate(command):
        if not _BEGINNING.match(argument):
            continue
        if not _WHEN_SET.match(argument):
            return f"item {number}, {argument[:80]!r}, is not of the form {FORM}"
        if number == 0:
            return f"item 0, {argument[:80]!r}, must name a program whether or not the variable is set"
    return ""
