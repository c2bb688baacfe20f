"""Test reports of damaged ring objects through the agent: each once, bounded, untrusted."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from baton.contract.worker.control import MAX_PLACE_CHARS, Decision
from gpu_client.agent.control import control_relay
from gpu_client.agent.control.control_relay import MAX_QUARANTINED_REPORTED, ControlRelay
from tests.unit.agent.agent_kit import make_answer
from tests.unit.agent.test_control_relay import decision, relay_of, say


def quarantined(number: int, **more: Any) -> dict[str, Any]:
    key = f"samples/w/00000001-{number:010d}"
    return {"type": "quarantined", "ring": "/mnt/ring", "object": key, "message": "altered", "rank": 0, **more}


def all_told(relay: ControlRelay) -> list[Decision]:
    """Return every decision that heartbeats take."""
    found = []
    while decisions := (report := relay.report()).decisions:
        found += decisions
        relay.acknowledge(report, make_answer())
    return found


def test_an_object_is_told_once_with_the_step_that_was_reported_last() -> None:
    relay, channel = relay_of()
    relay.attach(channel, base=1000)  # type: ignore[arg-type]
    channel.at_step = 7
    said = [quarantined(1), quarantined(1, rank=1), quarantined(1, ring="s3://bucket/ring", rank=3)]
    say(relay, channel, decision(5), *said, quarantined(1))
    first, second, third = all_told(relay)
    assert (first.type, first.number) == ("rule.fired", 1)
    assert second == Decision(
        number=2,
        type="ring.quarantined",
        step=1007,
        at=1_790_000_000,
        ring="/mnt/ring",
        object="samples/w/00000001-0000000001",
        objects=1,
        message="altered",
    )
    assert (third.ring, third.rank, third.objects) == ("s3://bucket/ring", 3, 2)
    say(relay, channel, *said)
    assert all_told(relay) == []


def test_before_anything_was_reported_the_step_is_the_first_one() -> None:
    relay, channel = relay_of()
    say(relay, channel, quarantined(1))
    assert [one.step for one in all_told(relay)] == [0]


def test_of_many_it_is_told_how_many_there_are() -> None:
    relay, channel = relay_of()
    for number in range(1, 1001):
        say(relay, channel, quarantined(number))
    counts = [one.objects for one in all_told(relay)]
    assert counts == [*range(1, MAX_QUARANTINED_REPORTED + 1), 40, 80, 160, 320, 640]
    relay.detach()
    (last,) = all_told(relay)
    assert (last.objects, last.object) == (1000, "samples/w/00000001-0000001000")
    relay.detach()
    assert all_told(relay) == [], "nothing is left to be told"


def test_so_many_are_counted_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_relay, "MAX_QUARANTINED", 30)
    relay, channel = relay_of()
    for number in range(1, 100):
        say(relay, channel, quarantined(number))
    relay.detach()
    assert all_told(relay)[-1].objects == 30


@pytest.mark.parametrize(
    "wrong",
    [
        {"object": "k" * (MAX_PLACE_CHARS + 1)},
        {"object": ""},
        {"object": None},
        {"object": 7},
        {"object": ["k"]},
        {"object": "\ud800"},
        {"ring": "r" * (MAX_PLACE_CHARS + 1)},
        {"ring": {}},
        {"rank": -1},
        {"rank": "first"},
        {"rank": None},
        {"message": "\ud800"},
    ],
)
def test_what_is_no_object_is_not_passed_on(wrong: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    relay, channel = relay_of()
    without = quarantined(3)
    del without["object"]
    with caplog.at_level(logging.WARNING):
        say(relay, channel, quarantined(1, **wrong), without, quarantined(2, message="m" * 5000))
    assert "ignored a message of the training" in caplog.text
    (told,) = all_told(relay)
    assert (told.number, told.objects, told.object) == (1, 1, quarantined(2)["object"])
    assert told.message == "m" * 1024
