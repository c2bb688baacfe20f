"""The numbers that the demo reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baton.contract.goodput import Goodput
from baton.contract.history import AttemptView
from baton.contract.jobs import AttemptEnd, Progress
from demo.saving import size_text
from demo.summary import DEFINITIONS, Caller, Interruption, Result, caller_of, worker_stats

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


def told(goodput: Goodput) -> Progress:
    return Progress(step=5, goodput=goodput)


def result(*, killed_at: int = 215, resumed_from: int = 160, different: list[str] | None = None) -> Result:
    return Result(
        job_id="a",
        undisturbed_job_id="b",
        steps_wanted=500,
        interruption=Interruption(killed_at, resumed_from, 3, 8.97, 10.87),
        attempts=[
            AttemptView(
                epoch=1, started_at=1, ended_at=5, end=AttemptEnd.INTERRUPTED, log_tail=["long"], progress=told(FIRST)
            ),
            AttemptView(
                epoch=2,
                started_at=5,
                ended_at=9,
                end=AttemptEnd.COMPLETE,
                resumed_step=resumed_from,
                progress=told(SECOND),
            ),
        ],
        undisturbed_attempts=[
            AttemptView(epoch=1, started_at=1, ended_at=9, end=AttemptEnd.COMPLETE, progress=told(UNDISTURBED))
        ],
        accuracy=356 / 360,
        held_out=360,
        different_tensors=different or [],
        weights_blake3="ab" * 32,
        undisturbed_weights_blake3="ab" * 32,
        callers={
            "user": Caller({"submit": 2, "attempts": 30}, 1000, 10),
            "worker-1": Caller({"heartbeat": 4, "claim": 1}, 500, 2_000_000),
            "worker-2": Caller({"heartbeat": 9, "claim": 3}, 0, 0),
        },
        durations_s={"total": 80.0},
    )


def test_the_summary_adds_everybody_up() -> None:
    summary = result().as_dict()
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
    assert DEFINITIONS.keys() <= result().as_dict().keys()


def test_one_differing_tensor_is_not_identical() -> None:
    assert result(different=["0.weight"]).as_dict()["bit_identical"] is False


def test_a_kill_right_after_a_checkpoint_repeats_nothing() -> None:
    assert result(killed_at=160).steps_repeated == 0
    assert result(killed_at=158).steps_repeated == 0


def test_the_plain_words_carry_the_numbers() -> None:
    words = " ".join(result().in_plain_words())
    for fact in ("step 215 of 500 (43 %)", "checkpoint of step 160", "9.0 s after", "55 steps", "356 of 360", "98.9 %"):
        assert fact in words
    assert "49 calls" in words


def test_a_workers_statistics_are_read_and_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    assert worker_stats(path) == Caller()
    calls = {"requests": {"claim": 1}, "retries": {}, "refusals": {}}
    path.write_text(json.dumps({"calls": calls, "transfer": {"uploaded_bytes": 5, "downloaded_bytes": 7}}))
    assert worker_stats(path) == caller_of({"claim": 1}, {"uploaded_bytes": 5, "downloaded_bytes": 7})
    assert worker_stats(path).downloaded_bytes == 7


def test_where_the_time_went() -> None:
    goodput = result().as_dict()["goodput"]
    assert {name: one["share"] for name, one in goodput.items()} == {
        "attempt 1": pytest.approx(27 / 44.01, abs=1e-4),
        "attempt 2": pytest.approx(60 / 82.52, abs=1e-4),
        "undisturbed": pytest.approx(90 / 109.03, abs=1e-4),
    }
    assert goodput["attempt 2"]["repeated_s"] == 5.5
    words = " ".join(result().in_plain_words())
    assert "attempt 1 61 % of 44 s, attempt 2 73 % of 83 s, undisturbed 83 % of 109 s" in words
    assert "5.5 s went into repeated steps, 32 s into waiting for bytes, 21 s into starting and ending" in words


def test_what_the_checkpoints_cost() -> None:
    summary = result().as_dict()
    assert summary["checkpoints_stored"] == 12
    assert summary["checkpoint_stall_s"] == 0.005
    assert summary["bytes_saved_by_addressing"] == 800_000 + 4_500_000
    assert summary["bytes_saved_by_codec"] == 500_000 + 600_000 + 1_100_000
    left = summary["checkpoint_bytes"] - summary["bytes_saved_by_addressing"] - summary["bytes_saved_by_codec"]
    assert summary["checkpoint_bytes_sent"] == left == 4_500_000
    words = " ".join(result().in_plain_words())
    assert "stood still for 5.0 ms for each of 12 checkpoints. Of their 12.0 MB, 5.3 MB were stored already" in words
    assert "codecs saved 2.2 MB, and 4.5 MB went up" in words


def test_workers_that_say_nothing_of_their_time_are_left_out() -> None:
    silent = replace(result(), attempts=[], undisturbed_attempts=[AttemptView(epoch=1, started_at=1)])
    assert silent.as_dict()["goodput"] == {}
    assert len(silent.in_plain_words()) == len(result().in_plain_words()) - 2


@pytest.mark.parametrize(("size_bytes", "text"), [(0, "0 kB"), (340_000, "340 kB"), (1_250_000, "1.2 MB")])
def test_sizes_are_readable(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
