"""Vast.ai's own client, aimed at the fake: what the client accepts, the fake says as Vast.ai does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.vast.market import FakeAsk
from fakes.vast.provider import KEY, FakeVast
from tests.kits.clock import Clock
from tests.vendors.environment import run_client

COMMAND = "from vastai.cli.main import main; main()"
RENT = """
import json
from vastai import VastAI

vast = VastAI(retry=1)
said = {}
said["offers"] = vast.search_offers("gpu_name=RTX_4090 num_gpus=1 gpu_ram>=20 dph_total<1")
said["bids"] = vast.search_offers("num_gpus=1", type="bid", order="dph_total")
made = vast.create_instance(7, image="registry.example/agent:1", disk=20, label="mine", env={"A": "b"}, runtype="args")
said["made"] = made
handle = made["new_contract"]
said["listed"] = vast.show_instances()
said["shown"] = vast.show_instance(handle)
said["logs"] = vast.logs(handle)
said["user"] = vast.show_user()
said["charges"] = vast.show_invoices_v1(charges=True, start_date="2023-11-10")
said["destroyed"] = vast.destroy_instance(handle)
said["afterwards"] = [vast.show_instances(), vast.show_instance(handle)]
print(json.dumps(said))
"""
pytestmark = pytest.mark.processes


class Client:
    """Programs on Vast.ai's client."""

    def __init__(self, fake: FakeVast, home: Path) -> None:
        self.fake = fake
        self._home = home

    def run(self, *arguments: str) -> str:
        environment = {"VAST_URL": self.fake.url, "VAST_API_KEY": KEY, "VASTAI_NO_UPDATE_CHECK": "1"}
        done = run_client("vast", "-c", *arguments, home=self._home, environment=environment)
        assert not done.stderr, done.stderr
        return done.stdout


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    clock = Clock(1_700_000_000)
    fake = FakeVast(clock, [FakeAsk(7, 1), FakeAsk(8, 2, verified=False), FakeAsk(9, 3, usd_per_hour=9.0)])
    fake.boot_s = fake.log_after_s = fake.visible_after_s = 0
    # The program's calls follow each other at once by the clock of the fake.
    fake.intervals_s.clear()
    with fake:
        yield Client(fake, tmp_path)


def test_the_client_rents_watches_and_destroys_an_instance(client: Client) -> None:
    said: dict[str, Any] = json.loads(client.run(RENT))
    assert [one["id"] for one in said["offers"]] == [7]
    assert [(one["id"], one["is_bid"]) for one in said["bids"]] == [(7, True), (9, True)]
    handle = said["made"]["new_contract"]
    (row,) = said["listed"]
    assert (row["id"], row["label"], row["actual_status"], row["extra_env"]) == (handle, "mine", "running", {"A": "b"})
    assert said["shown"]["dph_total"] == pytest.approx(0.405)
    assert (said["logs"], said["user"]["email"]) == ("started\n", "ada@example.com")
    assert [one["source"] for one in said["charges"]["results"]] == [f"instance-{handle}"]
    assert (said["destroyed"]["success"], said["afterwards"]) == (True, [[], None])
    assert (client.fake.labels(), client.fake.meter.billing()) == ([], [])


def test_the_command_line_searches_offers_lists_instances_and_accepts_a_price(client: Client) -> None:
    (offer,) = json.loads(client.run(COMMAND, "search", "offers", "num_gpus=1 dph_total<1", "--raw"))
    create = ("create", "instance", str(offer["id"]), "--image", "registry.example/agent:1", "--disk", "20", "--args")
    assert "Started." in client.run(COMMAND, *create)
    (instance,) = client.fake.instances
    client.fake.raise_price(instance.handle, 0.5)
    pending = client.run(COMMAND, "show", "pending-price-increases", "--quiet").split()
    assert "Accepted 1" in client.run(COMMAND, "accept", "price-increase", instance.handle, "--yes") and pending
    assert instance.accepted_usd_per_hour == 0.5
