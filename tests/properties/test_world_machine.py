"""Worlds of elastic jobs: one membership for each epoch, and a majority behind each change."""

from __future__ import annotations

from tests.properties.profiles import machine_settings
from tests.properties.world_machine import World

TestWorld = World.TestCase
TestWorld.settings = machine_settings(runs=150, steps=40)
"""Cheap: the machine calls no store."""
