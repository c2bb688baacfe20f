"""Fetching inputs: pages, URLs that run out, paths that clash, disks that are full."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from contract.jobs import InputRef
from contract.work import InputObject, InputPage
from gpu_client.agent.inputs import MAX_EXPIRED_ROUNDS, fetch_inputs
from gpu_client.agent.workspace import DiskFullError
from gpu_client.transport.errors import ObjectMissing, UnsafePath, UrlExpired
from gpu_client.transport.transfer import Download
from tests.unit.agent.agent_kit import JOB_ID, TOKEN, make_item

ITEM = make_item(inputs=[InputRef(prefix="digits/")])


class Api:
    """Pages of inputs, two a page; every answer has new URLs."""

    def __init__(self, *paths: str) -> None:
        self.pages = [list(paths[start : start + 2]) for start in range(0, len(paths), 2)] or [[]]
        self.asked: list[str | None] = []

    def inputs_page(self, job_id: str, lease_token: str, *, cursor: str | None = None) -> InputPage:
        assert (job_id, lease_token) == (JOB_ID, TOKEN)
        self.asked.append(cursor)
        number = int(cursor or 0)
        return InputPage(
            inputs=[
                InputObject(key=f"digits/{path}", path=path, size_bytes=10, etag="e", url=f"{path}?{len(self.asked)}")
                for path in self.pages[number]
            ],
            next_cursor=str(number + 1) if number + 1 < len(self.pages) else None,
            expires_at=1_790_000_900,
        )


class Transfer:
    """Stores files; `expire` says after how many of a batch the URLs run out, batch by batch."""

    def __init__(self, *expire: int | None) -> None:
        self.expire = list(expire)
        self.urls: list[str] = []

    def download(self, items: Sequence[Download], *, cancel: object) -> None:
        limit = self.expire.pop(0) if self.expire else None
        for number, item in enumerate(items):
            if number == limit:
                raise UrlExpired(f"{item.name}: the presigned URL has run out")
            self.urls.append(item.url)
            (item.root / item.path).write_text(item.name)


def fetch(api: Api, transfer: Transfer, data: Path, require_free: Callable[[int], None] = lambda _bytes: None) -> int:
    return fetch_inputs(api, transfer, ITEM, data, require_free=require_free, cancel=threading.Event())  # type: ignore[arg-type]


def test_every_page_is_fetched(tmp_path: Path) -> None:
    api, transfer = Api("1", "2", "3", "4", "5"), Transfer()
    assert fetch(api, transfer, tmp_path) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3", "4", "5"]
    assert api.asked == [None, "1", "2"]


def test_urls_that_run_out_are_asked_for_again_for_what_is_left(tmp_path: Path) -> None:
    api, transfer = Api("1", "2", "3", "4"), Transfer(None, 1)
    assert fetch(api, transfer, tmp_path) == 4
    assert api.asked == [None, "1", "1"]
    assert transfer.urls == ["1?1", "2?1", "3?2", "4?3"], "what has arrived is not fetched twice"


def test_urls_that_run_out_again_and_again_are_an_error(tmp_path: Path) -> None:
    api, transfer = Api("1", "2"), Transfer(*[0] * 10)
    with pytest.raises(UrlExpired):
        fetch(api, transfer, tmp_path)
    assert len(api.asked) == MAX_EXPIRED_ROUNDS


def test_an_input_that_is_removed_meanwhile_is_named(tmp_path: Path) -> None:
    api, transfer = Api("1", "2"), Transfer(1)
    ask = api.inputs_page

    def shrinking(job_id: str, lease_token: str, *, cursor: str | None = None) -> InputPage:
        page = ask(job_id, lease_token, cursor=cursor)
        api.pages = [["1"]]
        return page

    api.inputs_page = shrinking  # type: ignore[method-assign]
    with pytest.raises(ObjectMissing, match="input 2 was removed"):
        fetch(api, transfer, tmp_path)


def test_two_inputs_for_one_path_are_refused_before_either_is_fetched(tmp_path: Path) -> None:
    transfer = Transfer()
    with pytest.raises(UnsafePath, match="two inputs would be stored as a"):
        fetch(Api("a", "a"), transfer, tmp_path)
    assert transfer.urls == []
    with pytest.raises(UnsafePath, match="'into'"):
        fetch(Api("1", "2", "1"), transfer, tmp_path)


def test_nothing_below_the_prefix_is_a_missing_input(tmp_path: Path) -> None:
    with pytest.raises(ObjectMissing, match="no object lies below digits/ in training-data"):
        fetch(Api(), Transfer(), tmp_path)


def test_a_full_disk_is_noticed_before_the_download(tmp_path: Path) -> None:
    def require_free(needed_bytes: int) -> None:
        raise DiskFullError(tmp_path, 5, needed_bytes)

    transfer = Transfer()
    with pytest.raises(DiskFullError, match="20 needed"):
        fetch(Api("1", "2"), transfer, tmp_path, require_free)
    assert transfer.urls == []
