"""The state machines on the memory twins: thousands of steps.

`DEEP_PROPERTIES=1` runs many times as many, with new random choices each time.
"""

from __future__ import annotations

from tests.properties.job_machine import JobMachine
from tests.properties.profiles import machine_settings
from tests.properties.tokens_machine import TokenMachine
from tests.twins.cloud import MemoryCloud


class MemoryJobMachine(JobMachine):
    """Jobs on dictionaries under one lock."""

    fresh = MemoryCloud


class MemoryTokenMachine(TokenMachine):
    """Tokens on the same."""

    fresh = MemoryCloud


TestJobMachine = MemoryJobMachine.TestCase
TestJobMachine.settings = machine_settings(runs=120, steps=60)

TestTokenMachine = MemoryTokenMachine.TestCase
TestTokenMachine.settings = machine_settings(runs=40, steps=40)
