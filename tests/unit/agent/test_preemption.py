"""Test the preemption notice against a metadata service that behaves like EC2's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from gpu_client.agent.app.preemption import Ec2Metadata, PreemptionMonitor, is_ec2
from gpu_client.agent.app.shutdown import ShutdownLevel, ShutdownRequest
from tests.kits.network.instance_metadata import MetadataService

NOTICE = '{"action": "terminate", "time": "2026-11-21T08:22:00Z"}'


@pytest.fixture
def metadata() -> Iterator[tuple[MetadataService, str]]:
    with MetadataService() as service:
        service.date = "Sat, 21 Nov 2026 08:20:01 GMT"
        yield service, service.url


def test_no_notice_then_one(metadata: tuple[MetadataService, str]) -> None:
    service, url = metadata
    notices = Ec2Metadata(url)
    assert notices.leave_within_s() is None
    service.status, service.body = 200, NOTICE
    assert notices.leave_within_s() == 119.0
    assert service.asked == ["token", *["/latest/meta-data/spot/instance-action"] * 2]


def test_a_token_that_has_run_out_is_renewed(metadata: tuple[MetadataService, str]) -> None:
    service, url = metadata
    notices = Ec2Metadata(url)
    notices.leave_within_s()
    service.token = "t2"
    assert notices.leave_within_s() is None
    assert service.asked.count("token") == 2


def test_a_notice_in_the_past_is_now(metadata: tuple[MetadataService, str]) -> None:
    service, url = metadata
    service.status, service.body, service.date = 200, NOTICE, "Sat, 21 Nov 2026 08:30:00 GMT"
    assert Ec2Metadata(url).leave_within_s() == 0.0


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"time": 5}', '{"time": "soon"}'])
def test_a_notice_that_cannot_be_read_is_one(metadata: tuple[MetadataService, str], body: str) -> None:
    service, url = metadata
    service.status, service.body = 200, body
    assert Ec2Metadata(url).leave_within_s() == 0.0


def test_trouble_is_no_notice(metadata: tuple[MetadataService, str]) -> None:
    service, url = metadata
    service.status = 500
    with pytest.raises(requests.RequestException):
        Ec2Metadata(url).leave_within_s()


def test_the_watch_passes_one_notice_on_and_survives_silence() -> None:
    answers: list[float | Exception | None] = [None, requests.ConnectionError("no route"), None, 119.0]
    told = threading.Event()
    heard: list[float] = []

    def ask() -> float | None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def on_notice(within_s: float) -> None:
        heard.append(within_s)
        told.set()

    with PreemptionMonitor(ask, on_notice, poll_s=0.0):
        assert told.wait(60)
    assert heard == [119.0]
    assert answers == []


def test_a_watch_without_a_notice_ends_with_its_agent() -> None:
    with PreemptionMonitor(lambda: None, lambda _: pytest.fail("there was none"), poll_s=60.0) as watch:
        pass
    assert not watch._thread.is_alive()


def test_the_machine_says_where_it_is(tmp_path: Path) -> None:
    vendor = tmp_path / "sys_vendor"
    assert not is_ec2(vendor)
    vendor.write_text("QEMU\n")
    assert not is_ec2(vendor)
    vendor.write_text("Amazon EC2\n")
    assert is_ec2(vendor)


def test_the_signal_that_follows_a_notice_does_not_hurry() -> None:
    now = 100.0
    stop = ShutdownRequest(lambda: now, shutdown_grace_s=30)
    stop.announce("spot notice", 119)
    assert (stop.level, stop.reason, stop.remaining_s()) == (ShutdownLevel.DRAIN, "spot notice", 119)
    now = 110.0
    assert stop.request("SIGTERM") is ShutdownLevel.DRAIN
    assert (stop.reason, stop.remaining_s(), stop.pending_s()) == ("spot notice", 30, 10)
    now = 112.0
    assert stop.request("SIGTERM") is ShutdownLevel.NOW
    now = 200.0
    assert stop.remaining_s() == 0


def test_without_a_known_grace_nobody_knows_when_the_machine_is_gone() -> None:
    stop = ShutdownRequest(lambda: 1.0)
    stop.request("SIGTERM")
    assert stop.remaining_s() is None
