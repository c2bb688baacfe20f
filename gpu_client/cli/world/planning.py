"""Compute bytes, duration and inner steps of the rounds of an elastic training. Pure.

Each member sends its share of each delta to the owners, and each owner sends its averages to all: 2 (n - 1) / n encoded
values for each parameter and member, in each direction. The formulas and the efficiency of a link come from
`bench/elastic`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BYTES_PER_VALUE = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 2 / 512, "int4": 0.5 + 2 / 64}
"""Encoded bytes of one value: int8 has one bfloat16 scale for 512 values, int4 one for 64 values."""
LINK_EFFICIENCY = 0.9
"""Part of a link's rate that a reduce uses."""
BLOCKING_UTILIZATION = 0.95
OVERLAPPED_SHARE = 0.8
"""Largest part of the inner steps' time that an overlapped reduce should take."""
HOST_BYTES_PER_VALUE = 16
"""Memory of a node for each parameter: outer parameters, momentum, delta and average, float32 each."""
INT4_HOST_BYTES_PER_VALUE = HOST_BYTES_PER_VALUE + 8
"""Memory of a node for each parameter with int4: two tensors of rounding errors in addition."""


@dataclass(frozen=True)
class RoundPlan:
    """Cost of a round with one codec.

    blocking_steps: inner steps for 95 % utilization while the training waits for each round. overlapped_steps: inner
    steps that hide the reduce.
    """

    codec: str
    sent_bytes: float
    reduce_s: float
    blocking_steps: int
    overlapped_steps: int


def plan_rounds(parameters: float, nodes: int, uplink_mbit_s: float, step_s: float) -> list[RoundPlan]:
    """Return the plan of each codec for a model of `parameters` trained values.

    uplink_mbit_s: rate of the slowest node, in each direction. step_s: duration of one inner step.
    """
    plans = []
    for codec, bytes_per_value in BYTES_PER_VALUE.items():
        sent_bytes = 2 * (nodes - 1) / nodes * bytes_per_value * parameters
        reduce_s = sent_bytes * 8 / (uplink_mbit_s * 1e6 * LINK_EFFICIENCY)
        blocking_s = reduce_s * BLOCKING_UTILIZATION / (1 - BLOCKING_UTILIZATION)
        plans.append(
            RoundPlan(
                codec,
                sent_bytes,
                reduce_s,
                max(1, math.ceil(blocking_s / step_s)),
                max(1, math.ceil(reduce_s / OVERLAPPED_SHARE / step_s)),
            )
        )
    return plans
