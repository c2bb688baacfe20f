"""The demo of a takeover: its numbers, its claims and its charts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from baton.contract.jobs.goodput import Goodput
from baton.contract.jobs.history import AttemptView
from baton.contract.jobs.job import AttemptEnd, JobState, Progress
from demo.cluster import Traffic, size_text, traffic_of, worker_traffic
from demo.digits import Digits, Readings
from demo.jobs import JobRecord, TrainedStep
from demo.takeover import figures
from demo.takeover.results import DEFINITIONS, Interruption, TakeoverResults, equal_losses
from tests.unit.cli.cli_kit import a_job

FIRST = Goodput(
    productive_s=27, transferring_s=11, idle_s=6, stalled_s=0.01, checkpoints_committed=2,
    raw_bytes=2_000_000, reused_bytes=0, encoded_bytes=1_500_000, uploaded_bytes=1_500_000,
)  # fmt: skip
SECOND = Goodput(
    productive_s=60, repeated_s=5.5, transferring_s=12, idle_s=5, stalled_s=0.02, checkpoints_committed=4,
    raw_bytes=4_000_000, reused_bytes=400_000, encoded_bytes=3_000_000, uploaded_bytes=3_000_000,
)  # fmt: skip
UNDISTURBED = Goodput(
    productive_s=90, transferring_s=9, idle_s=10, stalled_s=0.03, checkpoints_committed=6,
    raw_bytes=6_000_000, reused_bytes=400_000, encoded_bytes=4_500_000, uploaded_bytes=0,
)  # fmt: skip


STEPS = [TrainedStep(1, step, {"loss": 1 / step}) for step in (1, 80, 160, 215)]
STEPS += [TrainedStep(2, step, {"loss": 1 / step}) for step in (161, 215, 500)]


def readings(wrong: set[int], whole: int = 100) -> Readings:
    labels = np.arange(whole) % 10
    predicted = np.array([(label + (index in wrong)) % 10 for index, label in enumerate(labels)])
    return Readings(Digits(np.zeros((whole, 8, 8), np.uint8), labels.astype(np.int64)), predicted.astype(np.int64))


def attempt(epoch: int, end: AttemptEnd, goodput: Goodput) -> AttemptView:
    progress = Progress(step=5, goodput=goodput)
    return AttemptView(epoch=epoch, started_at=1, ended_at=9, end=end, log_tail=["long"], progress=progress)


def results(
    *, killed_at: int = 215, resumed_from: int = 160, different: list[str] | None = None, wrong: int = 4
) -> TakeoverResults:
    attempts = [attempt(1, AttemptEnd.INTERRUPTED, FIRST), attempt(2, AttemptEnd.COMPLETE, SECOND)]
    job = a_job(JobState.COMPLETE)
    return TakeoverResults(
        interrupted=JobRecord(job, attempts, [], STEPS),
        undisturbed=JobRecord(job, [attempt(1, AttemptEnd.COMPLETE, UNDISTURBED)], [], STEPS[:2]),
        steps_wanted=500,
        interruption=Interruption(killed_at, resumed_from, 3, 8.97, 10.87),
        readings=readings(set(range(wrong)), 360),
        different_tensors=different or [],
        weights_blake3="ab" * 32,
        undisturbed_weights_blake3="ab" * 32,
        traffic={
            "user": Traffic({"submit": 2, "attempts": 30}, 1000, 10),
            "worker-1": Traffic({"heartbeat": 4, "claim": 1}, 500, 2_000_000),
            "worker-2": Traffic({"heartbeat": 9, "claim": 3}, 0, 0),
        },
    )


def test_the_summary_adds_up_all_clients() -> None:
    summary = results().as_dict()
    assert summary["attempts"] == 2
    assert summary["steps_repeated"] == 55
    assert summary["steps_trained"] == 555
    assert summary["bit_identical"] is True
    assert summary["control_plane_calls"]["total"] == 49
    assert summary["control_plane_calls"]["by_kind"] == {"attempts": 30, "heartbeat": 13, "claim": 4, "submit": 2}
    assert summary["bytes_uploaded"] == 1500
    assert summary["bytes_downloaded"] == 2_000_010
    assert [attempt["end"] for attempt in summary["attempt_history"]] == ["interrupted", "complete"]
    assert json.loads(json.dumps(summary)) == summary


def test_every_definition_defines_a_number_of_the_summary() -> None:
    assert DEFINITIONS.keys() <= results().as_dict().keys()


@pytest.mark.parametrize(
    ("measured", "failure"),
    [
        (results(), ""),
        (results(resumed_from=0), "worker 2 resumed from step 0, but worker 1 was killed at step 215"),
        (results(resumed_from=216), "worker 2 resumed from step 216, but worker 1 was killed at step 215"),
        (results(wrong=11), "the fetched model reads only 96.9 % of the held-out digits correctly, not 97 %"),
        (
            results(different=["0.bias", "0.weight"]),
            "interrupted and undisturbed training ended in different weights: 0.bias, 0.weight",
        ),
    ],
)
def test_a_claim_fails_where_the_measurements_contradict_it(measured: TakeoverResults, failure: str) -> None:
    assert next((claim.failure for claim in measured.claims() if claim.failure), "") == failure
    assert measured.as_dict()["bit_identical"] is ("different" not in failure)


def test_a_kill_right_after_a_checkpoint_repeats_nothing() -> None:
    assert results(killed_at=160).interruption.steps_repeated == 0
    assert results(killed_at=158).interruption.steps_repeated == 0


def test_the_claims_carry_the_numbers() -> None:
    words = words_of(results())
    for fact in ("step 215 of 500 (43 %)", "checkpoint of step 160", "9.0 s after", "55 steps", "356 of 360", "98.9 %"):
        assert fact in words
    assert "49 calls" in words


def test_a_workers_statistics_are_read_and_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    assert worker_traffic(path) == Traffic({}, 0, 0)
    calls = {"requests": {"claim": 1}, "retries": {}, "refusals": {}}
    path.write_text(json.dumps({"calls": calls, "transfer": {"uploaded_bytes": 5, "downloaded_bytes": 7}}))
    assert worker_traffic(path) == traffic_of({"claim": 1}, {"uploaded_bytes": 5, "downloaded_bytes": 7})
    assert worker_traffic(path).downloaded_bytes == 7


def test_where_the_time_went() -> None:
    goodput = results().as_dict()["goodput"]
    assert {name: one["share"] for name, one in goodput.items()} == {
        "attempt 1": pytest.approx(27 / 44.01, abs=1e-4),
        "attempt 2": pytest.approx(60 / 82.52, abs=1e-4),
        "undisturbed": pytest.approx(90 / 109.03, abs=1e-4),
    }
    assert goodput["attempt 2"]["repeated_s"] == 5.5
    words = words_of(results())
    assert "attempt 1 61 % of 44 s, attempt 2 73 % of 83 s, undisturbed 83 % of 109 s" in words
    assert "5.5 s went into repeated steps, 32 s into waiting for bytes, 21 s into starting and ending" in words


def test_what_the_checkpoints_cost() -> None:
    summary = results().as_dict()
    assert summary["checkpoints_stored"] == 12
    assert summary["checkpoint_stall_s"] == 0.005
    assert summary["bytes_saved_by_addressing"] == 800_000 + 4_500_000
    assert summary["bytes_saved_by_codec"] == 500_000 + 600_000 + 1_100_000
    left = summary["checkpoint_bytes"] - summary["bytes_saved_by_addressing"] - summary["bytes_saved_by_codec"]
    assert summary["checkpoint_bytes_sent"] == left == 4_500_000
    words = words_of(results())
    assert "stood still for 5.0 ms for each of 12 checkpoints. Of their 12.0 MB, 5.3 MB were stored already" in words
    assert "codecs saved 2.2 MB, and 4.5 MB went up" in words


def test_attempts_without_goodput_are_left_out() -> None:
    silent = JobRecord(a_job(), [AttemptView(epoch=1, started_at=1)], [], [])
    measured = replace(results(), interrupted=silent, undisturbed=silent)
    assert measured.as_dict()["goodput"] == {}
    assert measured.claims()


def words_of(measured: TakeoverResults) -> str:
    return " ".join(claim.sentence for claim in measured.claims())


def test_losses_are_compared_at_common_steps_only() -> None:
    def steps(*reported: tuple[int, int, float]) -> list[TrainedStep]:
        return [TrainedStep(epoch, step, {"loss": loss}) for epoch, step, loss in reported]

    mine = steps((1, 1, 0.9), (1, 2, 0.5), (2, 2, 0.5), (2, 3, 0.4), (2, 4, 0.2))
    other = steps((1, 2, 0.5), (1, 3, 0.4), (1, 5, 0.1))
    assert equal_losses(mine, other) == (2, 2)
    assert equal_losses([*mine, *steps((3, 3, 0.40000001))], other) == (1, 2)
    assert equal_losses([], other) == (0, 0)


@pytest.mark.parametrize(("size_bytes", "text"), [(0, "0 kB"), (340_000, "340 kB"), (1_250_000, "1.2 MB")])
def test_sizes_are_readable(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


def test_the_grid_shows_every_misread_digit_first() -> None:
    shown = figures.choose(readings({3, 50, 99}), 20)
    assert shown[:3] == [3, 50, 99]
    assert len(shown) == len(set(shown)) == 20
    assert shown[3:] == sorted(shown[3:])
    assert shown[3] == 0
    assert shown[-1] == 98


def test_misread_digits_never_take_the_whole_grid() -> None:
    shown = figures.choose(readings(set(range(60))), 20)
    assert shown[:10] == list(range(10))
    assert all(index >= 60 for index in shown[10:])


@pytest.mark.parametrize(("wrong", "whole", "count"), [(set(), 5, 5), (set(range(5)), 5, 5), ({1}, 5, 5)])
def test_a_grid_larger_than_the_data_shows_what_there_is(wrong: set[int], whole: int, count: int) -> None:
    shown = figures.choose(readings(wrong, whole), 20)
    assert len(shown) == len(set(shown)) == count


@pytest.mark.parametrize("resumed_from", [160, 0])
def test_the_charts_are_drawn(tmp_path: Path, resumed_from: int) -> None:
    for name, figure in figures.draw(results(resumed_from=resumed_from)).items():
        figure.savefig(tmp_path / name)
        with Image.open(tmp_path / name) as picture:
            assert picture.width > 400
            assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 10
