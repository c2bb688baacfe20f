"""Restore of chunks in packs with all codecs, and of zips of the original's clients."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import zipfile
from pathlib import Path

import pytest

from gpu_client.checkpoints.restore import restore_plan
from gpu_client.checkpoints.restore.checkpoint_restore import RestoreFailed, restore
from gpu_client.transport.errors import (
    DiskFull,
)
from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.transfer.manager import Transfer
from tests.kits.files.directories import files_below
from tests.unit.checkpoints.fake_cloud import EXPIRED, JOB_ID, FakeCloud
from tests.unit.checkpoints.made_checkpoints import Maker, put
from tests.unit.checkpoints.restore_kit import assert_restored, made
from tests.unit.transport.scripted_server import Handler


class TestFormat2:
    """Chunks in packs."""

    def test_only_what_is_wanted_of_a_pack_is_fetched(
        self, cloud: FakeCloud, transfer: Transfer, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(restore_plan, "MAX_GAP_BYTES", 10)
        maker = Maker()
        maker.file("f", [maker.chunk(b"first" * 20), maker.chunk(b"last" * 25, gap=500)])
        put(cloud, maker)
        moved: list[int] = []
        restored = restore(cloud, transfer, cloud.item(), output, progress=moved.append)
        assert restored is not None
        assert files_below(restored.path) == maker.contents
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
        assert files_below(output) == {f"checkpoint-100/{path}": data for path, data in maker.contents.items()}
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
            assert files_below(restored.path) == maker.contents
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
        assert files_below(restored.path) == maker.contents
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
        with pytest.raises(RestoreFailed, match=r"step 200: .* version 3; this worker reads version 2: use"):
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
        assert files_below(restored.path) == maker.contents
        assert len(cloud.store.paths("GET")) == 2, "the manifest and one pack"


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
        assert files_below(output) == {"checkpoint-50/a.bin": b"a", "checkpoint-50/sub/b.bin": b""}
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
