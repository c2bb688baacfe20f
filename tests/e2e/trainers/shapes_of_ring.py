"""Make samples for generators of the end-to-end tests, as slowly as a test wants: `shapes_of_ring:make`.

A gate counts the samples that a process makes.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import numpy as np

made = itertools.count()


def make(seed: int, cost_s: float = 0.0) -> dict[str, Any]:
    if os.environ.get("GATE"):
        import gate  # lies beside this file, where a test holds its generators

        gate.wait(next(made))
    time.sleep(cost_s)
    return {"x": np.full(100, float(seed)), "seed": np.array(float(seed))}
