"""Wall and CPU time of an action."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    """Wall time of one action, and CPU time of the processes that did it."""

    wall_s: float
    cpu_s: float


def measured(action: Callable[[], T]) -> tuple[Cost, T]:
    """Run an action; returns the time of this process and of children that it waited for."""
    before_s, began = _cpu_s(), time.perf_counter()
    result = action()
    wall_s = time.perf_counter() - began
    return Cost(wall_s, _cpu_s() - before_s), result


def _cpu_s() -> float:
    """Read CPU seconds by the scheduler's account; `os.times` counts in hundredths of a second."""
    used = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
