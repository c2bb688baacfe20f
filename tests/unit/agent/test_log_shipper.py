"""Test the log shipper: every line once, in order, numbered; errors cost time, not lines."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from baton.contract.worker.output import LONGEST_LOG_WAIT_S, LogChunk, log_wait_s
from gpu_client.agent.io.log_shipper import (
    CHUNK_LINES,
    MAX_CALLS,
    MAX_FAREWELL_CALLS,
    MAX_SHIP_S,
    LogShipper,
    LogSpool,
)
from gpu_client.agent.io.metric_buffer import MetricBuffer
from gpu_client.agent.process.output import TrainerOutput
from gpu_client.transport.errors import Unreachable
from tests.kits.clock import Clock
from tests.kits.waiting import until
from tests.unit.agent.agent_kit import refusal

NEVER_S = 3600.0


class Api:
    """Takes chunks; `trouble` lists the errors of the next sends."""

    def __init__(self, *trouble: Exception) -> None:
        self.trouble = list(trouble)
        self.sent: list[LogChunk] = []
        self.arrived = threading.Event()

    def __call__(self, chunk: LogChunk) -> None:
        if self.trouble:
            raise self.trouble.pop(0)
        self.sent.append(chunk)
        self.arrived.set()

    def lines(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for chunk in self.sent:
            for offset, line in enumerate(chunk.lines):
                assert chunk.first_line + offset not in found
                found[chunk.first_line + offset] = line
        return found


def lines(*texts: str) -> Callable[[LogSpool], object]:
    """Make a function that fills a spool with these lines."""

    def fill(spool: LogSpool) -> None:
        for text in texts:
            spool.append(text)

    return fill


def shipped(api: Api, fill: Callable[[LogSpool], object], spool: LogSpool | None = None, flushes: int = 1) -> Api:
    spool = spool or LogSpool()
    shipper = LogShipper(spool, api, every_s=NEVER_S)
    fill(spool)
    for _ in range(flushes):
        shipper.flush()
    shipper.close()
    return api


def test_lines_are_numbered_from_zero_across_chunks() -> None:
    def fill(spool: LogSpool) -> None:
        for number in range(2 * CHUNK_LINES + 7):
            spool.append(f"line {number}")

    api = shipped(Api(), fill)
    assert api.lines() == {number: f"line {number}" for number in range(2 * CHUNK_LINES + 7)}
    assert max(len(chunk.lines) for chunk in api.sent) == CHUNK_LINES


def test_empty_lines_are_lines() -> None:
    api = shipped(Api(), lines("", "a", "", ""))
    assert api.lines() == {0: "", 1: "a", 2: "", 3: ""}


def test_what_could_not_be_sent_is_sent_later_under_the_same_numbers() -> None:
    api = shipped(Api(Unreachable("down")), lines("a", "b"), flushes=2)
    assert api.lines() == {0: "a", 1: "b"}


def test_after_a_failure_only_what_was_not_taken_is_sent_again() -> None:
    api = Api()
    spool = LogSpool()
    for number in range(CHUNK_LINES + 1):
        spool.append(str(number))
    second = iter([None, Unreachable("down")])
    tried: list[int] = []

    def send(chunk: LogChunk) -> None:
        tried.append(chunk.first_line)
        error = next(second, None)
        if error:
            raise error
        api(chunk)

    shipper = LogShipper(spool, send, every_s=NEVER_S)
    shipper.flush()
    shipper.flush()
    shipper.close()
    assert tried == [0, CHUNK_LINES, CHUNK_LINES]


def test_what_is_refused_for_good_does_not_block_what_follows() -> None:
    spool = LogSpool(chunk_bytes=8)
    api = shipped(Api(refusal("invalid_value", 422)), lines("refused", "taken"), spool)
    assert api.lines() == {1: "taken"}


def test_a_lost_lease_ends_it_quietly() -> None:
    api = shipped(Api(refusal("lease_lost")), lines("a"), flushes=3)
    assert api.sent == []
    assert api.trouble == [], "asked once"


def test_lines_that_were_dropped_are_told_of() -> None:
    spool = LogSpool(max_bytes=20, chunk_bytes=10)
    api = shipped(Api(), lines(*["x" * 8] * 5), spool)
    assert sum(chunk.dropped_bytes for chunk in api.sent) == spool.dropped_total_bytes > 0


def test_the_last_lines_go_also_after_the_end_of_the_thread() -> None:
    """An attempt whose outputs are missing is reported when its training, and what watched it, is closed already."""
    spool, api = LogSpool(), Api()
    shipper = LogShipper(spool, api, every_s=NEVER_S)
    spool.append("a")
    shipper.close()
    shipper.flush()
    assert api.lines() == {0: "a"}


def test_a_flood_does_not_hold_up_the_end() -> None:
    spool = LogSpool(chunk_bytes=2)
    api = shipped(Api(), lines(*(str(number % 10) for number in range(100))), spool)
    assert len(api.sent) == MAX_FAREWELL_CALLS


def test_short_lines_do_not_make_a_storm_of_calls() -> None:
    """A chunk of empty lines was 131 calls, four chunks went every five seconds: a Lambda bill for printing nothing."""
    spool, api = LogSpool(), Api()
    lines(*[""] * 1_000_000)(spool)
    shipper = LogShipper(spool, api, every_s=NEVER_S)
    shipper._ship(max_calls=MAX_CALLS, unfull=True)
    assert len(api.sent) == MAX_CALLS
    shipper.flush()
    assert len(api.sent) == MAX_CALLS + MAX_FAREWELL_CALLS
    shipper.close()
    assert set(api.lines()) == set(range((MAX_CALLS + MAX_FAREWELL_CALLS) * CHUNK_LINES))


def test_a_slow_control_plane_does_not_hold_up_the_end() -> None:
    """Up to 2,620 calls came before the report: with half a second each, 20 minutes after a SIGTERM."""
    spool, clock, sent = LogSpool(), Clock(), []

    def send(chunk: LogChunk) -> None:
        clock.now += 5
        sent.append(chunk)

    lines(*[""] * 100_000)(spool)
    shipper = LogShipper(spool, send, every_s=NEVER_S, clock=clock)
    shipper.flush()
    shipper.close()
    assert len(sent) == MAX_SHIP_S / 5


def test_a_line_that_is_cut_says_so() -> None:
    """The note that the assembler makes was cut off itself."""
    output = TrainerOutput()
    output.feed(b"x" * 5000 + b"\n")
    api = shipped(Api(), lambda _: None, output.spool)
    (line,) = api.lines().values()
    assert line.endswith(" characters cut]")
    assert 3900 < len(line) <= 4000


@pytest.mark.parametrize("error", [RuntimeError("a bug"), Unreachable("down")], ids=str)
def test_the_thread_survives_errors_and_sends_by_itself(error: Exception) -> None:
    spool, api = LogSpool(), Api(error)
    shipper = LogShipper(spool, api, every_s=0.001)
    spool.append("a")
    assert api.arrived.wait(20)
    shipper.close()
    assert api.lines() == {0: "a"}


@pytest.mark.parametrize(
    ("age_s", "wait_s"), [(0, 0), (100, 5), (1200, 60), (6000, LONGEST_LOG_WAIT_S), (1e6, LONGEST_LOG_WAIT_S)]
)
def test_lines_of_an_old_attempt_wait_for_more(age_s: float, wait_s: float) -> None:
    assert log_wait_s(age_s) == wait_s


def test_an_old_attempt_sends_full_chunks_at_once_and_the_rest_now_and_then() -> None:
    now = [0.0]
    spool, api = LogSpool(), Api()
    shipper = LogShipper(spool, api, every_s=0.001, clock=lambda: now[0])
    spool.append("first")
    until(lambda: len(api.sent) == 1)
    now[0] = 6000
    spool.append("second")
    until(lambda: len(api.sent) == 2)
    for n in range(CHUNK_LINES + 1):
        spool.append(f"line {n}")
    until(lambda: len(api.sent) == 3)
    assert len(api.sent[2].lines) == CHUNK_LINES, "the full chunk, and not the line behind it"
    now[0] += LONGEST_LOG_WAIT_S - 1
    spool.append("last")
    assert not threading.Event().wait(0.02) and len(api.sent) == 3
    now[0] += 1
    until(lambda: len(api.sent) == 4)
    assert api.sent[3].lines == [f"line {CHUNK_LINES}", "last"]
    shipper.close()


def metered(*steps: int) -> MetricBuffer:
    points = MetricBuffer(lambda: 1000.0)
    for step in steps:
        points.append(step, {"loss": 1.0})
    return points


def numbered(api: Api) -> dict[int, int]:
    """Return steps by the numbers of their points."""
    found: dict[int, int] = {}
    for chunk in api.sent:
        for offset, point in enumerate(chunk.points):
            assert chunk.first_point + offset not in found
            found[chunk.first_point + offset] = point.step
    return found


def test_points_travel_with_lines() -> None:
    spool, api, points = LogSpool(), Api(), metered(1, 2, 3)
    shipper = LogShipper(spool, api, points=points, every_s=NEVER_S)
    lines(*map(str, range(2 * CHUNK_LINES + 1)))(spool)
    shipper._ship(max_calls=MAX_CALLS, unfull=True)
    assert [(len(chunk.lines), len(chunk.points)) for chunk in api.sent] == [(CHUNK_LINES, 3), (CHUNK_LINES, 0), (1, 0)]
    points.append(4, {"loss": 0.5})
    shipper._ship(max_calls=MAX_CALLS, unfull=False)
    assert len(api.sent) == 3, "no full chunk, no call"
    spool.append("last")
    shipper.flush()
    shipper.close()
    assert numbered(api) == {0: 1, 1: 2, 2: 3, 3: 4}
    assert len(api.sent) == 4
    assert len(api.lines()) == 2 * CHUNK_LINES + 2


def test_a_job_that_prints_costs_no_more_calls_for_what_it_reports() -> None:
    """Points that come while its lines are being sent wait for the next round."""

    def calls(points: MetricBuffer | None) -> int:
        spool, sent = LogSpool(), []

        def send(chunk: LogChunk) -> None:
            sent.append(chunk)
            if points is not None:
                points.append(len(sent), {"loss": 1.0})

        shipper = LogShipper(spool, send, points=points, every_s=NEVER_S)
        for number in range(20):
            if points is not None:
                points.append(1000 + number, {"loss": 1.0})
            spool.append(f"line {number}")
            shipper._ship(max_calls=MAX_CALLS, unfull=True)
        shipper.close()
        return len(sent)

    assert calls(MetricBuffer(lambda: 1000.0)) == calls(None) == 20


def test_points_alone_are_shipped_when_lines_would_be() -> None:
    spool, api, points = LogSpool(), Api(), metered(1, 2)
    shipper = LogShipper(spool, api, points=points, every_s=NEVER_S)
    shipper._ship(max_calls=MAX_CALLS, unfull=False)
    assert api.sent == []
    shipper._ship(max_calls=MAX_CALLS, unfull=True)
    spool.append("a")
    shipper._ship(max_calls=MAX_CALLS, unfull=True)
    points.append(3, {"loss": 1.0})
    shipper.flush()
    shipper.close()
    assert [(chunk.first_line, chunk.lines, chunk.first_point) for chunk in api.sent] == [
        (0, [], 0),
        (0, ["a"], 2),
        (1, [], 2),
    ]
    assert numbered(api) == {0: 1, 1: 2, 2: 3}


def test_what_may_have_been_stored_is_sent_again_just_as_it_was() -> None:
    """A chunk that may be stored is sent again unchanged: a larger one would store its lines twice."""
    tried: list[LogChunk] = []
    api = Api(Unreachable("down"), Unreachable("down"))
    spool, points = LogSpool(), metered(1)

    def send(chunk: LogChunk) -> None:
        tried.append(chunk)
        api(chunk)

    shipper = LogShipper(spool, send, points=points, every_s=NEVER_S)
    shipper.flush()
    spool.append("a")
    points.append(2, {"loss": 1.0})
    shipper.flush()
    shipper.flush()
    shipper.close()
    assert tried[0] == tried[1] == tried[2]
    assert (tried[0].lines, [point.step for point in tried[0].points]) == ([], [1])
    assert api.lines() == {0: "a"}
    assert numbered(api) == {0: 1, 1: 2}


def test_an_older_control_plane_loses_no_lines_for_points() -> None:
    api = Api(refusal("invalid_value", 422))
    spool, points = LogSpool(), metered(1)
    shipper = LogShipper(spool, api, points=points, every_s=NEVER_S)
    spool.append("a")
    shipper.flush()
    points.append(2, {"loss": 1.0})
    spool.append("b")
    shipper.flush()
    shipper.close()
    assert api.lines() == {0: "a", 1: "b"}
    assert numbered(api) == {}
    assert all("points" not in chunk.model_fields_set for chunk in api.sent)
