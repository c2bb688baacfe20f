"""Moving objects by presigned URL through everything that goes wrong on the way."""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
import time
from pathlib import Path

import pytest

from gpu_client.transport.digests import digest_bytes
from gpu_client.transport.errors import (
    ChecksumMismatch,
    DiskFull,
    FileChanged,
    ObjectMissing,
    TransferCanceled,
    TransferError,
    Unreachable,
    UnsafePath,
    UrlExpired,
)
from gpu_client.transport.transfer import Download, Transfer, Upload
from tests.unit.transport.scripted_server import (
    Handler,
    ScriptedServer,
    refuse_unread,
    reply,
    reset,
    stalled,
    truncated,
    without_length,
)

DATA = os.urandom(700_000)
EXPIRED = reply(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")


def upload(server: ScriptedServer, path: Path, name: str = "o", *, data: bytes | None = None) -> Upload:
    """The PUT that the control plane would sign for `data` (by default what the file holds)."""
    data = path.read_bytes() if data is None else data
    headers = {
        "content-length": str(len(data)),
        "x-amz-checksum-crc64nvme": digest_bytes(data).crc64nvme,
        "If-None-Match": "*",
    }
    return Upload.of_file(
        name=name, path=path, size_bytes=len(data), url=f"{server.url}/{name}?X-Amz-Signature=s", headers=headers
    )


def download(server: ScriptedServer, root: Path, name: str = "o", *, data: bytes = DATA, path: str = "") -> Download:
    return Download(
        name=name,
        url=f"{server.url}/{name}?X-Amz-Signature=s",
        root=root,
        path=path or name,
        size_bytes=len(data),
        blake3=digest_bytes(data).blake3,
        crc64nvme=digest_bytes(data).crc64nvme,
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "source.bin"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def left_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*"))


class TestUpload:
    def test_bytes_and_headers_arrive_exactly(self, server: ScriptedServer, transfer: Transfer, file: Path) -> None:
        item = upload(server, file)
        transfer.upload([item])
        assert server.objects == {"/o": DATA}
        sent = server.seen[0].headers
        assert set(sent) == {
            "host", "user-agent", "accept-encoding", "content-length", "x-amz-checksum-crc64nvme", "if-none-match",
        }  # fmt: skip
        assert sent["content-length"] == "700000"
        assert server.seen[0].query == "X-Amz-Signature=s"
        assert transfer.stats.counts.uploaded_bytes == 700_000

    def test_an_empty_file(self, server: ScriptedServer, transfer: Transfer, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        transfer.upload([upload(server, tmp_path / "empty")])
        assert server.objects == {"/o": b""}
        assert server.seen[0].headers["content-length"] == "0"
        assert "transfer-encoding" not in server.seen[0].headers

    def test_already_stored_is_a_success(self, server: ScriptedServer, transfer: Transfer, file: Path) -> None:
        server.objects["/o"] = DATA
        transfer.upload([upload(server, file)])
        counts = transfer.stats.counts
        assert (counts.uploaded_objects, counts.already_stored_objects, counts.uploaded_bytes) == (0, 1, 0)

    def test_412_to_a_replacing_put_asks_for_a_new_url(
        self, server: ScriptedServer, transfer: Transfer, file: Path
    ) -> None:
        server.script("PUT", "/o", reply(412))
        item = Upload.of_file(
            name="o", path=file, size_bytes=len(DATA), url=f"{server.url}/o", headers={"If-Match": '"e"'}
        )
        with pytest.raises(UrlExpired):
            transfer.upload([item])

    @pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504])
    def test_what_may_pass_is_tried_again_from_the_first_byte(
        self, server: ScriptedServer, transfer: Transfer, file: Path, delays: list[float], status: int
    ) -> None:
        server.script("PUT", "/o", reply(status), reply(status, b"<Error><Code>SlowDown</Code></Error>"))
        transfer.upload([upload(server, file)])
        assert server.objects == {"/o": DATA}
        assert delays == [0.5, 1.0]
        assert transfer.stats.counts.retries == 2

    def test_a_failed_upload_is_raised(self, server: ScriptedServer, transfer: Transfer, file: Path) -> None:
        """Regression (Kelpie and Dreambooth workers): failed uploads were logged and the job reported complete."""
        server.routes["PUT", "/o"] = reply(500)
        with pytest.raises(Unreachable, match="o: not moved after 8 tries"):
            transfer.upload([upload(server, file)])
        assert server.objects == {}
        assert transfer.stats.counts.uploaded_objects == 0

    def test_one_failure_among_many_is_raised(self, server: ScriptedServer, transfer: Transfer, file: Path) -> None:
        """Regression (Kelpie worker): uploadDirectory swallowed the errors of single files."""
        server.routes["PUT", "/o7"] = reply(403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>")
        with pytest.raises(TransferError, match=r"o7: the store refused the PUT .*SignatureDoesNotMatch"):
            transfer.upload([upload(server, file, f"o{index}") for index in range(20)])

    def test_a_reset_in_the_middle_is_survived(self, server: ScriptedServer, transfer: Transfer, file: Path) -> None:
        def cut(handler: Handler) -> None:
            handler.rfile.read(1000)
            reset(handler)

        cut.reads_body = False  # type: ignore[attr-defined]
        server.script("PUT", "/o", cut, reset)
        transfer.upload([upload(server, file)])
        assert server.objects == {"/o": DATA}
        assert transfer.stats.counts.wasted_bytes > 0

    def test_a_refusal_before_the_last_byte_is_understood(
        self, server: ScriptedServer, transfer: Transfer, tmp_path: Path
    ) -> None:
        big = tmp_path / "big"
        big.write_bytes(b"x" * 30_000_000)
        body = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
        server.routes["PUT", "/o"] = refuse_unread(403, body)
        # the RST that follows the answer may overtake it: then it is a broken connection, tried again
        with pytest.raises((UrlExpired, Unreachable)):
            transfer.upload([upload(server, big)])

    def test_altered_on_the_way_is_sent_once_more(self, server: ScriptedServer, transfer: Transfer, file: Path) -> None:
        server.script("PUT", "/o", reply(400, b"<Error><Code>BadDigest</Code></Error>"))
        transfer.upload([upload(server, file)])
        assert server.objects == {"/o": DATA}

    def test_other_bytes_than_declared_are_refused(
        self, server: ScriptedServer, transfer: Transfer, file: Path
    ) -> None:
        item = upload(server, file, data=b"y" * len(DATA))
        with pytest.raises(ChecksumMismatch):
            transfer.upload([item])
        assert server.objects == {}
        assert len(server.seen) == 2

    @pytest.mark.parametrize("by", [-1, 1, -len(DATA)])
    def test_a_file_of_another_size_than_declared_is_not_sent(
        self, server: ScriptedServer, transfer: Transfer, file: Path, by: int
    ) -> None:
        """Regression (Kelpie worker): files that were still being written were uploaded half."""
        item = upload(server, file)
        file.write_bytes(DATA[:by] if by < 0 else DATA + b"x")
        with pytest.raises(FileChanged):
            transfer.upload([item])
        assert server.objects == {}

    def test_a_file_that_is_gone_is_named(self, server: ScriptedServer, transfer: Transfer, file: Path) -> None:
        item = upload(server, file)
        file.unlink()
        with pytest.raises(FileChanged, match=r"source\.bin"):
            transfer.upload([item])

    def test_redirects_are_not_followed(self, server: ScriptedServer, transfer: Transfer, file: Path) -> None:
        with ScriptedServer() as other:
            server.script("PUT", "/o", reply(307, b"", {"Location": other.url}))
            with pytest.raises(TransferError, match="307"):
                transfer.upload([upload(server, file)])
            assert other.seen == []

    def test_progress_adds_up_to_the_bytes_also_with_retries(
        self, server: ScriptedServer, transfer: Transfer, file: Path
    ) -> None:
        server.script("PUT", "/o", reply(503))
        steps: list[int] = []
        transfer.upload([upload(server, file), upload(server, file, "p")], progress=steps.append)
        assert sum(steps) == 2 * len(DATA)
        assert min(steps) == -len(DATA)

    def test_workers_are_bounded(self, server: ScriptedServer, transfer: Transfer, file: Path) -> None:
        barrier = threading.Barrier(3, timeout=10)

        def together(handler: Handler) -> None:
            barrier.wait()
            handler.answer(200)

        for index in range(12):
            server.script("PUT", f"/o{index}", together)
        transfer.upload([upload(server, file, f"o{index}") for index in range(12)])
        assert server.most_at_once == 3


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


class TestCancel:
    def test_a_stalled_download_stops_at_once(self, server: ScriptedServer, transfer: Transfer, root: Path) -> None:
        until, arrived, cancel = threading.Event(), threading.Event(), threading.Event()
        server.routes["GET", "/o"] = stalled(until, arrived)
        canceler = threading.Thread(target=lambda: (arrived.wait(10), cancel.set()))
        canceler.start()
        started = time.monotonic()
        try:
            with pytest.raises(TransferCanceled):
                transfer.download([download(server, root)], cancel=cancel)
            # far below the stall timeout of 5 s
            assert time.monotonic() - started < 3
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("transfer-")]
        finally:
            until.set()
            canceler.join()
        assert left_in(root) == []

    def test_a_failure_stops_the_others_at_once(self, server: ScriptedServer, transfer: Transfer, root: Path) -> None:
        until, arrived = threading.Event(), threading.Event()
        server.routes["GET", "/slow"] = stalled(until, arrived)

        def refuse(handler: Handler) -> None:
            arrived.wait(10)
            handler.answer(404)

        server.routes["GET", "/absent"] = refuse
        started = time.monotonic()
        try:
            with pytest.raises(ObjectMissing):
                transfer.download([download(server, root, "slow"), download(server, root, "absent")])
            assert time.monotonic() - started < 3
        finally:
            until.set()
        assert left_in(root) == []

    def test_a_pause_between_tries_ends_at_once(self, server: ScriptedServer, file: Path) -> None:
        transfer = Transfer()
        cancel = threading.Event()
        server.routes["PUT", "/o"] = lambda handler: (
            handler.answer(503, b"", {"Retry-After": "200"}),
            cancel.set(),
        )[0]
        started = time.monotonic()
        with pytest.raises(TransferCanceled):
            transfer.upload([upload(server, file)], cancel=cancel)
        assert time.monotonic() - started < 3
        transfer.close()

    def test_canceled_before_it_begins(self, server: ScriptedServer, transfer: Transfer, file: Path) -> None:
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(TransferCanceled):
            transfer.upload([upload(server, file)], cancel=cancel)
        assert server.seen == []


def test_read(server: ScriptedServer, transfer: Transfer) -> None:
    server.objects = {"/m": b"{}"}
    server.script("GET", "/m", reply(503), truncated(b"{}", 1))
    assert transfer.read(server.url + "/m", name="m", max_bytes=2) == b"{}"
    with pytest.raises(ChecksumMismatch, match="more than 1 bytes"):
        transfer.read(server.url + "/m", name="m", max_bytes=1)


def test_a_connection_that_the_store_closed_meanwhile_is_replaced(
    server: ScriptedServer, transfer: Transfer, file: Path, delays: list[float]
) -> None:
    def close_after(handler: Handler) -> None:
        handler.answer(200)
        handler.close_connection = True

    server.script("PUT", "/o", close_after)
    transfer.upload([upload(server, file)])
    (idle,) = next(iter(transfer._connections._idle.values()))
    assert select.select([idle.sock], [], [], 5)[0], "the server has not closed it"
    transfer.upload([upload(server, file, "p")])
    assert server.objects == {"/p": DATA}
    assert delays == []


def test_connections_are_used_again(server: ScriptedServer, transfer: Transfer, file: Path, root: Path) -> None:
    ports = []
    for path in ("/o", "/p"):
        server.script("PUT", path, lambda handler: (ports.append(handler.client_address), handler.answer(200))[0])
    server.script("GET", "/q", lambda handler: (ports.append(handler.client_address), handler.answer(200, DATA))[0])
    transfer.upload([upload(server, file)])
    transfer.upload([upload(server, file, "p")])
    transfer.download([download(server, root, "q")])
    assert len(ports) == 3
    assert len(set(ports)) == 1


def test_what_is_no_url_is_refused(transfer: Transfer, root: Path) -> None:
    for url in ("ftp://x/y", "nothing", "http://[::1"):
        with pytest.raises(TransferError, match="URL"):
            transfer.download([Download(name="o", url=url, root=root, path="o")])


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a b?X-Amz-Signature=abc",
        "http://127.0.0.1/\n?X-Amz-Signature=abc",
        "http://127.0.0.1/schlüssel?X-Amz-Signature=abc",
        "http://h:x/?X-Amz-Signature=abc",
    ],
)
def test_a_url_that_cannot_be_sent_is_refused_without_its_signature(
    transfer: Transfer, root: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """http.client quotes such a target in its error, which was logged at each of eight tries."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(TransferError) as caught:
        transfer.download([Download(name="o", url=url, root=root, path="o")])
    assert "abc" not in caplog.text + str(caught.value)


def test_signatures_are_not_logged(
    server: ScriptedServer, transfer: Transfer, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.script("GET", "/o", reply(503), reset, reply(200, b"z"), reply(404))
    with pytest.raises(ObjectMissing) as caught:
        transfer.download([download(server, root)])
    assert "X-Amz-Signature" not in caplog.text + str(caught.value)
