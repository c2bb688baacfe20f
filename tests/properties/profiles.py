"""Define the depth of the property tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

DEEP = os.environ.get("DEEP_PROPERTIES") == "1"
"""True in a deep run. The name has no BATON_ prefix: tests start without such variables."""


def machine_settings(*, runs: int, steps: int) -> settings:
    """Return settings with the same examples in every run; with DEEP_PROPERTIES=1, 20 times as many new ones."""
    return settings(
        max_examples=runs * 20 if DEEP else runs,
        stateful_step_count=steps,
        derandomize=not DEEP,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
