"""Lines of an elastic job's nodes, in the order of time and each once, also after an outage between two nodes."""

from __future__ import annotations

import pytest

from baton.contract.worker.output import LogLine, LogPage
from gpu_client.cli.insight.logs import _LogReader
from gpu_client.transport.errors import Unreachable

PAGE = 2


class FakeLogs:
    """Client with the lines of nodes by their times; the call number `fails_at` is not answered."""

    def __init__(self, times: dict[int, list[int]], fails_at: int) -> None:
        self.times = times
        self.calls_left = fails_at

    def logs(self, job_id: str, *, limit: int, cursor: str | None, seat: int) -> LogPage:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise Unreachable("no answer")
        begin = int(cursor or 0)
        lines = [
            LogLine(epoch=1, line=at, text=f"{seat}-{at}", at=self.times[seat][at], seat=seat)
            for at in range(begin, min(begin + PAGE, len(self.times[seat])))
        ]
        return LogPage(lines=lines, next_cursor=str(begin + len(lines)))


@pytest.mark.parametrize("fails_at", range(1, 9))
def test_an_outage_repeats_no_line(fails_at: int) -> None:
    client = FakeLogs({0: [1, 4, 5], 1: [2, 3, 6, 7]}, fails_at)
    reader = _LogReader(client, "job", range(2))  # type: ignore[arg-type]
    shown: list[str] = []
    for _ in range(2):
        try:
            for one in reader.read_new():
                shown.append(one.line.text)
        except Unreachable:
            continue
    assert sorted(shown) == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2", "1-3"]
    client.times[1].append(8)
    assert [one.line.text for one in reader.read_new()] == ["1-4"]
