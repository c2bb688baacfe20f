"""Test the download of inputs: pages, expired URLs, conflicting paths, full disks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from baton.contract.jobs.job import FailureClass, InputRef
from baton.contract.objects.dataset_manifest import DatasetFile, DatasetManifest
from baton.contract.worker.calls import InputObject, InputPage, PushManifest, WorkItem
from gpu_client.agent.io.inputs import MAX_EXPIRED_ROUNDS, InputsDiffer, fetch_inputs
from gpu_client.agent.process.failures import classify_error
from gpu_client.agent.workspace.slots import DiskFullError
from gpu_client.transport.errors import (
    ChecksumMismatch,
    DiskFull,
    ObjectMissing,
    TransferError,
    UnsafePath,
    UrlExpired,
)
from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.transfer.manager import Download
from tests.unit.agent.agent_kit import JOB_ID, TOKEN, make_item

ITEM = make_item(inputs=[InputRef(prefix="digits/")])


class Api:
    """Pages of inputs, two a page; every answer has new URLs."""

    def __init__(self, *paths: str) -> None:
        self.pages = [list(paths[start : start + 2]) for start in range(0, len(paths), 2)] or [[]]
        self.asked: list[str | None] = []
        self.manifests: list[PushManifest] = []
        self.place = "digits/"
        self.keys: dict[str, str] = {}
        """Keys of the objects that have another name than their path."""

    def inputs_page(self, job_id: str, lease_token: str, *, cursor: str | None = None) -> InputPage:
        assert (job_id, lease_token) == (JOB_ID, TOKEN)
        self.asked.append(cursor)
        number = int(cursor or 0)
        return InputPage(
            inputs=[
                InputObject(
                    key=self.keys.get(path, self.place + path),
                    path=path,
                    size_bytes=10,
                    etag="e",
                    url=f"{path}?{len(self.asked)}",
                )
                for path in self.pages[number]
            ],
            manifests=self.manifests if cursor is None else [],
            next_cursor=str(number + 1) if number + 1 < len(self.pages) else None,
            expires_at=1_790_000_900,
        )


class Transfer:
    """Stores files; `expire` lists, batch by batch, the number of files after which the URLs expire."""

    def __init__(self, *expire: int | None) -> None:
        self.expire = list(expire)
        self.urls: list[str] = []
        self.contents: dict[str, str] = {}
        """Contents by key; every other object contains its key."""
        self.alter_copy = False
        """True makes the second copy of an object arrive with other bytes."""

    def download(self, items: Sequence[Download], *, cancel: object) -> None:
        limit = self.expire.pop(0) if self.expire else None
        for number, item in enumerate(items):
            if number == limit:
                raise UrlExpired(f"{item.name}: the presigned URL has run out")
            self.urls.append(item.url)
            content = self.contents.get(item.name, item.name).encode()
            if item.blake3 is not None and digest_bytes(content).blake3 != item.blake3:
                raise ChecksumMismatch(f"{item.name}: BLAKE3 is another")
            if self.alter_copy and item.name in {other.name for other in items[:number]}:
                content = content[::-1]
            (item.root / item.path).write_bytes(content)

    def read(self, url: str, *, name: str, max_bytes: int, cancel: object) -> bytes:
        return self.contents[name].encode()


def fetch(
    api: Api,
    transfer: Transfer,
    data: Path,
    require_free: Callable[[int], None] = lambda _bytes: None,
    item: WorkItem = ITEM,
) -> int:
    return fetch_inputs(api, transfer, item, data, require_free=require_free, cancel=threading.Event())  # type: ignore[arg-type]


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


class Sharing(Api):
    """The last page has files that another job shared."""

    def __init__(self, *paths: str, shared: str = ".baton/shared/set.zip", content: bytes = b"jobs/1/set") -> None:
        super().__init__(*paths)
        self.shared = InputObject(
            key="jobs/1/set",
            path=shared,
            size_bytes=30,
            etag="e",
            url="set",
            blake3=digest_bytes(content).blake3,
            shared=True,
        )

    def inputs_page(self, job_id: str, lease_token: str, *, cursor: str | None = None) -> InputPage:
        page = super().inputs_page(job_id, lease_token, cursor=cursor)
        shared = self.shared.model_copy(update={"url": f"set?{len(self.asked)}"})
        return page if page.next_cursor else page.model_copy(update={"inputs": [shared, *page.inputs]})


class TestShared:
    """Files that another job has shared with this one."""

    def test_it_is_fetched_beside_the_inputs_and_not_counted(self, tmp_path: Path) -> None:
        (tmp_path / ".baton/shared").mkdir(parents=True)
        room: list[int] = []
        assert fetch(Sharing("1", "2", "3"), Transfer(), tmp_path, room.append) == 3
        assert (tmp_path / ".baton/shared/set.zip").read_bytes() == b"jobs/1/set"
        assert room == [20, 10, 30]

    @pytest.mark.parametrize("error", [ObjectMissing, UrlExpired, UnsafePath])
    def test_the_job_does_without_what_cannot_be_fetched(
        self, tmp_path: Path, error: type[TransferError], caplog: pytest.LogCaptureFixture
    ) -> None:
        class Failing(Transfer):
            def download(self, items: Sequence[Download], *, cancel: object) -> None:
                if items and items[0].name == "jobs/1/set":
                    raise error("jobs/1/set: no such object")
                super().download(items, cancel=cancel)

        assert fetch(Sharing("1"), Failing(), tmp_path) == 1
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["1"]
        assert "a shared file is not available: jobs/1/set: no such object" in caplog.text

    def test_a_url_that_ran_out_while_the_inputs_were_fetched_is_asked_for_again(self, tmp_path: Path) -> None:
        (tmp_path / ".baton/shared").mkdir(parents=True)
        api, transfer = Sharing("1", "2", "3"), Transfer(None, None, 0)
        assert fetch(api, transfer, tmp_path) == 3
        assert api.asked == [None, "1", "1"] and transfer.urls[-1] == "set?3"
        assert (tmp_path / ".baton/shared/set.zip").read_bytes() == b"jobs/1/set"

    @pytest.mark.parametrize("full", ["before", "while"])
    def test_the_job_does_without_what_the_disk_has_no_room_for(
        self, tmp_path: Path, full: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Full(Transfer):
            def download(self, items: Sequence[Download], *, cancel: object) -> None:
                if items[0].name == "jobs/1/set" and full == "while":
                    raise DiskFull("no space left on this machine: set.zip")
                super().download(items, cancel=cancel)

        def require_free(needed_bytes: int) -> None:
            if needed_bytes == 30 and full == "before":
                raise DiskFullError(tmp_path, 5, needed_bytes)

        assert fetch(Sharing("1"), Full(), tmp_path, require_free) == 1
        assert (tmp_path / "1").read_bytes() == b"digits/1"
        assert "a shared file is not available: " in caplog.text

    def test_other_bytes_than_were_shared_are_not_taken(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        assert fetch(Sharing("1", content=b"others"), Transfer(), tmp_path) == 1
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["1"]
        assert "a shared file is not available: " in caplog.text

    def test_the_jobs_own_input_is_not_replaced(self, tmp_path: Path) -> None:
        assert fetch(Sharing("1", shared="1"), Transfer(), tmp_path) == 1
        assert (tmp_path / "1").read_bytes() == b"digits/1"

    def test_it_stands_for_no_input(self, tmp_path: Path) -> None:
        (tmp_path / ".baton/shared").mkdir(parents=True)
        with pytest.raises(ObjectMissing, match="no object lies below digits/"):
            fetch(Sharing(), Transfer(), tmp_path)


class TestPushed:
    """A folder that was pushed, with its manifest."""

    MANIFEST = "digits/.baton/dataset.json"

    def scene(self, *paths: str, files: dict[str, bytes]) -> tuple[Api, Transfer]:
        """`files`: what was pushed; every file has the 10 bytes of its key."""
        manifest = DatasetManifest(
            files=[
                DatasetFile(path=path, size_bytes=len(data), blake3=digest_bytes(data).blake3)
                for path, data in files.items()
            ]
        )
        transfer = Transfer()
        transfer.contents[self.MANIFEST] = manifest.model_dump_json()
        return Api(*paths), transfer

    def test_files_are_verified_and_the_manifest_is_no_input(self, tmp_path: Path) -> None:
        api, transfer = self.scene(
            "!00", ".baton/dataset.json", "a00", files={"!00": b"digits/!00", "a00": b"digits/a00"}
        )
        assert fetch(api, transfer, tmp_path) == 2
        assert sorted(path.name for path in tmp_path.iterdir()) == ["!00", "a00"]

    @pytest.mark.parametrize("path", ["a00", "!00"])
    def test_other_bytes_than_were_pushed_are_bad_input(self, tmp_path: Path, path: str) -> None:
        """A file with other bytes than pushed is bad input, before the manifest in the list and after it."""
        pushed = {"!00": b"digits/!00", "a00": b"digits/a00"}
        api, transfer = self.scene("!00", "!01", ".baton/dataset.json", "a00", files=pushed)
        transfer.contents[f"digits/{path}"] = "0123456789"
        with pytest.raises(InputsDiffer, match=f"{path}.*push (digits/|the folder) again") as caught:
            fetch(api, transfer, tmp_path)
        assert classify_error(caught.value).failure_class is FailureClass.BAD_INPUT

    def test_another_size_is_told_before_it_is_fetched(self, tmp_path: Path) -> None:
        api, transfer = self.scene(".baton/dataset.json", "a00", files={"a00": b"short"})
        with pytest.raises(InputsDiffer, match="input digits/a00 has 10 bytes, and was pushed with 5"):
            fetch(api, transfer, tmp_path)
        assert transfer.urls == []

    def test_files_that_are_lacking_are_counted_and_one_is_named(self, tmp_path: Path) -> None:
        pushed = {"a00": b"digits/a00", "b00": b"digits/b00", "c00": b"digits/c00"}
        api, transfer = self.scene(".baton/dataset.json", "a00", files=pushed)
        with pytest.raises(
            InputsDiffer, match="2 of 3 files that were pushed are not stored any more, digits/b00 among them"
        ):
            fetch(api, transfer, tmp_path)

    @pytest.mark.parametrize("first", ["inner", "outer"])
    def test_the_manifest_of_the_inner_folder_counts(self, tmp_path: Path, first: str) -> None:
        """The inner manifest counts: a push of the outer folder rewrites it, a push of the inner folder only it."""
        manifests = {"inner": "!a/.baton/dataset.json", "outer": ".baton/dataset.json"}
        order = sorted(manifests, key=lambda name: name != first)
        api, transfer = self.scene(*(manifests[name] for name in order), "!a/1", files={"!a/1": b"older"})
        now = DatasetFile(path="1", size_bytes=10, blake3=digest_bytes(b"0123456789").blake3)
        transfer.contents["digits/!a/.baton/dataset.json"] = DatasetManifest(files=[now]).model_dump_json()
        transfer.contents["digits/!a/1"] = "0123456789"
        (tmp_path / "!a").mkdir()
        assert fetch(api, transfer, tmp_path) == 1
        transfer.contents["digits/!a/1"] = "9876543210"
        with pytest.raises(InputsDiffer, match="push the folder again"):
            fetch(api, transfer, tmp_path)

    def around(self, *paths: str, files: dict[str, bytes]) -> tuple[Api, Transfer]:
        """The input digits/ is a part of what was pushed: the manifest lies above it."""
        api, transfer = self.scene(*paths, files=files)
        transfer.contents[".baton/dataset.json"] = transfer.contents.pop(self.MANIFEST)
        api.manifests = [PushManifest(key=".baton/dataset.json", url="manifest")]
        return api, transfer

    def test_a_part_of_what_was_pushed_is_verified_as_well(self, tmp_path: Path) -> None:
        api, transfer = self.around("a00", files={"digits/a00": b"digits/a00", "others/b00": b"not asked for"})
        assert fetch(api, transfer, tmp_path) == 1
        transfer.contents["digits/a00"] = "0123456789"
        with pytest.raises(InputsDiffer, match="input has other bytes than were pushed: digits/a00"):
            fetch(api, transfer, tmp_path)

    def test_what_is_lacking_of_that_part_is_told_with_the_folder_that_has_it(self, tmp_path: Path) -> None:
        pushed = {"digits/a00": b"digits/a00", "digits/b00": b"digits/b00", "others/b00": b"not asked for"}
        api, transfer = self.around("a00", files=pushed)
        transfer.contents["sets/.baton/dataset.json"] = transfer.contents.pop(".baton/dataset.json")
        api.manifests = [PushManifest(key="sets/.baton/dataset.json", url="manifest")]
        item = make_item(inputs=[InputRef(prefix="sets/digits/")])
        api.place = "sets/digits/"
        transfer.contents["sets/digits/a00"] = "digits/a00"
        match = "1 of 2 files .* not stored any more, sets/digits/b00 among them: push sets/ again"
        with pytest.raises(InputsDiffer, match=match):
            fetch(api, transfer, tmp_path, item=item)

    def test_one_file_in_two_places_is_verified_in_both(self, tmp_path: Path) -> None:
        """The second is fetched behind the first, and both before their manifest."""
        api, transfer = self.scene("!00", "!01", ".baton/dataset.json", files={"!00": b"digits/!00"})
        api.keys["!01"] = "digits/!00"
        assert fetch(api, transfer, tmp_path) == 2
        transfer.alter_copy = True
        with pytest.raises(InputsDiffer, match="digits/!00 has other bytes than were pushed: push digits/ again"):
            fetch(api, transfer, tmp_path)

    def test_files_that_nobody_pushed_are_welcome(self, tmp_path: Path) -> None:
        api, transfer = self.scene(".baton/dataset.json", "a00", "extra", files={"a00": b"digits/a00"})
        assert fetch(api, transfer, tmp_path) == 2

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            '{"version": 2, "files": []}',
            '{"files": [{"path": "../x"}]}',
            json.dumps({"files": [{"path": "a", "size_bytes": 1, "blake3": digit * 64} for digit in "ab"]}),
        ],
    )
    def test_a_manifest_that_is_none(self, tmp_path: Path, text: str) -> None:
        api, transfer = self.scene(".baton/dataset.json", "a00", files={})
        transfer.contents[self.MANIFEST] = text
        with pytest.raises(InputsDiffer, match=r"digits/\.baton/dataset\.json is no manifest of a data set"):
            fetch(api, transfer, tmp_path)
        assert transfer.urls == []

    def test_a_push_that_was_not_finished_is_bad_input(self, tmp_path: Path) -> None:
        """An unfinished push is bad input, even if all files that its manifest names are stored."""
        api, transfer = self.scene(".baton/dataset.json", "a00", files={"a00": b"digits/a00"})
        finished = DatasetManifest.model_validate_json(transfer.contents[self.MANIFEST])
        transfer.contents[self.MANIFEST] = finished.model_copy(update={"unfinished": True}).model_dump_json()
        with pytest.raises(InputsDiffer, match="a push to digits/ was not finished: repeat it") as caught:
            fetch(api, transfer, tmp_path)
        assert classify_error(caught.value).failure_class is FailureClass.BAD_INPUT
        assert transfer.urls == []

    def test_a_part_of_a_push_that_was_not_finished_is_bad_input(self, tmp_path: Path) -> None:
        api, transfer = self.around("a00", files={"digits/a00": b"digits/a00"})
        transfer.contents[".baton/dataset.json"] = DatasetManifest(files=[], unfinished=True).model_dump_json()
        transfer.contents["sets/.baton/dataset.json"] = transfer.contents.pop(".baton/dataset.json")
        api.manifests = [PushManifest(key="sets/.baton/dataset.json", url="manifest")]
        with pytest.raises(InputsDiffer, match="a push to sets/ was not finished"):
            fetch(api, transfer, tmp_path)
        assert transfer.urls == []

    def test_without_a_manifest_a_mismatch_is_the_machines(self, tmp_path: Path) -> None:
        class Altering(Transfer):
            def download(self, items: Sequence[Download], *, cancel: object) -> None:
                raise ChecksumMismatch("digits/a00: has 9 bytes instead of 10")

        with pytest.raises(ChecksumMismatch):
            fetch(Api("a00"), Altering(), tmp_path)
