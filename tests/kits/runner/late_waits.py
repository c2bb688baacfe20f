"""Pytest plugin that delays returns from `until` at random, to find tests that assume a fast test process.

    .venv/bin/python -m pytest -p tests.kits.runner.late_waits tests/e2e

On a busy machine they do so by themselves, and seldom; LATE_WAITS_SEED chooses other waits. Not in CI: some tests
measure time.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

from tests.kits import waiting

MOST_S = 4.0

_chance = random.Random(int(os.environ.get("LATE_WAITS_SEED", "1")) * 1_000_003 + os.getpid())
_sleep = time.sleep  # tests replace it
_quick = waiting.until


def _late(condition: Callable[[], Any], *given: Any, **named: Any) -> Any:
    found = _quick(condition, *given, **named)
    if _chance.random() < 0.5:
        _sleep(_chance.random() * MOST_S)
    return found


waiting.until = _late  # before anything imports it
