"""Draws of Hypothesis that are the same whichever tests ran before.

Hypothesis also draws the literals of every module of the project that is loaded, so a test would draw one set of
examples alone and another one behind its neighbors.
"""

from __future__ import annotations

from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

_NONE = Constants()


def leave_out_constants_of_modules() -> None:
    """Let Hypothesis draw none of the literals of loaded modules. No setting of Hypothesis does so."""
    providers._get_local_constants = lambda: _NONE
