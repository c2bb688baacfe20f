"""Test rates from successive states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_client.ring.tools.status import MAX_STATUSES, ProcessRate, RateTrend, ReaderRow, RingStatus, WriterRow

START = RingStatus(100.0, 10, "rolling", 1, 0, 0, 0, 0, None, None, 0, 0, {})


def writes(put: int, waited_s: float = 0.0) -> list[WriterRow]:
    return [WriterRow("w", True, put, put * 1000, 0, waited_s)]


def test_the_rates_of_the_ring() -> None:
    trend = RateTrend()
    trend.add(START)
    assert (trend.rates, trend.reuse) == ([], None)
    trend.add(replace(START, at=102.0, inserted=10, read=40))
    trend.add(replace(START, at=104.0, inserted=14, read=60))
    assert trend.rates == [(5.0, 20.0), (2.0, 10.0)]
    assert trend.reuse == pytest.approx(60 / 14)


def test_a_writer_tells_now_and_then_and_its_rate_is_of_that_time() -> None:
    trend = RateTrend()
    for second, put in ((0, 100), (1, 100), (2, 100), (5, 150), (6, 150)):
        trend.add(replace(START, at=100.0 + second, writers=writes(put, put / 50)))
    assert trend.writer("w") == ProcessRate(10.0, 10_000.0, 0.2)
    assert (trend.bytes_per_s, trend.writers_waited_share) == (10_000.0, 0.2)


def test_who_tells_nothing_new_becomes_slower() -> None:
    trend = RateTrend()
    for second, put in ((0, 0), (5, 50), (25, 50)):
        trend.add(replace(START, at=100.0 + second, writers=writes(put)))
    assert trend.writer("w") == ProcessRate(2.5, 2500.0, 0.0)


def test_who_begins_anew_is_told_of_when_it_has_told_twice() -> None:
    trend = RateTrend()
    for second, put in ((0, 90), (1, 100), (2, 5)):
        trend.add(replace(START, at=100.0 + second, writers=writes(put)))
    assert trend.writer("w") is None
    trend.add(replace(START, at=103.0, writers=writes(9)))
    assert trend.writer("w") == ProcessRate(4.0, 4000.0, 0.0)


def test_readers_and_who_has_gone() -> None:
    trend = RateTrend()
    for second in (0, 1):
        row = ReaderRow("r", 50 * second, 0.1 * second, 0, [])
        trend.add(replace(START, at=100.0 + second, readers=[row]))
    assert trend.reader("r") == ProcessRate(50.0, 0.0, pytest.approx(0.1))
    assert trend.readers_waited_share == pytest.approx(0.1)
    trend.add(replace(START, at=102.0))
    assert (trend.reader("r"), trend.readers_waited_share, trend.reader("nobody")) == (None, None, None)


def test_reads_that_were_lost_with_their_reader_make_nothing_negative() -> None:
    trend = RateTrend()
    trend.add(replace(START, inserted=5, read=50))
    trend.add(replace(START, at=101.0, inserted=10, read=40))
    assert (trend.rates, trend.reuse) == ([(5.0, 0.0)], 0.0)


def test_memory_stays_what_it_is() -> None:
    trend = RateTrend()
    for second in range(10 * MAX_STATUSES):
        rows = [WriterRow(f"w{second}", True, 1, 1, 0, 0.0)]
        trend.add(replace(START, at=100.0 + second, inserted=second, writers=rows))
    assert len(trend.rates) == MAX_STATUSES - 1
    assert trend.writer("w0") is None
