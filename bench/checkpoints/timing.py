"""What an action took."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    """Of one action: wall time, and CPU time of whoever did it."""

    wall_s: float
    cpu_s: float


def measured(action: Callable[[], T]) -> tuple[Cost, T]:
    """Do it, and say what it took this process and the children that it has waited for."""
    before_s, began = _cpu_s(), time.perf_counter()
    result = action()
    wall_s = time.perf_counter() - began
    return Cost(wall_s, _cpu_s() - before_s), result


def _cpu_s() -> float:
    """By the scheduler's account; `os.times` counts in hundredths of a second."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
