"""The provider of the demo of fleets, with real processes: a host can be lost, and no machine outlives the demo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from demo.failure import DemoError
from demo.fleet.offers import make_offers
from demo.fleet.provider import LocalProvider
from functions.fleet.drivers.loopback import LoopbackDriver
from functions.fleet.drivers.protocol import Ambiguous, Created, CreateIntent
from tests.kits.waiting import until

pytestmark = pytest.mark.processes

WITH_A_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("works", flush=True)
time.sleep(60)
"""


def test_a_host_is_lost_with_all_processes_and_no_machine_outlives_the_demo(tmp_path: Path) -> None:
    directory, logs = tmp_path / "baton-machines-1", tmp_path / "logs"
    logs.mkdir()
    driver = LoopbackDriver(directory, now=lambda: 1000, program=(sys.executable, "-c", WITH_A_CHILD))
    offers = make_offers()
    with LocalProvider(tmp_path, logs) as provider:
        provider.sell(offers, lost_answers=1)
        answers = [
            driver.create(
                CreateIntent(token=token, offer=offer, image=None, disk_gib=1, environment={}, max_usd_per_hour=1)
            )
            for token, offer in zip(("m1", "m2"), offers, strict=False)
        ]
        assert [type(one) for one in answers] == [Ambiguous, Created]
        until(lambda: len(provider.processes()) == 4)
        assert provider.lose_host("m1") == 2
        assert len(provider.processes()) == 2
        with pytest.raises(DemoError, match="machine m1 left before it could be killed"):
            provider.lose_host("m1")
        assert provider.listed() == 2, "the provider bills a machine that has vanished until it is destroyed"
        first = next(bill for bill in provider.bills(1000 + 3600) if bill.token == "m1")
        assert (first.host, first.ended, first.charged_usd) == ("cheap-1", False, 0.25)
    assert provider.processes() == []
    assert not any(driver.runs(machine) for machine in driver.machines())
    assert "works" in (logs / "cheap-2.log").read_text()
