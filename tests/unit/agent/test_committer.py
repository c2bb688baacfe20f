"""Test the committer: the newest wins, nothing counts too early, no error stops the thread."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_client.agent.io.committer import MAX_TRIES, Committer, StagedCheckpoint
from gpu_client.checkpoints.local.directory_files import BadDirectory
from gpu_client.checkpoints.save.checkpoint_commit import CommitFailed
from gpu_client.transport.errors import (
    BatonError,
    DiskFull,
    FileChanged,
    LeaseLost,
    TransferCanceled,
    TransferError,
    UnexpectedAnswer,
    Unreachable,
    UrlExpired,
)
from gpu_client.transport.net.cancellation import CancelEvent
from tests.unit.agent.agent_kit import foreign, refusal

PATIENCE_S = 60


class Bench:
    """Committer whose commits follow `outcomes` in turn, the last one forever."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.outcomes: list[Exception | Callable[[], object] | None] = [None]
        self.tried: list[int] = []
        self.tags: list[str] = []
        self.proofs: list[bool] = []
        self.lost: list[LeaseLost] = []
        self.over = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        self.committer = Committer(self._commit, self._prove, on_lost=self.lost.append, over=self.over, retry_s=0.001)

    def _prove(self) -> bool:
        return self.proofs.pop(0) if self.proofs else True

    def _commit(self, staged: StagedCheckpoint, cancel: CancelEvent) -> None:
        self.tried.append(staged.step)
        self.tags.append(staged.tag)
        self.started.release()
        while not self.gate.wait(0.005):
            if cancel.is_set():
                raise TransferCanceled("canceled")
        assert staged.path.is_dir(), "the files are there until the commit has returned"
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None:
            outcome()

    def offer(self, step: int, tag: str = "") -> Path:
        path = self.tmp_path / f"staged-{step}"
        path.mkdir()
        self.committer.offer(StagedCheckpoint(step, path, {}, "session", tag=tag))
        return path

    def under_way(self) -> None:
        assert self.started.acquire(timeout=PATIENCE_S)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.gate.set()
    bench.committer.close()
    assert not bench.committer._thread.is_alive()


def test_what_is_handed_over_is_committed_and_cleared_away(bench: Bench) -> None:
    paths = []
    for step in (10, 20):
        paths.append(bench.offer(step))
        assert bench.committer.drain()
    assert bench.committer.committed_steps == [10, 20]
    assert bench.committer.skipped_steps == []
    assert not any(path.exists() for path in paths)


def test_the_newest_waiting_one_wins_and_the_others_are_told_of(bench: Bench) -> None:
    bench.gate.clear()
    bench.offer(1)
    bench.under_way()
    skipped = [bench.offer(step) for step in (2, 3, 4)]
    assert bench.committer.skipped_steps == [2, 3]
    assert not skipped[0].exists()
    assert bench.committer.committed_steps == [], "nothing counts before the commit has returned"
    bench.gate.set()
    assert bench.committer.drain()
    assert bench.committer.committed_steps == [1, 4]
    assert bench.tried == [1, 4]


@pytest.mark.parametrize("error", [Unreachable("down"), refusal("lease_expired")], ids=str)
def test_what_passes_is_waited_for(bench: Bench, error: Exception) -> None:
    bench.outcomes = [*[error] * (MAX_TRIES * 3), None]
    bench.offer(5)
    assert bench.committer.drain()
    assert bench.committer.committed_steps == [5]
    assert bench.committer.last_error is None
    assert len(bench.tried) == MAX_TRIES * 3 + 1


def test_nothing_is_tried_without_proof(bench: Bench) -> None:
    bench.proofs = [False] * 4
    bench.offer(5)
    assert bench.committer.drain()
    assert bench.tried == [5]
    assert bench.committer.committed_steps == [5]


@pytest.mark.parametrize(
    "error",
    [
        CommitFailed("asked for it again and again"),
        TransferError("403"),
        UrlExpired("ran out"),
        UnexpectedAnswer("?"),
        DiskFull("no space"),
        BatonError("any other"),
        OSError(5, "Input/output error"),
        refusal("conflict"),
        foreign(403),
        foreign(404),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_may_pass_is_tried_again_but_not_for_ever(bench: Bench, error: Exception) -> None:
    bench.outcomes = [error]
    path = bench.offer(5)
    assert bench.committer.drain()
    assert bench.tried == [5] * MAX_TRIES
    assert bench.committer.committed_steps == []
    assert bench.committer.skipped_steps == [5]
    assert bench.committer.last_error is error
    assert not path.exists()
    bench.outcomes = [error, None]
    bench.offer(6)
    assert bench.committer.drain()
    assert bench.committer.committed_steps == [6]


@pytest.mark.parametrize(
    "error",
    [
        BadDirectory("a link that leads outside"),
        FileChanged("it was rewritten"),
        refusal("step_not_newer"),
        refusal("invalid_value", 422),
        refusal("checkpoint_conflict"),
        ValueError("a bug in here"),
        KeyError("another"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_will_not_pass_is_given_up_and_the_next_has_its_chance(bench: Bench, error: Exception) -> None:
    """The original's watcher died of an error in its callback: no checkpoint was uploaded ever after."""
    bench.outcomes = [error, None]
    bench.offer(5)
    assert bench.committer.drain()
    assert (bench.committer.committed_steps, bench.committer.skipped_steps) == ([], [5])
    assert bench.committer.last_error is error
    bench.offer(6)
    assert bench.committer.drain()
    assert bench.committer.committed_steps == [6]
    assert bench.lost == []


def test_a_newer_one_takes_the_place_of_one_that_keeps_failing(bench: Bench) -> None:
    def down_for_the_first() -> None:
        if bench.tried[-1] == 5:
            raise Unreachable("down")

    bench.outcomes = [down_for_the_first]
    bench.gate.clear()
    bench.offer(5)
    bench.under_way()
    bench.offer(6)
    bench.gate.set()
    assert bench.committer.drain()
    assert bench.committer.committed_steps == [6]
    assert bench.committer.skipped_steps == [5]


def test_what_takes_the_place_of_one_that_was_wanted_is_kept_by_its_tag(bench: Bench) -> None:
    bench.outcomes = [Unreachable("down"), None]
    bench.gate.clear()
    bench.offer(1, tag="best")
    bench.under_way()
    for step in (2, 3):
        bench.offer(step)
    bench.gate.set()
    assert bench.committer.drain()
    assert (bench.tried, bench.tags) == ([1, 3], ["best", "best"])
    bench.under_way()  # that was 3
    bench.gate.clear()
    bench.offer(4)
    bench.under_way()
    for step, tag in ((5, "best"), (6, "other"), (7, "")):
        bench.offer(step, tag)
    bench.gate.set()
    assert bench.committer.drain()
    assert bench.tags[-1] == "other", "of two the newer one"
    bench.offer(8)
    assert bench.committer.drain()
    assert (bench.tried[-1], bench.tags[-1]) == (8, ""), "once"


def test_a_lost_lease_is_passed_on(bench: Bench) -> None:
    error = refusal("lease_lost")
    bench.outcomes = [error]
    bench.offer(5)
    assert bench.committer.drain()
    assert bench.lost == [error]
    assert bench.committer.committed_steps == []


def test_when_it_is_over_nothing_more_is_begun(bench: Bench) -> None:
    bench.gate.clear()
    bench.offer(1)
    bench.under_way()
    bench.offer(2)
    bench.over.set()
    assert not bench.committer.drain(), "what waits will not be committed"
    bench.committer.close()
    assert bench.tried == [1]
    assert bench.committer.committed_steps == []
    assert sorted(bench.committer.skipped_steps) == [1, 2]


def test_drain_can_be_given_up(bench: Bench) -> None:
    bench.gate.clear()
    bench.offer(1)
    bench.under_way()
    assert not bench.committer.drain(lambda: True)
    bench.gate.set()
    assert bench.committer.drain(lambda: False)


def test_close_stops_what_is_under_way(bench: Bench) -> None:
    bench.gate.clear()
    bench.offer(1)
    bench.under_way()
    bench.committer.close()
    assert not bench.committer._thread.is_alive()
    assert bench.committer.committed_steps == []


@pytest.mark.parametrize("committed", [True, False])
def test_files_that_cannot_be_given_back_end_nothing(bench: Bench, committed: bool) -> None:
    """The thread died of it, and no later checkpoint was committed."""

    def stuck() -> None:
        raise OSError(errno.EACCES, "Permission denied")

    if not committed:
        bench.outcomes = [BadDirectory("no"), None]
    bench.committer.offer(StagedCheckpoint(10, bench.tmp_path, {}, "session", release=stuck))
    assert bench.committer.drain()
    bench.offer(20)
    assert bench.committer.drain()
    assert bench.committer.committed_steps == ([10, 20] if committed else [20])
    assert bench.committer.skipped_steps == ([] if committed else [10])
