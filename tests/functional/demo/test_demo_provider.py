"""The providers of the demo of fleets, with real processes: a host can be lost, and no machine outlives the demo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from baton.contract.fleets.fleet import Budget, FleetSpec
from demo.failure import DemoError
from demo.fleet import provider
from demo.fleet.agents import HostedAgents
from demo.fleet.provider import DemoProviders
from functions.fleet.drivers.protocol import Ambiguous, Created, CreateIntent
from functions.fleet.drivers.salad.driver import SaladDriver
from functions.fleet.drivers.vast.driver import VastDriver
from tests.kits.waiting import until

pytestmark = pytest.mark.processes

WITH_A_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("works", flush=True)
time.sleep(60)
"""
SPEC = FleetSpec(
    name="demo", providers=["vast", "salad"], image="i", disk_gib=8, market="on-demand", max_usd_per_hour=1,
    budget=Budget(total_usd=3),
)  # fmt: skip


def test_a_host_is_lost_with_all_processes_and_no_machine_outlives_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "baton-machines-1").mkdir()
    logs = tmp_path / "logs"
    logs.mkdir()
    program = (sys.executable, "-c", WITH_A_CHILD)
    monkeypatch.setattr(
        provider, "HostedAgents", lambda directory, logs, offer: HostedAgents(directory, logs, offer, program)
    )
    with DemoProviders(tmp_path, logs, speed=3600) as providers:
        vast = VastDriver(providers.vast_account(), now=providers.clock)
        salad = SaladDriver(providers.salad_account(), now=providers.clock)

        def create(driver: VastDriver | SaladDriver, token: str) -> object:
            offer = min(driver.quote(SPEC), key=lambda one: one.usd_per_hour)
            return driver.create(
                CreateIntent(
                    token=token, offer=offer, image="i", disk_gib=8, environment={"A": "1"}, max_usd_per_hour=1
                )
            )

        providers.lose_next_answer()
        assert isinstance(create(vast, "dep-1"), Ambiguous)
        assert isinstance(create(salad, "dep-2"), Created)
        until(lambda: len(providers.processes()) == 4)
        assert providers.lose_host("dep-1") == 2
        assert len(providers.processes()) == 2
        with pytest.raises(DemoError, match="machine dep-1 left before it could be killed"):
            providers.lose_host("dep-1")
        assert providers.listed() == 2, "the provider keeps a machine that has vanished until it is destroyed"
        first, second = providers.bills(0)
        assert (first.token, first.host, first.ended) == ("dep-1", "vast host 101", False)
        assert second.charged_usd > 0 and second.host == "salad node"
        assert salad.destroy("dep-2")
        until(lambda: not providers.processes())
    assert providers.processes() == []
    assert "works" in (logs / "vast-host-101.log").read_text()
