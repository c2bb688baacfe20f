"""Test damage reports: any process reports to the job's agent; without an agent nothing changes."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_client.agent.control.channel_server import ChannelServer
from gpu_client.ring.core import damage_report
from gpu_client.ring.core.damage_report import report_damage
from gpu_client.ring.core.repair import repair_ring
from gpu_client.ring.core.ring import make_ring, open_ring
from gpu_client.ring.errors import ObjectDamaged
from gpu_client.ring.format.records import SAMPLES
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.loader import RingLoader
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from tests.kits.waiting import soon

NOBODY: dict[str, str] = {}


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChannelServer]:
    with ChannelServer(tmp_path) as server:
        monkeypatch.setenv("BATON_CHANNEL", str(server.path))
        monkeypatch.delenv("RANK", raising=False)
        yield server


def ring_at(place: Path, **settings: Any) -> list[str]:
    """A ring of 8 samples, in the directory; the keys of its objects."""
    ring = make_ring(str(place), RingSettings(**{"cap": 8, "max_ahead": 1000, **settings}))
    with RingWriter(ring, "w", threads=False) as writer:
        for number in range(8):
            writer.put({"image": np.full(64, number), "label": np.float32(number)}, seed=number)
    return ring.store.keys(SAMPLES)


def flip(place: Path, key: str, at: int = -70) -> None:
    data = bytearray((place / key).read_bytes())
    data[at] ^= 1
    (place / key).unlink()
    (place / key).write_bytes(data)


def heard(agent: ChannelServer, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def enough() -> bool:
        found.extend(agent.take_steering())
        return len(found) >= count

    soon(enough)
    assert agent.errors() == {}
    return found


def test_a_damaged_sample_is_told_with_the_array_that_was_altered(tmp_path: Path, agent: ChannelServer) -> None:
    keys = ring_at(tmp_path / "ring")
    flip(tmp_path / "ring", keys[2], at=-200)
    with RingReader(open_ring(str(tmp_path / "ring")), threads=False) as reader:
        slot = reader.newest().slots[2]
        for _ in range(3):
            with pytest.raises(ObjectDamaged):
                reader.sample(slot)
    (told,) = heard(agent, 1)
    assert agent.take_steering() == [], "once"
    message = told.pop("message")
    assert told == {"type": "quarantined", "ring": str(tmp_path / "ring"), "object": keys[2], "rank": 0}
    assert message.startswith(f"{keys[2]} is damaged: the bytes from")
    assert message.endswith("were altered (sample['image'])")


def test_of_a_pack_it_is_told_which_sample(tmp_path: Path, agent: ChannelServer) -> None:
    keys = ring_at(tmp_path / "ring", pack=4)
    flip(tmp_path / "ring", keys[1], at=-64)
    with RingReader(open_ring(str(tmp_path / "ring")), threads=False) as reader:
        manifest = reader.newest()
        found = {int(reader.sample_or_another(slot, manifest)[0]["label"]) for slot in manifest.slots}
    assert 7 not in found
    (told,) = heard(agent, 1)
    assert told["object"] == keys[1] and told["message"].endswith("(sample['label'], number 3 of a pack)")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_s_damage_is_a_metric_and_told_by_whichever_process_met_it(
    tmp_path: Path, agent: ChannelServer, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    keys = ring_at(tmp_path / "ring")
    flip(tmp_path / "ring", keys[5])
    counts = []
    loader = RingLoader(str(tmp_path / "ring"), batch_size=2, workers=workers, multiprocessing_context="fork")
    for number, _ in enumerate(loader, 1):
        counts.append(loader.data_metrics()["ring.quarantined"])
        if number == 8:
            break
    assert counts == sorted(counts) and counts[0] in (0.0, 1.0) and counts[-1] == 1.0
    told = heard(agent, 1)
    assert {(one["object"], one["rank"]) for one in told} == {(keys[5], 3)}


def test_what_a_repair_leaves_out_is_told_too(tmp_path: Path, agent: ChannelServer) -> None:
    keys = ring_at(tmp_path / "ring")
    flip(tmp_path / "ring", keys[0])
    repair_ring(open_ring(str(tmp_path / "ring")))
    assert [one["object"] for one in heard(agent, 1)] == [keys[0]]


def test_any_process_of_the_job_can_tell(agent: ChannelServer) -> None:
    damage = ("/mnt/ring", "samples/w/1", "altered")
    process = multiprocessing.get_context("spawn").Process(target=report_damage, args=damage)
    process.start()
    process.join(60)
    assert [one["object"] for one in heard(agent, 1)] == ["samples/w/1"]


def test_without_an_agent_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not report_damage("/mnt/ring", "samples/w/1", "altered", NOBODY)
    assert not report_damage("/mnt/ring", "samples/w/1", "altered", {"BATON_CHANNEL": ""})
    assert caplog.text == ""


@pytest.mark.parametrize("path", ["nowhere", "x" * 200, "a\0b"])
def test_an_agent_that_is_gone_stops_nobody(tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture) -> None:
    assert not report_damage("/mnt/ring", "samples/w/1", "altered", {"BATON_CHANNEL": str(tmp_path / path)})
    assert "cannot be reported" in caplog.text


def test_an_agent_that_does_not_answer_stops_nobody_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage_report, "PATIENCE_S", 0.05)
    with socket.socket(socket.AF_UNIX) as deaf, socket.socket(socket.AF_UNIX) as first:
        deaf.bind(str(tmp_path / "deaf"))
        deaf.listen(0)
        first.connect(str(tmp_path / "deaf"))
        assert not report_damage("/mnt/ring", "samples/w/1", "altered", {"BATON_CHANNEL": str(tmp_path / "deaf")})


def test_what_is_too_long_is_cut(agent: ChannelServer) -> None:
    environment = {"BATON_CHANNEL": str(agent.path), "RANK": "first"}
    assert report_damage("r" * 9000, "k" * 9000, "\u00e9" * 90_000, environment)
    (told,) = heard(agent, 1)
    assert [len(told[name]) for name in ("ring", "object", "message")] == [512, 512, 1000]
    assert told["rank"] == 0
