"""Downloads by presigned URL: complete and verified under their name, or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpu_client.transport.errors import (
    ChecksumMismatch,
    DiskFull,
    FalseDigest,
    ObjectMissing,
    TransferError,
    Unreachable,
    UnsafePath,
    UrlExpired,
)
from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.transfer.manager import Download, Transfer
from tests.unit.transport.scripted_server import (
    ScriptedServer,
    reply,
    reset,
    truncated,
    without_length,
)
from tests.unit.transport.transfer_kit import DATA, EXPIRED, download, left_in


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


class TestDownload:
    def test_bytes_arrive_and_nothing_else_is_left(
        self, server: ScriptedServer, transfer: Transfer, root: Path
    ) -> None:
        server.objects = {"/a": DATA, "/b": b""}
        transfer.download([download(server, root, "a", path="x/y/a"), download(server, root, "b", data=b"")])
        assert (root / "x/y/a").read_bytes() == DATA
        assert (root / "b").read_bytes() == b""
        assert left_in(root) == ["a", "b", "x", "y"]
        assert "x-api-key" not in server.seen[0].headers
        assert transfer.stats.counts.downloaded_bytes == len(DATA)

    @pytest.mark.parametrize("act", [reply(500), reply(503), reset, truncated(DATA, 300_000), truncated(DATA, 0)])
    def test_what_may_pass_is_tried_again(
        self, server: ScriptedServer, transfer: Transfer, root: Path, delays: list[float], act: object
    ) -> None:
        """Regression (Kelpie worker): an error in the middle of a download hung or left a short file."""
        server.objects = {"/o": DATA}
        server.script("GET", "/o", act, act)  # type: ignore[arg-type]
        transfer.download([download(server, root)])
        assert (root / "o").read_bytes() == DATA
        assert delays == [0.5, 1.0]
        assert left_in(root) == ["o"]

    def test_a_body_that_stays_short_is_raised_and_leaves_nothing(
        self, server: ScriptedServer, transfer: Transfer, root: Path
    ) -> None:
        """Regression (Kelpie worker): failed downloads were swallowed and training started at step 0."""
        server.routes["GET", "/o"] = truncated(DATA, 300_000)
        with pytest.raises(Unreachable, match="cut short after 300000 of 700000 bytes"):
            transfer.download([download(server, root)])
        assert left_in(root) == []

    def test_short_without_content_length_is_noticed(
        self, server: ScriptedServer, transfer: Transfer, root: Path
    ) -> None:
        server.script("GET", "/o", without_length(DATA[:-1]), without_length(DATA))
        transfer.download([download(server, root)])
        assert (root / "o").read_bytes() == DATA

    def test_altered_on_the_way_is_fetched_once_more(
        self, server: ScriptedServer, transfer: Transfer, root: Path
    ) -> None:
        server.objects = {"/o": DATA}
        server.script("GET", "/o", reply(200, b"z" * len(DATA)))
        transfer.download([download(server, root)])
        assert (root / "o").read_bytes() == DATA

    @pytest.mark.parametrize("stored", [b"z" * len(DATA), DATA[:-1], DATA + b"x", b""])
    def test_other_bytes_never_appear_under_the_name(
        self, server: ScriptedServer, transfer: Transfer, root: Path, stored: bytes
    ) -> None:
        """Regression (Kelpie worker): no checksums at all."""
        server.objects = {"/o": stored}
        with pytest.raises(ChecksumMismatch):
            transfer.download([download(server, root)])
        assert left_in(root) == []
        assert len(server.seen) == 2

    @pytest.mark.parametrize("promise", ["blake3", "crc64nvme"])
    def test_either_digest_is_enough(
        self, server: ScriptedServer, transfer: Transfer, root: Path, promise: str
    ) -> None:
        server.objects = {"/good": DATA, "/bad": b"z" * len(DATA)}
        expected = {promise: getattr(digest_bytes(DATA), promise)}
        transfer.download([Download(name="o", url=f"{server.url}/good", root=root, path="o", **expected)])
        with pytest.raises(ChecksumMismatch):
            transfer.download([Download(name="o", url=f"{server.url}/bad", root=root, path="p", **expected)])
        assert left_in(root) == ["o"]

    def test_a_false_digest_is_told_from_altered_bytes_and_not_fetched_again(
        self, server: ScriptedServer, transfer: Transfer, root: Path
    ) -> None:
        """The CRC is the store's, and the BLAKE3 the uploader's statement."""
        server.objects = {"/o": DATA}
        declared = {"crc64nvme": digest_bytes(DATA).crc64nvme, "blake3": digest_bytes(b"other").blake3}
        with pytest.raises(FalseDigest, match="BLAKE3 is"):
            transfer.download([Download(name="o", url=f"{server.url}/o", root=root, path="o", **declared)])
        assert left_in(root) == [] and len(server.seen) == 1
        server.objects = {"/o": b"z" * len(DATA)}
        with pytest.raises(ChecksumMismatch, match="CRC-64/NVME is") as altered:
            transfer.download([Download(name="o", url=f"{server.url}/o", root=root, path="o", **declared)])
        assert not isinstance(altered.value, FalseDigest)
        assert left_in(root) == [] and len(server.seen) == 3

    def test_too_long_without_content_length(self, server: ScriptedServer, transfer: Transfer, root: Path) -> None:
        server.routes["GET", "/o"] = without_length(DATA + b"x")
        with pytest.raises(ChecksumMismatch, match="more than 700000"):
            transfer.download([download(server, root)])

    def test_missing(self, server: ScriptedServer, transfer: Transfer, root: Path, delays: list[float]) -> None:
        with pytest.raises(ObjectMissing, match="o: not in the store"):
            transfer.download([download(server, root)])
        assert delays == []

    def test_an_expired_url_lets_the_others_finish(
        self, server: ScriptedServer, transfer: Transfer, root: Path
    ) -> None:
        server.objects = {f"/o{index}": DATA for index in range(10)}
        server.routes["GET", "/o4"] = EXPIRED
        with pytest.raises(UrlExpired):
            transfer.download([download(server, root, f"o{index}") for index in range(10)])
        done = left_in(root)
        assert set(done) >= {"o0", "o1"}
        assert all((root / name).read_bytes() == DATA for name in done)

    def test_expiry_without_a_word_is_told_by_the_stores_clock(
        self, server: ScriptedServer, transfer: Transfer, root: Path
    ) -> None:
        server.routes["GET", "/o"] = reply(403, b"<Error><Code>AccessDenied</Code></Error>")
        old = "?X-Amz-Date=20200101T000000Z&X-Amz-Expires=900"
        live = "?X-Amz-Date=29990101T000000Z&X-Amz-Expires=900"
        for query, kind in ((old, UrlExpired), (live, TransferError)):
            with pytest.raises(TransferError) as caught:
                transfer.download([Download(name="o", url=f"{server.url}/o{query}", root=root, path="o")])
            assert type(caught.value) is kind

    def test_without_promises_the_length_is_still_checked(
        self, server: ScriptedServer, transfer: Transfer, root: Path
    ) -> None:
        server.script("GET", "/o", truncated(DATA, 10), reply(200, DATA))
        transfer.download([Download(name="o", url=f"{server.url}/o", root=root, path="o", fsync=False)])
        assert (root / "o").read_bytes() == DATA

    def test_an_existing_file_is_replaced_at_once(self, server: ScriptedServer, transfer: Transfer, root: Path) -> None:
        root.mkdir()
        (root / "o").write_bytes(b"old")
        server.routes["GET", "/o"] = reply(404)
        with pytest.raises(ObjectMissing):
            transfer.download([download(server, root)])
        assert (root / "o").read_bytes() == b"old"
        server.routes["GET", "/o"] = reply(200, DATA)
        transfer.download([download(server, root)])
        assert (root / "o").read_bytes() == DATA

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_a_full_disk_is_called_that_and_cleaned_up(
        self, server: ScriptedServer, transfer: Transfer, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        server.objects = {"/o": DATA}
        real = os.write

        def write(descriptor: int, data: memoryview) -> int:
            if len(data) > 100_000:
                raise OSError(code, "full")
            return real(descriptor, data)

        monkeypatch.setattr(os, "write", write)
        with pytest.raises(DiskFull):
            transfer.download([download(server, root)])
        assert left_in(root) == []

    def test_a_disk_that_is_full_only_at_fsync(
        self, server: ScriptedServer, transfer: Transfer, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fsync(_: int) -> None:
            raise OSError(errno.ENOSPC, "full")

        server.objects = {"/o": DATA}
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(DiskFull):
            transfer.download([download(server, root)])
        assert left_in(root) == []

    @pytest.mark.parametrize("path", ["../o", "a/../../o", "/etc/o", "a//o", "a\\..\\o", "a/\n", "x" * 256, "."])
    def test_paths_that_escape_are_refused_before_anything_is_fetched(
        self, server: ScriptedServer, transfer: Transfer, root: Path, path: str
    ) -> None:
        """Regression (Kelpie worker): key to path by replacing text, without a guard against traversal."""
        server.objects = {"/o": DATA}
        with pytest.raises(UnsafePath):
            transfer.download([download(server, root, path=path)])
        assert server.seen == []

    def test_a_symlink_on_the_way_is_refused(
        self, server: ScriptedServer, transfer: Transfer, root: Path, tmp_path: Path
    ) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        root.mkdir()
        (root / "sub").symlink_to(outside)
        server.objects = {"/o": DATA}
        with pytest.raises(UnsafePath, match="symlink"):
            transfer.download([download(server, root, path="sub/o")])
        assert left_in(outside) == []

    def test_a_symlink_in_the_files_place_is_replaced_not_followed(
        self, server: ScriptedServer, transfer: Transfer, root: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "precious").write_bytes(b"keep")
        root.mkdir()
        (root / "o").symlink_to(tmp_path / "precious")
        server.objects = {"/o": DATA}
        transfer.download([download(server, root)])
        assert (tmp_path / "precious").read_bytes() == b"keep"
        assert (root / "o").read_bytes() == DATA
        assert not (root / "o").is_symlink()

    def test_a_file_or_directory_in_the_way_is_refused(
        self, server: ScriptedServer, transfer: Transfer, root: Path
    ) -> None:
        (root / "dir").mkdir(parents=True)
        (root / "file").touch()
        for path in ("dir", "file/o"):
            with pytest.raises(UnsafePath):
                transfer.download([download(server, root, path=path)])

    def test_same_names_in_different_folders_stay_apart(
        self, server: ScriptedServer, transfer: Transfer, root: Path
    ) -> None:
        """Regression (Dreambooth worker): downloads were flattened to their base names and overwrote each other."""
        server.objects = {"/a": b"1", "/b": b"2"}
        transfer.download(
            [
                download(server, root, "a", data=b"1", path="cat/1.png"),
                download(server, root, "b", data=b"2", path="dog/1.png"),
            ]
        )
        assert (root / "cat/1.png").read_bytes() + (root / "dog/1.png").read_bytes() == b"12"
