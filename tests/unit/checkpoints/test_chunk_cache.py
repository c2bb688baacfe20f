"""The local cache: bounded, persistent, verified, and never a reason for a failure."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_client.checkpoints.local import chunk_cache as module
from gpu_client.checkpoints.local.chunk_cache import LocalChunkCache, find_excess_caches
from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.transfer.transfer_requests import Segment
from tests.kits.files.directories import write_files
from tests.unit.checkpoints.fake_cloud import JOB_ID
from tests.unit.checkpoints.made_checkpoints import Maker

OTHER_JOB = JOB_ID.replace("1", "2")
FROZEN = b"never changes" * 10


def made(step: int, *, epoch: int = 1) -> Maker:
    maker = Maker(step=step, epoch=epoch)
    maker.file("model", [maker.chunk(b"model-%d" % step), maker.chunk(FROZEN), maker.chunk(bytes(50), codec="zeros")])
    maker.file("deep/er/ü 1", [maker.chunk(b"other-%d" % step)])
    maker.file("empty", [])
    return maker


def digest(raw: bytes) -> str:
    return digest_bytes(raw).blake3


def read(found: Segment | None) -> bytes | None:
    if found is None:
        return None
    with found.path.open("rb") as file:
        file.seek(found.offset)
        return file.read(found.size_bytes)


class Scene:
    """A root for stores, and checkpoints beside it on the same disk."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "stores"
        self.tmp_path = tmp_path
        self.store = LocalChunkCache(self.root, JOB_ID)

    def write(self, maker: Maker) -> Path:
        return write_files(self.tmp_path / f"staged-{maker.step}-{maker.epoch}", maker.contents)

    def commit(self, step: int, *, epoch: int = 2, copy: bool = False) -> Path:
        maker = made(step, epoch=epoch)
        directory = self.write(maker)
        self.store.record_committed(maker.manifest, directory, copy=copy)
        return directory

    def restore(self, step: int, *, epoch: int = 1) -> Path:
        maker = made(step, epoch=epoch)
        directory = self.write(maker)
        self.store.record_restored(maker.manifest, directory)
        return directory

    def entries(self) -> list[str]:
        place = self.root / JOB_ID
        return sorted(path.name for path in place.iterdir()) if place.exists() else []

    def again(self) -> LocalChunkCache:
        """Open the cache as another agent does."""
        return LocalChunkCache(self.root, JOB_ID)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how much is free."""

    def say(free_bytes: int) -> None:
        usage = shutil._ntuple_diskusage(10**12, 0, free_bytes)  # type: ignore[attr-defined]
        monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)

    return say


def assert_has(store: LocalChunkCache, step: int, *, epoch: int) -> None:
    """The newest is this one, every chunk of it is found, and its files are complete."""
    maker = made(step, epoch=epoch)
    found = store.newest()
    assert found is not None
    manifest, directory = found
    assert manifest == maker.manifest
    assert {path: (directory / path).read_bytes() for path in maker.files} == maker.contents
    for chunk, raw in zip(maker.chunks, maker.raw, strict=True):
        assert read(store.find(chunk.blake3)) == (None if chunk.codec == "zeros" else raw)


def test_what_was_committed_is_moved_in_and_found(scene: Scene) -> None:
    directory = scene.write(made(10, epoch=2))
    inode = (directory / "model").stat().st_ino
    scene.commit(10)
    assert not directory.exists()
    assert_has(scene.store, 10, epoch=2)
    found = scene.store.find(digest(FROZEN))
    assert found is not None
    assert found.path.stat().st_ino == inode, "moved, not copied"
    assert scene.store.find(digest(b"something else")) is None


def test_what_was_restored_is_linked(scene: Scene) -> None:
    directory = scene.restore(10)
    assert_has(scene.store, 10, epoch=1)
    found = scene.store.find(digest(FROZEN))
    assert found is not None
    assert found.path.samefile(directory / "model")
    shutil.rmtree(directory)
    assert_has(scene.store, 10, epoch=1)


def test_what_will_be_written_to_again_is_copied(scene: Scene) -> None:
    directory = scene.commit(10, copy=True)
    (directory / "model").write_bytes(b"the next one")
    assert_has(scene.store, 10, epoch=2)


def test_the_newest_and_the_one_resumed_from_are_kept(scene: Scene) -> None:
    scene.restore(10)
    for step in (20, 30, 40):
        scene.commit(step)
    assert scene.entries() == ["10-1", "40-2"]
    assert scene.store.manifests == (made(10).manifest, made(40, epoch=2).manifest)
    assert_has(scene.store, 40, epoch=2)
    assert read(scene.store.find(digest(b"model-10"))) == b"model-10"
    assert scene.store.find(digest(b"model-30")) is None


def test_another_agent_finds_it_again(scene: Scene) -> None:
    scene.restore(10)
    scene.commit(20)
    again = scene.again()
    assert_has(again, 20, epoch=2)
    assert read(again.find(digest(b"other-10"))) == b"other-10"
    assert again.manifests == (), "what the next attempt builds on is what it restores"


def test_after_a_restore_only_what_was_restored_is_left(scene: Scene) -> None:
    """A restore removes the other checkpoints from the cache: newer ones are void, older ones are no base any more."""
    scene.restore(10)
    scene.commit(20)
    scene.store = scene.again()
    scene.restore(15)
    assert scene.entries() == ["15-1"]
    assert scene.store.find(digest(b"model-20")) is None
    assert_has(scene.store, 15, epoch=1)


def test_a_job_never_sees_anothers(scene: Scene) -> None:
    scene.commit(10)
    other = LocalChunkCache(scene.root, OTHER_JOB)
    assert other.newest() is None
    assert other.find(digest(FROZEN)) is None
    other.clear()
    assert_has(scene.again(), 10, epoch=2)
    # Nor if its directory is put in the other's place.
    (scene.root / JOB_ID).rename(scene.root / OTHER_JOB)
    stolen = LocalChunkCache(scene.root, OTHER_JOB)
    assert stolen.newest() is None
    assert not (scene.root / OTHER_JOB / "10-2").exists()


def test_only_the_owner_may_look(scene: Scene) -> None:
    scene.commit(10)
    assert (scene.root / JOB_ID / "10-2").stat().st_mode & 0o077 == 0


HARMS = [
    "no manifest",
    "cut manifest",
    "garbage",
    "a file short",
    "a file gone",
    "a link",
    "a pipe",
    "no file",
    "huge",
    "of another",
]


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_entry_is_ignored_and_removed(scene: Scene, harm: str) -> None:
    scene.restore(10)
    scene.commit(20)
    entry = scene.root / JOB_ID / "20-2"
    manifest, model = entry / "manifest.json", entry / "files" / "model"
    if harm == "no manifest":
        manifest.unlink()
    elif harm == "cut manifest":
        os.truncate(manifest, manifest.stat().st_size - 1)
    elif harm == "garbage":
        manifest.write_bytes(b"\xff{")
    elif harm == "a file short":
        os.truncate(model, 3)
    elif harm == "a file gone":
        model.unlink()
    elif harm == "a link":
        model.rename(scene.tmp_path / "moved")
        model.symlink_to(scene.tmp_path / "moved")
    elif harm == "a pipe":
        manifest.unlink()
        os.mkfifo(manifest)
    elif harm == "no file":
        (entry / "files" / "empty").unlink()
        os.mkfifo(entry / "files" / "empty")
    elif harm == "huge":
        os.truncate(manifest, 10**9)
    else:
        manifest.write_bytes(made(30).manifest.canonical_bytes())
    again = scene.again()
    assert_has(again, 10, epoch=1)
    assert again.find(digest(b"model-20")) is None
    assert scene.entries() == ["10-1"]


@pytest.mark.parametrize("name", [".abc.tmp", "20", "x-y", "20-2.old", "file"])
def test_what_a_crash_left_half_written_is_removed(scene: Scene, name: str) -> None:
    scene.commit(10)
    if name == "file":
        (scene.root / JOB_ID / "20-3").write_text("not a directory")
    else:
        shutil.copytree(scene.root / JOB_ID / "10-2", scene.root / JOB_ID / name)
    assert_has(scene.again(), 10, epoch=2)
    assert scene.entries() == ["10-2"]


def test_a_link_in_the_stores_place_is_not_followed(scene: Scene, tmp_path: Path) -> None:
    scene.commit(10)
    (scene.root / JOB_ID).rename(tmp_path / "elsewhere")
    (scene.root / JOB_ID).symlink_to(tmp_path / "elsewhere")
    assert scene.again().newest() is None
    scene.again().clear()
    assert (tmp_path / "elsewhere" / "10-2").exists()


def test_the_same_checkpoint_twice_is_there_once(scene: Scene) -> None:
    scene.commit(10)
    scene.commit(10)
    assert scene.entries() == ["10-2"]
    assert_has(scene.store, 10, epoch=2)


@pytest.mark.parametrize("call", ["mkdir", "link", "rename", "write_bytes"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_costs_the_cache_and_nothing_else(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    first, second = made(10), made(20, epoch=2)
    restored, staged = scene.write(first), scene.write(second)

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os if call == "link" else Path, call, fails)
        scene.store.record_restored(first.manifest, restored)
        assert scene.store.newest() is None
        if call != "link":
            scene.store.record_committed(second.manifest, staged)
            assert scene.store.newest() is None
    assert scene.store.manifests[0] == first.manifest
    assert [name for name in scene.entries() if not name.startswith(".")] == []
    assert (restored / "model").exists()
    scene.store.record_committed(second.manifest, scene.write(second))
    assert_has(scene.again(), 20, epoch=2)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_nothing_can_be_linked_it_is_copied(scene: Scene, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    rename = Path.rename

    def no_rename(self: Path, target: Path) -> Path:
        if target.name == "files":
            raise OSError(number, "no")
        return rename(self, target)

    def no_link(*_: object, **__: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(Path, "rename", no_rename)
    monkeypatch.setattr(os, "link", no_link)
    scene.commit(10)
    assert_has(scene.store, 10, epoch=2)


def test_links_in_a_staged_directory_become_files(scene: Scene) -> None:
    maker = made(10, epoch=2)
    directory = scene.write(maker)
    (directory / "model").rename(directory / "real")
    (directory / "model").symlink_to("real")
    scene.store.record_committed(maker.manifest, directory)
    shutil.rmtree(directory)
    assert_has(scene.store, 10, epoch=2)


class TestBounds:
    """A cache on a disk."""

    SIZE = len(b"model-10") + len(FROZEN) + len(b"other-10")

    def test_the_oldest_goes_when_both_are_too_much(self, scene: Scene, disk: Callable[[int], None]) -> None:
        # (free + both) / 4 is a byte less than both.
        disk(6 * self.SIZE - 4)
        scene.restore(10)
        assert scene.entries() == ["10-1"]
        scene.commit(20)
        assert scene.entries() == ["20-2"]
        assert scene.store.manifests == (made(10).manifest, made(20, epoch=2).manifest)
        assert_has(scene.store, 20, epoch=2)

    def test_both_stay_when_there_is_room(self, scene: Scene, disk: Callable[[int], None]) -> None:
        disk(6 * self.SIZE)
        scene.restore(10)
        scene.commit(20)
        assert scene.entries() == ["10-1", "20-2"]

    def test_a_share_that_cannot_be_told_stops_nothing(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        """A network disk that was away behind a commit made it count as failed."""
        scene.commit(1)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: (_ for _ in ()).throw(OSError(errno.ESTALE, "stale")))
        scene.commit(2)
        assert [manifest.step for manifest in scene.store.manifests] == [2]
        newest = scene.store.newest()
        assert newest is not None and newest[0].step == 2

    def test_one_that_is_too_large_is_not_kept(self, scene: Scene, disk: Callable[[int], None]) -> None:
        disk(3 * self.SIZE - 4)
        scene.commit(20)
        assert scene.entries() == []
        assert scene.store.find(digest(FROZEN)) is None
        assert scene.store.manifests == (made(20, epoch=2).manifest,)

    def test_it_is_not_even_copied(
        self, scene: Scene, disk: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk(4 * self.SIZE - 4)
        monkeypatch.setattr(shutil, "copyfile", lambda *_: pytest.fail("a disk that is almost full was written to"))
        directory = scene.commit(20, copy=True)
        assert scene.entries() == []
        assert (directory / "model").exists()


def denied(path: Path) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


class TestExcess:
    """The caches of all jobs on a machine share the disk, and the oldest go first."""

    def fill(self, root: Path, *jobs: str) -> None:
        for age, job in enumerate(jobs):
            (root / job / "1-1" / "files").mkdir(parents=True)
            (root / job / "1-1" / "files" / "model").write_bytes(b"x" * 40_960)
            os.utime(root / job, ns=(age, age))

    def test_nothing_is_too_much_on_a_large_disk(self, tmp_path: Path, disk: Callable[[int], None]) -> None:
        self.fill(tmp_path, "a", "b", "c")
        disk(10**9)
        assert find_excess_caches(tmp_path) == []

    def test_the_oldest_go_first_and_the_next_jobs_own_last(self, tmp_path: Path, disk: Callable[[int], None]) -> None:
        self.fill(tmp_path, "a", "b", "c")
        for free_bytes, expected in ((10, ["b", "c", "a"]), (5 * 40_960, ["b"]), (40_960, ["b", "c"])):
            disk(free_bytes)
            assert [path.name for path in find_excess_caches(tmp_path, keep="a")] == expected
        disk(5 * 40_960)
        assert [path.name for path in find_excess_caches(tmp_path)] == ["a"]

    def test_what_is_no_store_goes_in_any_case(self, tmp_path: Path, disk: Callable[[int], None]) -> None:
        disk(10**9)
        root = tmp_path / "stores"
        self.fill(root, "a")
        (root / "file").touch()
        (root / "link").symlink_to(tmp_path)
        assert sorted(path.name for path in find_excess_caches(root)) == ["file", "link"]
        assert find_excess_caches(tmp_path / "nothing") == []

    @pytest.mark.parametrize(
        ("owner", "call", "name", "happens"),
        [
            pytest.param(os, "scandir", "", shutil.rmtree, id="vanishes before the listing"),
            pytest.param(Path, "lstat", "model", shutil.rmtree, id="vanishes after the listing"),
            pytest.param(os, "scandir", "", denied, id="cannot be listed"),
            pytest.param(Path, "lstat", "model", denied, id="can be listed but not be searched"),
        ],
    )
    def test_a_directory_that_vanishes_or_cannot_be_read_counts_nothing(
        self,
        tmp_path: Path,
        disk: Callable[[int], None],
        monkeypatch: pytest.MonkeyPatch,
        owner: object,
        call: str,
        name: str,
        happens: Callable[[Path], None],
    ) -> None:
        """A cache directory whose size is unknown counts nothing, and the trimming of the others goes on."""
        self.fill(tmp_path, "a", "b", "c")
        disk(2 * 40_960)
        assert [path.name for path in find_excess_caches(tmp_path)] == ["a", "b"]
        directory = tmp_path / "b" / "1-1" / "files"
        looks, met = getattr(owner, call), []

        def look(path: object) -> object:
            if str(path) == str(directory / name):
                met.append(path)
                happens(directory)
            return looks(path)

        with monkeypatch.context() as patch:
            patch.setattr(owner, call, look)
            assert [path.name for path in find_excess_caches(tmp_path)] == ["a"]
        assert len(met) == 1


def test_the_checkpoint_that_has_the_bases_of_the_newest_one_is_kept(scene: Scene) -> None:
    """The cache keeps the checkpoint with the newest one's bases, so that the next checkpoint can be a delta too."""

    def commit(step: int, base: bytes | None) -> None:
        maker = Maker(step=step, epoch=2)
        raw = b"%04d" % step * 100
        if base is None:
            maker.file("model", [maker.chunk(raw, codec="planes", width=2)])
        else:
            delta = maker.chunk(base, codec="planes", width=2)
            maker.file("model", [maker.chunk(raw, codec="delta", width=2, base=delta)])
        scene.store.record_committed(maker.manifest, scene.write(maker))

    whole = b"0001" * 100
    commit(1, None)
    commit(2, whole)
    commit(3, whole)
    assert scene.entries() == ["1-2", "3-2"]
    assert read(scene.store.find(digest(whole))) == whole
    commit(4, None)
    assert scene.entries() == ["4-2"]
