"""An interruption ends the demo, but never inside a held section; the tail of a log explains a failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.failure import Interrupts, log_tail


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield Interrupts()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_interruption_unwinds_the_demo(interrupts: Interrupts, number: signal.Signals) -> None:
    interrupts.install()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_a_held_section_runs_to_its_end_first(interrupts: Interrupts) -> None:
    interrupts.install()
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGTERM)
        done.append("outer")
    assert done == ["outer"]
    with interrupts.held():  # it was raised once; nothing is pending any more
        done.append("again")
    assert done == ["outer", "again"]


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log) == ""
    log.write_bytes(b"\n".join(b"line %d" % number for number in range(50)) + b"\n\xff\n")
    assert log_tail(log, 2) == "line 49\n\ufffd"
