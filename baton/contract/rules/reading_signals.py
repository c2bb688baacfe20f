"""The signals of a document: texts that are counted in what the training prints."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

from baton.contract.documents import Document, Location
from baton.contract.rules.faults import Code
from baton.contract.rules.metrics import SIGNALS
from baton.contract.rules.rule import Signal

MAX_SIGNALS = 16
MAX_SIGNAL_CHARS = 200
_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")


def read_signals(document: Document, said: Any, declared: Set[str]) -> list[Signal]:
    """Those that can be used; faults are noted of all others. `declared`: names of the user's own metrics."""
    place: Location = ("signals",)
    if said is None:
        return []
    if not isinstance(said, dict):
        remedy = "Write 'ecc: uncorrectable ECC error'."
        document.fault(place, "is no mapping of names to texts", remedy, code=Code.WRONG_SHAPE)
        return []
    if len(said) > MAX_SIGNALS:
        reason = f"there are {len(said)} signals; at most {MAX_SIGNALS} are allowed"
        document.fault(place, reason, "Leave some out.", code=Code.TOO_LARGE)
        return []
    return [one for name, text in said.items() if (one := _signal(document, name, text, declared)) is not None]


def _signal(document: Document, name: str, text: Any, declared: Set[str]) -> Signal | None:
    place: Location = ("signals", name)
    if not _NAME.fullmatch(name):
        remedy = "Use up to 31 lower-case letters, digits and '_', a letter first."
        document.fault(place, "cannot be a signal's name", remedy, code=Code.INVALID_VALUE)
        return None
    if SIGNALS + name in declared:
        reason = f"there is a metric {SIGNALS}{name} already"
        document.fault(place, reason, "Choose another name.", code=Code.DUPLICATE_NAME)
        return None
    # lines are looked through without control characters
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_SIGNAL_CHARS or not text.isprintable():
        remedy = f"Write what stands in the line: 1 to {MAX_SIGNAL_CHARS} printable characters."
        document.fault(place, "is no text of one line", remedy, code=Code.INVALID_VALUE)
        return None
    return Signal(name, text)
