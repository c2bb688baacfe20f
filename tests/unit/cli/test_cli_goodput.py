"""Goodput as text: shares, lost time, advice."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.jobs.goodput import Goodput
from baton.contract.jobs.history import AttemptView
from baton.contract.jobs.job import AttemptEnd, JobState
from gpu_client.cli.jobs.explain import JobFacts, explain
from gpu_client.cli.jobs.goodput import (
    checkpoints_text,
    goodput_lines,
    losses_text,
    percent,
    share_of,
    share_text,
    short,
    total_of,
)
from gpu_client.cli.jobs.summary import headline, summarize
from tests.unit.cli.cli_kit import NOW, a_job, an_attempt

TIMES = Goodput(productive_s=812.5, repeated_s=31.0, stalled_s=1.25, transferring_s=12.0, idle_s=43.25)
BYTES = Goodput(
    stalled_s=1.6, checkpoints_committed=8, checkpoints_skipped=1, raw_bytes=1_200_000_000, uploaded_bytes=300_000_000
)


def attempt_with(epoch: int = 1, *, end: AttemptEnd | None = None, **goodput: Any) -> AttemptView:
    return an_attempt(epoch, end, progress={"step": 5, "reported_at": NOW - 300, "goodput": goodput})


def test_attempts_are_added_up() -> None:
    silent = an_attempt(2, AttemptEnd.INTERRUPTED)
    told_nothing = an_attempt(3, AttemptEnd.INTERRUPTED, progress={"step": 5})
    found = total_of(
        [
            attempt_with(1, end=AttemptEnd.INTERRUPTED, productive_s=10, raw_bytes=5, checkpoints_committed=1),
            silent,
            told_nothing,
            attempt_with(4, productive_s=20, repeated_s=2.5, raw_bytes=7),
        ]
    )
    assert found == Goodput(productive_s=30, repeated_s=2.5, raw_bytes=12, checkpoints_committed=1)
    assert total_of([silent, told_nothing]) is None
    assert goodput_lines(None, 1.0) == []


def test_where_the_time_went() -> None:
    assert share_text(TIMES, None) == "90%: 13 min 32 s of 15 min went into new steps"
    assert losses_text(TIMES, None) == (
        "starting and ending 43 s, repeated steps 31 s, waiting for transfers 12 s, taking checkpoints 1.2 s"
    )


def test_where_the_money_went() -> None:
    assert share_text(TIMES, 4.0) == "90%: 13 min 32 s of 15 min (0.90 of 1.00) went into new steps"
    assert losses_text(TIMES, 4.0) == (
        "starting and ending 43 s (0.05), repeated steps 31 s (0.03), "
        "waiting for transfers 12 s (0.01), taking checkpoints 1.2 s (<0.01)"
    )


def test_what_the_checkpoints_weighed() -> None:
    assert checkpoints_text(BYTES) == "8 stored, 1 skipped; 300.0 MB sent of 1.2 GB (25%); 0.2 s of stall each"
    assert checkpoints_text(Goodput(checkpoints_skipped=2)) == "2 skipped"
    assert checkpoints_text(TIMES) == ""


def test_nothing_is_said_of_no_time() -> None:
    assert share_of(Goodput()) is None
    assert [text for _, text in goodput_lines(Goodput(), 1.0)] == ["", "", ""]


@pytest.mark.parametrize(
    ("share", "text"), [(None, ""), (0.0, "0%"), (0.4567, "46%"), (0.9949, "99%"), (0.9999, "99.9%"), (1.0, "100%")]
)
def test_only_all_of_it_is_all_of_it(share: float | None, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0004, "0 ms"), (0.012, "12 ms"), (0.0996, "0.1 s"), (9.94, "9.9 s"), (75, "1 min 15 s")]
)
def test_short_times(seconds: float, text: str) -> None:
    assert short(seconds) == text


def test_the_headline_has_it_for_all_attempts() -> None:
    attempts = [attempt_with(1, end=AttemptEnd.INTERRUPTED, idle_s=10), attempt_with(2, productive_s=30)]
    found = summarize(a_job(JobState.RUNNING, epoch=2), attempts[-1], None, total_of(attempts))
    assert headline(found).endswith("goodput 75%")
    assert found.as_data()["goodput"]["productive_s"] == 30
    assert summarize(a_job(), None, None).as_data()["goodput"] is None


def advice(policy: dict[str, Any] | None = None, **goodput: Any) -> list[str]:
    job = a_job(JobState.CANCELED, policy=policy or {})
    return explain(JobFacts(now=NOW, job=job, attempts=[attempt_with(end=AttemptEnd.CANCELED, **goodput)])).advice[1:]


def test_a_third_may_be_lost() -> None:
    assert advice(productive_s=800, repeated_s=400) == []
    assert advice(productive_s=200, idle_s=390) == [], "the beginning of a short one says nothing"
    (found,) = advice(productive_s=800, repeated_s=402)
    assert found.startswith("33% of the time in 1 attempt produced no new step, mostly repeated steps (6 min 42 s). ")
    assert "policy.checkpoint_every: auto" in found


@pytest.mark.parametrize(
    ("lost", "policy", "remedy"),
    [
        ("repeated_s", {"checkpoint_every": 60}, "policy.checkpoint_every: auto"),
        ("repeated_s", {"checkpoint_every": "auto"}, "machines that are preempted less often"),
        ("stalled_s", {}, "fewer checkpoints (policy.checkpoint_every: auto), space in /dev/shm"),
        ("stalled_s", {"checkpoint_every": "auto"}, "Reduce the cost of checkpoints: space in /dev/shm"),
        ("transferring_s", {}, "a faster network"),
        ("idle_s", {}, "into the image"),
    ],
)
def test_the_remedy_fits_the_loss(lost: str, policy: dict[str, Any], remedy: str) -> None:
    (found,) = advice(policy, productive_s=500, **{lost: 900})
    assert remedy in found


def test_each_attempt_says_how_useful_it_was() -> None:
    attempts = [attempt_with(1, end=AttemptEnd.INTERRUPTED, productive_s=9, idle_s=1), attempt_with(2, idle_s=3)]
    found = explain(JobFacts(now=NOW, job=a_job(JobState.RUNNING, lease_expires_at=NOW + 60), attempts=attempts))
    assert found.history == [
        "attempt 1 on m-1, from the start: lost its machine after 1 min 40 s, goodput 90%",
        "attempt 2 on m-2, from the start: runs, goodput 0%",
    ]
