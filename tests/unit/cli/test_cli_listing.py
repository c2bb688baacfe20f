"""Lists and id searches request the newest jobs first, and no more pages than needed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from baton.contract.jobs.job import JobPage, JobState
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.session import resolve_job_id
from gpu_client.cli.jobs.show import list_newest_jobs
from gpu_client.transport.api.client import BatonClient
from tests.unit.cli.cli_kit import ID, a_job


class Listing:
    """The call `jobs` of a client, answered from these ids, oldest first."""

    def __init__(self, *ids: str) -> None:
        self._ids = ids[::-1]
        self.limits: list[int] = []

    @property
    def client(self) -> BatonClient:
        return cast(BatonClient, self)

    def jobs(self, *, limit: int, cursor: str | None = None, newest_first: bool, **filters: Any) -> JobPage:
        assert newest_first
        self.limits.append(limit)
        begin = int(cursor or 0)
        found = [a_job(id=one) for one in self._ids[begin : begin + limit]]
        # as the API does, which filters a page by queue once it is read
        jobs = [] if filters.get("queue") == "rare" and begin == 0 else found
        end = begin + limit
        return JobPage(jobs=jobs, next_cursor=str(end) if end < len(self._ids) else None)


def numbered(count: int, first: int = 0) -> list[str]:
    return [f"{number:08x}-0000-4000-8000-000000000000" for number in range(first, first + count)]


@pytest.mark.parametrize(("limit", "asked"), [(1, [1]), (50, [50]), (2500, [1000, 1000, 500]), (3000, [1000] * 3)])
def test_no_more_is_read_than_is_shown(limit: int, asked: list[int]) -> None:
    ids = numbered(2600)
    listing = Listing(*ids)
    found, more = list_newest_jobs(listing.client, None, None, limit)
    assert [job.id for job in found] == ids[::-1][:limit]
    assert more == (limit < 2600)
    assert listing.limits == asked


def test_all_of_them() -> None:
    found, more = list_newest_jobs(Listing(*numbered(1200)).client, JobState.PENDING, None, None)
    assert (len(found), more) == (1200, False)


def test_an_empty_page_is_not_the_end() -> None:
    ids = numbered(1010)
    found, more = list_newest_jobs(Listing(*ids).client, None, "rare", 20)
    assert ([job.id for job in found], more) == (ids[9::-1], False)


def test_an_abbreviated_id_as_jobs_shows_it_is_found_without_reading_on() -> None:
    listing = Listing(*numbered(5000, first=2), ID)
    assert resolve_job_id(listing.client, ID[:8]) == ID
    assert listing.limits == [100]


def test_a_shorter_one_is_compared_with_all_that_are_searched() -> None:
    twin = ID[:6] + "ff-0000-4000-8000-000000000000"
    listing = Listing(twin, *numbered(2000, first=2), ID)
    with pytest.raises(CliError, match=f"2 job ids begin with '{ID[:6]}': {ID}, {twin}. Give a longer prefix"):
        resolve_job_id(listing.client, ID[:6])
    assert resolve_job_id(listing.client, ID[:7]) == ID
    assert resolve_job_id(listing.client, twin[:8]) == twin


def test_two_side_by_side_are_not_told_apart_by_eight_characters() -> None:
    with pytest.raises(CliError, match="2 job ids begin with"):
        resolve_job_id(Listing(ID[:9] + "0000-4000-8000-000000000000", ID).client, ID[:8])


@pytest.mark.parametrize("text", [ID[:6], ID[:8]])
def test_what_lies_too_far_back_needs_its_whole_id(text: str) -> None:
    listing = Listing(ID, *numbered(6000))
    with pytest.raises(CliError, match=r"none of the newest 4,100 jobs begins with .* Give the full id"):
        resolve_job_id(listing.client, text)
    assert resolve_job_id(listing.client, ID) == ID
