"""Test the choice of a worker among ready jobs."""

from __future__ import annotations

import pytest

from functions.domain.jobs.job_selection import LARGEST_WINDOW, SMALLEST_WINDOW, ClaimWindow, select_suitable
from tests.kits.api.factories import NOW, make_job, make_spec, make_worker


class Always:
    """Chance that always falls on the same side; only `below` is used."""

    def __init__(self, part: float) -> None:
        self.part = part
        self.bounds: list[int] = []

    def below(self, bound: int) -> int:
        self.bounds.append(bound)
        return int(self.part * (bound - 1))

    def token(self) -> str:
        raise AssertionError

    def job_id(self) -> str:
        raise AssertionError

    def key_id(self) -> str:
        raise AssertionError


def test_a_job_that_one_may_not_have_hides_no_other() -> None:
    """The original looked at the n-th row after n refusals: a banned stale job starved or skipped the pending ones."""
    banned = make_job(id="banned", stale=True, avoid={"m-1": NOW + 100})
    needy = make_job(id="needy", spec=make_spec(requirements={"min_vram_gib": 80}))
    jobs = [banned, needy, make_job(id="first"), make_job(id="second")]
    assert [job.id for job in select_suitable(jobs, make_worker("m-1"), NOW)] == ["first", "second"]
    assert [job.id for job in select_suitable(jobs, make_worker("m-2"), NOW)] == ["banned", "first", "second"]
    assert [job.id for job in select_suitable([banned], make_worker("m-1"), NOW)] == []


@pytest.mark.parametrize(("now", "found"), [(NOW + 9, 1), (NOW + 10, 0)])
def test_a_job_whose_deadline_has_passed_is_nobodys(now: int, found: int) -> None:
    assert len(select_suitable([make_job(policy={"deadline_at": NOW + 10})], make_worker(), now)) == found


@pytest.mark.parametrize(("part", "chosen"), [(0, "0"), (1, str(SMALLEST_WINDOW - 1))])
def test_by_chance_among_equals_within_the_window(part: float, chosen: str) -> None:
    crowd = [make_job(id=str(n)) for n in range(50)]
    assert ClaimWindow().choose(crowd, Always(part).below).id == chosen


def test_never_past_a_better_rank() -> None:
    jobs = [make_job(id="stale", stale=True), *(make_job(id=str(n)) for n in range(50))]
    assert ClaimWindow().choose(jobs, Always(1).below).id == "stale"
    jobs = [make_job(id="urgent", priority=90), make_job(id="also", priority=90), make_job(id="rest")]
    assert ClaimWindow().choose(jobs, Always(1).below).id == "also"


def test_a_lonely_worker_draws_nothing() -> None:
    chance = Always(1)
    ClaimWindow().choose([make_job()], chance.below)
    assert chance.bounds == []


def test_the_window_grows_with_conflicts_and_shrinks_without() -> None:
    window = ClaimWindow()
    sizes = []
    for _ in range(4):
        window.widen()
        sizes.append(window.size)
    assert sizes == [40, 160, LARGEST_WINDOW, LARGEST_WINDOW]
    claims = 0
    while window.size > SMALLEST_WINDOW:
        before = window.size
        window.narrow()
        claims += 1
        assert window.size < before
    assert 40 < claims < 200
    window.narrow()
    assert window.size == SMALLEST_WINDOW
