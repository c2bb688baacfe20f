"""What generators of the end-to-end tests make, as slow as a test wants it: `shapes_of_ring:make`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np


def make(seed: int, cost_s: float = 0.0) -> dict[str, Any]:
    time.sleep(cost_s)
    return {"x": np.full(100, float(seed)), "seed": np.array(float(seed))}
