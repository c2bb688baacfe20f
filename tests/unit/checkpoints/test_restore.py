"""Restore: the newest sound checkpoint, complete and verified, or a clear reason why not."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from gpu_client.checkpoints import reading
from gpu_client.checkpoints.restore import Restored, RestoreFailed, restore
from gpu_client.checkpoints.store import LocalStore
from gpu_client.checkpoints.upload import commit_checkpoint
from gpu_client.transport.digests import digest_bytes
from gpu_client.transport.errors import (
    DiskFull,
    LeaseLost,
    TransferCanceled,
    TransferError,
    Unreachable,
)
from gpu_client.transport.transfer import Transfer
from tests.unit.checkpoints.fake_cloud import EXPIRED, JOB_ID, FakeCloud, refusal
from tests.unit.checkpoints.made_checkpoints import Maker, put, put_whole_files
from tests.unit.transport.scripted_server import Handler, reply, reset, truncated


def contents(step: int) -> dict[str, bytes]:
    same = b"frozen" * 1000
    model = b"".join(b"%d-" % number + (b"%d" % step * 1333)[:3998] for number in range(3))
    return {"model.bin": model, "frozen.bin": same, "copy/frozen.bin": same, "empty": b""}


def made(step: int) -> Maker:
    """What is new in one pack, in three chunks; what never changes in another."""
    maker = Maker(step=step)
    found = contents(step)
    model = found["model.bin"]
    maker.file("model.bin", [maker.chunk(model[start : start + 4000]) for start in (0, 4000, 8000)])
    frozen = maker.chunk(found["frozen.bin"], pack=1)
    maker.file("frozen.bin", [frozen])
    maker.file("copy/frozen.bin", [frozen])
    maker.file("empty", [])
    return maker


@pytest.fixture(params=["version 1", "version 2"])
def cloud_100_200(request: pytest.FixtureRequest, cloud: FakeCloud) -> FakeCloud:
    """A cloud with checkpoints of steps 100 and 200."""
    for step in (100, 200):
        if request.param == "version 1":
            put_whole_files(cloud, contents(step), step=step)
        else:
            put(cloud, made(step))
    return cloud


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand bytes a request."""
    monkeypatch.setattr(reading, "MAX_RANGE_BYTES", 1000)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


def found_in(place: Path) -> dict[str, bytes]:
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def assert_restored(restored: Restored | None, output: Path, step: int) -> None:
    """The directory is exactly the checkpoint, and nothing else is left."""
    assert restored is not None
    assert (restored.step, restored.epoch, restored.path) == (step, 1, output / f"checkpoint-{step}")
    assert found_in(restored.path) == contents(step)
    assert [path.name for path in output.iterdir()] == [f"checkpoint-{step}"]


def test_the_newest_is_restored(cloud_100_200: FakeCloud, transfer: Transfer, output: Path) -> None:
    cloud = cloud_100_200
    moved: list[int] = []
    restored = restore(cloud, transfer, cloud.item(), output, progress=moved.append)
    assert_restored(restored, output, 200)
    assert cloud.calls == ["blob_urls"]
    assert cloud.damaged == []
    # what two files have is fetched once
    assert cloud.store.paths("GET").count(cloud.blob_of(200, "frozen.bin")) == 1
    assert sum(moved) == 12_000 + 6000


def test_a_job_without_checkpoints_starts_from_nothing(cloud: FakeCloud, transfer: Transfer, output: Path) -> None:
    assert restore(cloud, transfer, cloud.item(), output) is None
    assert cloud.calls == []


@pytest.mark.parametrize("harm", ["missing", "altered", "short", "long", "manifest gone", "manifest altered"])
def test_damage_is_reported_and_the_one_before_it_restored(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path, harm: str
) -> None:
    """Regression (Dreambooth worker): an unpacking that failed was only logged, training began at 0."""
    cloud = cloud_100_200
    objects, blob = cloud.store.objects, cloud.blob_of(200, "model.bin")
    manifest = cloud.manifest_path(cloud.manifest(200))
    if harm == "missing":
        del objects[blob]
    elif harm == "altered":
        objects[blob] = b"x" + objects[blob][1:]
    elif harm == "short":
        objects[blob] = objects[blob][:-1]
    elif harm == "long":
        objects[blob] += b"x"
    elif harm == "manifest gone":
        del objects[manifest]
    else:
        objects[manifest] = objects[manifest].replace(b"model.bin", b"mobel.bin")
    restored = restore(cloud, transfer, cloud.item(), output)
    assert_restored(restored, output, 100)
    assert [(step, epoch) for step, epoch, _ in cloud.damaged] == [(200, 1)]
    assert cloud.damaged[0][2]


def test_a_pack_that_nobody_has_a_url_for_is_damage(cloud_100_200: FakeCloud, transfer: Transfer, output: Path) -> None:
    cloud = cloud_100_200
    cloud.withheld.add(cloud.blob_of(200, "model.bin").removeprefix("/packs/"))
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 100)
    assert [damage[0] for damage in cloud.damaged] == [200]


def test_a_checkpoint_whose_manifest_the_control_plane_cannot_read_is_damage(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path
) -> None:
    cloud = cloud_100_200
    cloud.raises["blob_urls"] = [refusal("checkpoint_not_found", 404)]
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 100)
    assert [damage[0] for damage in cloud.damaged] == [200]


def test_a_manifest_that_escapes_is_damage(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path, tmp_path: Path
) -> None:
    cloud = cloud_100_200
    path = cloud.manifest_path(cloud.manifest(200))
    cloud.store.objects[path] = cloud.store.objects[path].replace(b'"model.bin"', b'"../../evil"')
    item = cloud.item()
    item = item.model_copy(update={"resume": [ref.model_copy(update={"manifest_blake3": None}) for ref in item.resume]})
    assert_restored(restore(cloud, transfer, item, output), output, 100)
    assert "evil" not in str(list(tmp_path.rglob("*")))
    assert [damage[0] for damage in cloud.damaged] == [200]


def test_everything_damaged_and_reported_means_starting_anew_loudly(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cloud = cloud_100_200
    for step in (100, 200):
        del cloud.store.objects[cloud.blob_of(step, "model.bin")]
    assert restore(cloud, transfer, cloud.item(), output) is None
    assert [damage[0] for damage in cloud.damaged] == [200, 100]
    assert "starts from step 0" in caplog.text
    assert list(output.iterdir()) == []


def test_damage_that_cannot_be_reported_does_not_start_anew(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path
) -> None:
    cloud = cloud_100_200
    for step in (100, 200):
        del cloud.store.objects[cloud.blob_of(step, "model.bin")]
    cloud.raises["report_damaged"] = [refusal("checkpoint_not_found", 404)]
    with pytest.raises(RestoreFailed, match="step 200"):
        restore(cloud, transfer, cloud.item(), output)


@pytest.mark.parametrize("act", [reply(500), reply(503), reset, truncated(b"x" * 12_000, 10)])
def test_a_network_that_stays_away_is_not_damage(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path, act: object
) -> None:
    """Regression (Kelpie worker): failed downloads were swallowed, training restarted and deleted good checkpoints."""
    cloud = cloud_100_200
    cloud.store.routes["GET", cloud.blob_of(200, "model.bin")] = act  # type: ignore[assignment]
    with pytest.raises(Unreachable):
        restore(cloud, transfer, cloud.item(), output)
    assert cloud.damaged == []
    assert list(output.iterdir()) == []


def test_a_network_that_comes_back_is_waited_for(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path, delays: list[float]
) -> None:
    cloud = cloud_100_200
    blob = cloud.blob_of(200, "model.bin")
    manifest = cloud.manifest_path(cloud.manifest(200))
    cloud.store.script("GET", blob, reset, reply(503), truncated(contents(200)["model.bin"], 5000))
    cloud.store.script("GET", manifest, reply(500), reply(200, b'{"altered": "on the way"}'))
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 200)
    assert cloud.damaged == []
    assert cloud.store.paths("GET").count(blob) == 4
    assert delays


def test_bytes_altered_on_the_way_are_fetched_again(cloud_100_200: FakeCloud, transfer: Transfer, output: Path) -> None:
    cloud = cloud_100_200
    cloud.store.script("GET", cloud.blob_of(200, "model.bin"), reply(200, b"?" * 12_000))
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 200)
    assert cloud.damaged == []


def test_a_store_that_refuses_is_not_damage(cloud_100_200: FakeCloud, transfer: Transfer, output: Path) -> None:
    cloud = cloud_100_200
    cloud.store.routes["GET", cloud.blob_of(200, "model.bin")] = reply(403, b"<Code>SignatureDoesNotMatch</Code>")
    with pytest.raises(TransferError):
        restore(cloud, transfer, cloud.item(), output)
    assert cloud.damaged == []


@pytest.mark.parametrize("code", ["lease_lost", "job_canceled"])
@pytest.mark.parametrize("call", ["blob_urls", "report_damaged"])
def test_a_lost_lease_ends_it(cloud_100_200: FakeCloud, transfer: Transfer, output: Path, call: str, code: str) -> None:
    cloud = cloud_100_200
    if call == "report_damaged":
        del cloud.store.objects[cloud.blob_of(200, "model.bin")]
    cloud.raises[call] = [refusal(code)]
    with pytest.raises(LeaseLost):
        restore(cloud, transfer, cloud.item(), output)
    assert list(output.iterdir()) == []


def test_urls_that_ran_out_are_asked_for_again(cloud_100_200: FakeCloud, transfer: Transfer, output: Path) -> None:
    cloud = cloud_100_200
    cloud.store.script("GET", cloud.blob_of(200, "model.bin"), EXPIRED, EXPIRED)
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 200)
    # what had arrived is not fetched twice
    assert cloud.store.paths("GET").count(cloud.blob_of(200, "frozen.bin")) == 1


def test_urls_that_always_run_out_are_not_damage_and_no_reason_to_go_back(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path
) -> None:
    cloud = cloud_100_200
    cloud.store.routes["GET", cloud.blob_of(200, "model.bin")] = EXPIRED
    with pytest.raises(RestoreFailed, match="run out"):
        restore(cloud, transfer, cloud.item(), output)
    assert cloud.damaged == []
    assert list(output.iterdir()) == []


def test_a_full_disk_is_noticed_before_the_download(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = cloud_100_200
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(DiskFull, match="needs 24000 bytes; 1 are free"):
        restore(cloud, transfer, cloud.item(), output)
    assert cloud.damaged == []
    assert cloud.calls == []


def test_canceling_leaves_nothing(cloud_100_200: FakeCloud, transfer: Transfer, output: Path) -> None:
    cloud = cloud_100_200
    cancel = threading.Event()

    def cancel_now(handler: Handler) -> None:
        cancel.set()
        handler.answer(503)

    cloud.store.script("GET", cloud.blob_of(200, "model.bin"), cancel_now)
    with pytest.raises(TransferCanceled):
        restore(cloud, transfer, cloud.item(), output, cancel=cancel)
    assert list(output.iterdir()) == []
    assert cloud.damaged == []


def test_what_lies_in_its_place_is_replaced(cloud_100_200: FakeCloud, transfer: Transfer, output: Path) -> None:
    cloud = cloud_100_200
    (output / "checkpoint-200").mkdir(parents=True)
    (output / "checkpoint-200" / "stale").touch()
    (output / ".restore-200-1").mkdir()
    (output / ".restore-200-1" / "leftover").touch()
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 200)


def test_many_packs_are_asked_for_in_pieces(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = cloud_100_200
    monkeypatch.setattr("gpu_client.checkpoints.restore.MAX_MISSING_PER_ANSWER", 1)
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 200)
    assert cloud.calls == ["blob_urls", "blob_urls"]


def test_what_a_worker_commits_comes_back(cloud: FakeCloud, transfer: Transfer, output: Path, tmp_path: Path) -> None:
    """Both sides of the format together."""
    for step in (100, 200):
        place = tmp_path / "made" / str(step)
        for name, data in contents(step).items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(data)
        commit_checkpoint(cloud, transfer, cloud.item(epoch=1), place, step)
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 200)
    assert cloud.damaged == []


class TestFormat2:
    """Chunks in packs."""

    def test_only_what_is_wanted_of_a_pack_is_fetched(
        self, cloud: FakeCloud, transfer: Transfer, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reading, "MAX_GAP_BYTES", 10)
        maker = Maker()
        maker.file("f", [maker.chunk(b"first" * 20), maker.chunk(b"last" * 25, gap=500)])
        put(cloud, maker)
        moved: list[int] = []
        restored = restore(cloud, transfer, cloud.item(), output, progress=moved.append)
        assert restored is not None
        assert found_in(restored.path) == maker.contents
        assert sum(moved) == restored.fetched_bytes == 200
        asked = [seen.headers.get("range") for seen in cloud.store.seen if seen.path.startswith("/packs/")]
        assert sorted(asked, key=str) == ["bytes=0-99", "bytes=600-699"]

    def test_every_codec_comes_back(self, cloud: FakeCloud, transfer: Transfer, output: Path) -> None:
        maker = Maker()
        chance = random.Random(1)
        base = maker.chunk(chance.randbytes(1000), codec="planes", width=4)
        near = maker.chunk(maker.raw[base][:-1] + b"!", codec="delta", width=2, base=base, pack=1)
        unused = maker.chunk(chance.randbytes(501), pack=2)
        odd = maker.chunk(maker.raw[unused][:-1] + b"!", codec="delta", width=8, base=unused, pack=1)
        zeros = maker.chunk(bytes(70_000), codec="zeros")
        plain = maker.chunk(chance.randbytes(999))
        maker.file("a/ü 1", [zeros, near, plain, odd, zeros])
        maker.file("b", [plain, base])
        put(cloud, maker)
        restored = restore(cloud, transfer, cloud.item(), output)
        assert restored is not None
        assert found_in(output) == {f"checkpoint-100/{path}": data for path, data in maker.contents.items()}
        assert cloud.damaged == []

    @pytest.mark.parametrize("which", ["raw", "planes", "delta", "base"])
    def test_damage_inside_of_a_pack_is_found(
        self, cloud: FakeCloud, transfer: Transfer, output: Path, which: str
    ) -> None:
        put(cloud, made(100))
        maker = Maker(step=200)
        chance = random.Random(1)
        raw = maker.chunk(chance.randbytes(100), pack=0)
        planes = maker.chunk(chance.randbytes(100), codec="planes", width=2, pack=1)
        base = maker.chunk(chance.randbytes(100), pack=2)
        delta = maker.chunk(maker.raw[base][:-1] + b"!", codec="delta", base=base, pack=3)
        maker.file("f", [raw, planes, delta])
        put(cloud, maker)
        index = {"raw": raw, "planes": planes, "delta": delta, "base": base}[which]
        path = cloud.packs(200)[index]
        cloud.store.objects[path] = cloud.store.objects[path][:-1] + bytes([cloud.store.objects[path][-1] ^ 1])
        assert_restored(restore(cloud, transfer, cloud.item(), output), output, 100)
        ((step, epoch, message),) = cloud.damaged
        assert (step, epoch) == (200, 1)
        assert maker.chunks[index].blake3 in message
        assert cloud.store.paths("GET").count(path) == 2, "fetched once more before it is blamed"

    @pytest.mark.usefixtures("small_ranges")
    @pytest.mark.parametrize("times", [1, 2])
    def test_a_large_chunk_is_fetched_once_more_too(
        self, cloud: FakeCloud, transfer: Transfer, output: Path, times: int
    ) -> None:
        maker = Maker()
        maker.file("f", [maker.chunk(random.Random(1).randbytes(2500))])
        put(cloud, maker)
        (path,) = cloud.packs(100)

        def altered(handler: Handler) -> None:
            begin, end = (int(n) for n in handler.headers["Range"].removeprefix("bytes=").split("-"))
            size_bytes = end + 1 - begin
            headers = {"Content-Range": f"bytes {begin}-{end}/2500"}
            handler.answer(206, b"?" * size_bytes, headers)

        cloud.store.script("GET", path, *[altered] * (3 * times))
        restored = restore(cloud, transfer, cloud.item(), output)
        if times == 1:
            assert restored is not None
            assert found_in(restored.path) == maker.contents
            assert cloud.damaged == []
            # what did not verify is no restored byte, but it was fetched
            assert restored.fetched_bytes == 5000
        else:
            assert restored is None
            assert [damage[0] for damage in cloud.damaged] == [100]

    @pytest.mark.usefixtures("small_ranges")
    def test_fresh_urls_are_for_the_rest_only(self, cloud: FakeCloud, transfer: Transfer, output: Path) -> None:
        """Ten ranges of one pack; after three of them the URLs run out."""
        maker = Maker()
        maker.file("f", [maker.chunk(random.Random(n).randbytes(1000)) for n in range(10)])
        put(cloud, maker)
        (path,) = cloud.packs(100)
        served: list[str] = []

        def serve(handler: Handler) -> None:
            if len(served) == 3 and cloud.calls.count("blob_urls") == 1:
                EXPIRED(handler)
                return
            asked = handler.headers["Range"]
            served.append(asked)
            begin, end = (int(n) for n in asked.removeprefix("bytes=").split("-"))
            body = cloud.store.objects[path][begin : end + 1]
            handler.answer(206, body, {"Content-Range": f"bytes {begin}-{end}/10000"})

        cloud.store.routes["GET", path] = serve
        restored = restore(cloud, transfer, cloud.item(), output)
        assert restored is not None
        assert found_in(restored.path) == maker.contents
        assert len(served) == len(set(served)) == 10
        assert cloud.calls == ["blob_urls", "blob_urls"]

    def test_a_newer_version_is_no_damage_and_no_reason_to_go_back(
        self, cloud: FakeCloud, transfer: Transfer, output: Path
    ) -> None:
        put(cloud, made(100))
        manifest = put(cloud, made(200))
        item = cloud.item()
        data = manifest.canonical_bytes().replace(b'"version":2', b'"version":3')
        cloud.store.objects[cloud.manifest_path(manifest)] = data
        newest = item.resume[0].model_copy(update={"manifest_blake3": digest_bytes(data).blake3})
        item = item.model_copy(update={"resume": [newest, *item.resume[1:]]})
        with pytest.raises(RestoreFailed, match=r"step 200: .* version 3; this worker reads versions up to 2: update"):
            restore(cloud, transfer, item, output)
        assert cloud.damaged == []
        assert list(output.iterdir()) == []

    def test_zeros_take_no_room_on_the_disk_and_none_on_the_wire(
        self, cloud: FakeCloud, transfer: Transfer, output: Path
    ) -> None:
        """A file of 5 GiB that is nothing but a hole with something at its end."""
        maker = Maker()
        zeros = maker.chunk(bytes(8 * 1024**2), codec="zeros")
        end = maker.chunk(b"the end")
        maker.file("sparse", [zeros] * 640 + [end])
        put(cloud, maker)
        restored = restore(cloud, transfer, cloud.item(), output)
        assert restored is not None
        info = (restored.path / "sparse").stat()
        assert info.st_size == 5 * 1024**3 + 7
        assert info.st_blocks * 512 < 1024**2
        assert (restored.total_bytes, restored.fetched_bytes) == (5 * 1024**3 + 7, 7)
        with (restored.path / "sparse").open("rb") as opened:
            opened.seek(-10, os.SEEK_END)
            assert opened.read() == b"\0\0\0the end"

    def test_room_for_bases_that_no_file_has_is_asked_for_too(
        self, cloud: FakeCloud, transfer: Transfer, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        maker = Maker()
        base = maker.chunk(b"base" * 250)
        maker.file("f", [maker.chunk(b"file" * 250, codec="delta", base=base)])
        put(cloud, maker)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
        with pytest.raises(DiskFull, match="needs 2000 bytes"):
            restore(cloud, transfer, cloud.item(), output)

    def test_a_disk_that_fills_up_on_the_way_is_no_damage(
        self, cloud: FakeCloud, transfer: Transfer, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(cloud, made(100))

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(DiskFull):
            restore(cloud, transfer, cloud.item(), output)
        assert cloud.damaged == []
        assert list(output.iterdir()) == []

    @pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
    def test_many_small_files(self, cloud: FakeCloud, transfer: Transfer, output: Path, count: int) -> None:
        maker = Maker()
        for number in range(count):
            maker.file(f"d{number % 100}/f {number} ☃", [maker.chunk(b"%d" % number)])
        put(cloud, maker)
        restored = restore(cloud, transfer, cloud.item(), output)
        assert restored is not None
        assert found_in(restored.path) == maker.contents
        assert len(cloud.store.paths("GET")) == 2, "the manifest and one pack"


def full_while(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has no room until that is gone."""

    def usage(_: object) -> object:
        return shutil._ntuple_diskusage(10**9, 0, 1 if there.exists() else 10**8)  # type: ignore[attr-defined]

    monkeypatch.setattr(shutil, "disk_usage", usage)


class TestLocalStore:
    """What this machine has is not fetched."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "stores", JOB_ID)

    def keep(self, store: LocalStore, maker: Maker, tmp_path: Path) -> Path:
        """A worker has committed this one here."""
        place = tmp_path / "kept"
        for path, data in maker.contents.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(data)
        store.committed(maker.manifest, place)
        found = store.newest()
        assert found is not None
        return found[1]

    def test_nothing_is_fetched_of_what_is_here(
        self, cloud: FakeCloud, transfer: Transfer, output: Path, store: LocalStore, tmp_path: Path
    ) -> None:
        put(cloud, made(100))
        self.keep(store, made(100), tmp_path)
        restored = restore(cloud, transfer, cloud.item(), output, store=store)
        assert_restored(restored, output, 100)
        assert restored is not None
        assert (restored.fetched_bytes, restored.local_bytes) == (0, 18_000)
        assert cloud.calls == []
        assert [path for path in cloud.store.paths("GET") if path.startswith("/packs/")] == []

    def test_what_an_older_one_has_is_not_fetched_and_bases_neither(
        self, cloud: FakeCloud, transfer: Transfer, output: Path, store: LocalStore, tmp_path: Path
    ) -> None:
        old = Maker(step=50)
        base = old.chunk(b"base" * 50)
        old.file("f", [base])
        new = Maker(step=100)
        new.chunk(b"base" * 50)
        new.file("f", [new.chunk(b"base" * 49 + b"new!", codec="delta", base=0, pack=1)])
        put(cloud, new)
        self.keep(store, old, tmp_path)
        restored = restore(cloud, transfer, cloud.item(), output, store=store)
        assert restored is not None
        assert found_in(restored.path) == {"f": b"base" * 49 + b"new!"}
        assert cloud.store.paths("GET").count(cloud.packs(100)[0]) == 0
        assert restored.fetched_bytes == new.chunks[1].stored_bytes

    @pytest.mark.parametrize("harm", ["altered", "gone", "cut"])
    def test_what_has_changed_here_is_fetched(
        self, cloud: FakeCloud, transfer: Transfer, output: Path, store: LocalStore, tmp_path: Path, harm: str
    ) -> None:
        put(cloud, made(100))
        model = self.keep(store, made(100), tmp_path) / "model.bin"
        if harm == "altered":
            model.write_bytes(b"?" * 12_000)
        elif harm == "gone":
            model.unlink()
        else:
            os.truncate(model, 5000)
        restored = restore(cloud, transfer, cloud.item(), output, store=store)
        assert_restored(restored, output, 100)
        assert restored is not None
        assert restored.local_bytes == (10_000 if harm == "cut" else 6000)
        assert cloud.damaged == []

    def test_the_store_has_what_was_restored_and_nothing_that_was_damaged(
        self, cloud: FakeCloud, transfer: Transfer, output: Path, store: LocalStore, tmp_path: Path
    ) -> None:
        for step in (100, 200):
            put(cloud, made(step))
        self.keep(store, made(200), tmp_path)
        frozen = cloud.blob_of(100, "frozen.bin")
        del cloud.store.objects[cloud.manifest_path(cloud.manifest(200))]
        assert_restored(restore(cloud, transfer, cloud.item(), output, store=store), output, 100)
        assert cloud.store.paths("GET").count(frozen) == 0, "the damaged one's files are here, and some are the same"
        found = store.newest()
        assert found is not None
        assert found[0] == cloud.manifest(100)
        assert found_in(found[1]) == contents(100)
        assert store.manifests == (cloud.manifest(100),)
        assert store.find(digest_bytes(contents(200)["model.bin"][:4000]).blake3) is None

    def test_a_job_that_begins_anew_has_no_past_here(
        self, cloud: FakeCloud, transfer: Transfer, output: Path, store: LocalStore, tmp_path: Path
    ) -> None:
        self.keep(store, made(100), tmp_path)
        assert restore(cloud, transfer, cloud.item(), output, store=store) is None
        assert store.newest() is None
        assert store.manifests == ()

    def test_it_gives_way_when_the_disk_is_full(
        self,
        cloud: FakeCloud,
        transfer: Transfer,
        output: Path,
        store: LocalStore,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        put(cloud, made(100))
        kept = self.keep(store, made(100), tmp_path)

        full_while(kept, monkeypatch)
        assert_restored(restore(cloud, transfer, cloud.item(), output, store=store), output, 100)

    def test_other_jobs_stores_give_way_first(
        self,
        cloud: FakeCloud,
        transfer: Transfer,
        output: Path,
        store: LocalStore,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        put(cloud, made(100))
        self.keep(store, made(100), tmp_path)
        other = tmp_path / "stores" / JOB_ID.replace("1", "2")
        other.mkdir()

        full_while(other, monkeypatch)
        restored = restore(cloud, transfer, cloud.item(), output, store=store)
        assert_restored(restored, output, 100)
        assert restored is not None
        assert restored.fetched_bytes == 0

    def test_a_disk_that_is_too_full_for_the_store_fails_no_restore(
        self,
        cloud: FakeCloud,
        transfer: Transfer,
        output: Path,
        store: LocalStore,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        put(cloud, made(100))

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "link", full)
        assert_restored(restore(cloud, transfer, cloud.item(), output, store=store), output, 100)
        assert store.newest() is None
        assert store.manifests == (cloud.manifest(100),), "what it names need not be sent again"


class TestLegacyZip:
    """Zips uploaded by clients of the original orchestrator."""

    def zipped(self, entries: dict[str, bytes]) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in entries.items():
                archive.writestr(name, data)
        return buffer.getvalue()

    def test_it_is_unpacked(self, cloud: FakeCloud, transfer: Transfer, output: Path) -> None:
        key = f"/jobs/{JOB_ID}/checkpoint-50.zip"
        cloud.store.objects[key] = self.zipped({"a.bin": b"a", "sub/b.bin": b""})
        cloud.zips[50] = key
        restored = restore(cloud, transfer, cloud.item(), output)
        assert restored is not None
        assert (restored.step, restored.total_bytes) == (50, 1)
        assert found_in(output) == {"checkpoint-50/a.bin": b"a", "checkpoint-50/sub/b.bin": b""}
        assert cloud.calls == []

    @pytest.mark.parametrize("harm", ["garbage", "escape", "gone", "a final model"])
    def test_a_bad_one_is_reported_and_the_one_before_it_used(
        self, cloud_100_200: FakeCloud, transfer: Transfer, output: Path, tmp_path: Path, harm: str
    ) -> None:
        """Regression (Dreambooth API, worker): resume_from could be the final model, which is no zip."""
        cloud = cloud_100_200
        cloud.zips[300] = "/checkpoint-300.zip"
        cloud.store.objects["/checkpoint-300.zip"] = {
            "garbage": b"PK\x03\x04" + b"x" * 500,
            "escape": self.zipped({"good": b"g", "../../evil": b"e"}),
            "gone": b"x",
            "a final model": b"\x10\0\0\0safetensors",
        }[harm]
        item = cloud.item()
        if harm == "gone":
            del cloud.store.objects["/checkpoint-300.zip"]
        assert_restored(restore(cloud, transfer, item, output), output, 200)
        assert [damage[0] for damage in cloud.damaged] == [300]
        assert not list(tmp_path.rglob("evil"))
