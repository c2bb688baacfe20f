"""Restore with a local cache: cached chunks are not fetched, a damaged cache does no harm."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from gpu_client.checkpoints.local.chunk_cache import LocalChunkCache
from gpu_client.checkpoints.restore.checkpoint_restore import restore
from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.transfer.manager import Transfer
from tests.kits.files.directories import files_below, write_files
from tests.unit.checkpoints.fake_cloud import JOB_ID, FakeCloud
from tests.unit.checkpoints.made_checkpoints import Maker, put
from tests.unit.checkpoints.restore_kit import assert_restored, contents, made


def full_while(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has no room until that is gone."""

    def usage(_: object) -> object:
        return shutil._ntuple_diskusage(10**9, 0, 1 if there.exists() else 10**8)  # type: ignore[attr-defined]

    monkeypatch.setattr(shutil, "disk_usage", usage)


class TestLocalStore:
    """A restore fetches no bytes that the local cache has."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalChunkCache:
        return LocalChunkCache(tmp_path / "stores", JOB_ID)

    def keep(self, store: LocalChunkCache, maker: Maker, tmp_path: Path) -> Path:
        """Record the checkpoint as committed on this machine; return its directory."""
        store.record_committed(maker.manifest, write_files(tmp_path / "kept", maker.contents))
        found = store.newest()
        assert found is not None
        return found[1]

    def test_nothing_is_fetched_of_what_is_here(
        self, cloud: FakeCloud, transfer: Transfer, output: Path, store: LocalChunkCache, tmp_path: Path
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
        self, cloud: FakeCloud, transfer: Transfer, output: Path, store: LocalChunkCache, tmp_path: Path
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
        assert files_below(restored.path) == {"f": b"base" * 49 + b"new!"}
        assert cloud.store.paths("GET").count(cloud.packs(100)[0]) == 0
        assert restored.fetched_bytes == new.chunks[1].stored_bytes

    @pytest.mark.parametrize("harm", ["altered", "gone", "cut"])
    def test_what_has_changed_here_is_fetched(
        self, cloud: FakeCloud, transfer: Transfer, output: Path, store: LocalChunkCache, tmp_path: Path, harm: str
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
        self, cloud: FakeCloud, transfer: Transfer, output: Path, store: LocalChunkCache, tmp_path: Path
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
        assert files_below(found[1]) == contents(100)
        assert store.manifests == (cloud.manifest(100),)
        assert store.find(digest_bytes(contents(200)["model.bin"][:4000]).blake3) is None

    def test_a_job_that_begins_anew_has_no_past_here(
        self, cloud: FakeCloud, transfer: Transfer, output: Path, store: LocalChunkCache, tmp_path: Path
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
        store: LocalChunkCache,
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
        store: LocalChunkCache,
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
        store: LocalChunkCache,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        put(cloud, made(100))

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "link", full)
        assert_restored(restore(cloud, transfer, cloud.item(), output, store=store), output, 100)
        assert store.newest() is None
        assert store.manifests == (cloud.manifest(100),), "what it names need not be sent again"
