"""Train the shards of one data set on nodes that vanish."""

from __future__ import annotations

from tests.properties.data_machine import SharedData
from tests.properties.profiles import machine_settings

TestSharedData = SharedData.TestCase
TestSharedData.settings = machine_settings(runs=100, steps=30)
"""Cheap: the machine calls no store."""
