"""How deep the property tests look."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

DEEP = os.environ.get("DEEP_PROPERTIES") == "1"
"""Not one of the product's own variables: tests start without those."""


def machine_settings(*, runs: int, steps: int) -> settings:
    """The same choices in every run, unless asked for depth: then 20 times as many, and new ones each time."""
    return settings(
        max_examples=runs * 20 if DEEP else runs,
        stateful_step_count=steps,
        derandomize=not DEEP,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
