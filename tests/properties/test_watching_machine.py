"""Rules of the control plane under disturbance: what they do is done once, and never lost."""

from __future__ import annotations

from tests.properties.profiles import machine_settings
from tests.properties.watching_machine import WatchedJob

TestWatchedJob = WatchedJob.TestCase
TestWatchedJob.settings = machine_settings(runs=40, steps=20)
