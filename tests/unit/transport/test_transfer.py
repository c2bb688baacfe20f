"""Moving objects by presigned URL through everything that goes wrong on the way."""

from __future__ import annotations

import logging
import select
import threading
import time
from pathlib import Path

import pytest

from gpu_client.transport.errors import (
    ChecksumMismatch,
    FileChanged,
    ObjectMissing,
    TransferCanceled,
    TransferError,
    Unreachable,
    UrlExpired,
)
from gpu_client.transport.transfer.manager import Download, Transfer, Upload
from tests.unit.transport.scripted_server import (
    Handler,
    ScriptedServer,
    refuse_unread,
    reply,
    reset,
    stalled,
    truncated,
)
from tests.unit.transport.transfer_kit import DATA, download, left_in, upload


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "source.bin"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


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
        barrier = threading.Barrier(3, timeout=60)

        def together(handler: Handler) -> None:
            barrier.wait()
            handler.answer(200)

        for index in range(12):
            server.script("PUT", f"/o{index}", together)
        transfer.upload([upload(server, file, f"o{index}") for index in range(12)])
        assert server.most_at_once == 3


class TestCancel:
    def test_a_stalled_download_stops_at_once(self, server: ScriptedServer, transfer: Transfer, root: Path) -> None:
        until, arrived, cancel = threading.Event(), threading.Event(), threading.Event()
        server.routes["GET", "/o"] = stalled(until, arrived)
        canceler = threading.Thread(target=lambda: (arrived.wait(60), cancel.set()))
        canceler.start()
        started = time.monotonic()
        try:
            with pytest.raises(TransferCanceled):
                transfer.download([download(server, root)], cancel=cancel)
            # Far below the stall timeout of 60 s.
            assert time.monotonic() - started < 30
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("transfer-")]
        finally:
            until.set()
            canceler.join()
        assert left_in(root) == []

    def test_a_failure_stops_the_others_at_once(self, server: ScriptedServer, transfer: Transfer, root: Path) -> None:
        until, arrived = threading.Event(), threading.Event()
        server.routes["GET", "/slow"] = stalled(until, arrived)

        def refuse(handler: Handler) -> None:
            arrived.wait(60)
            handler.answer(404)

        server.routes["GET", "/absent"] = refuse
        started = time.monotonic()
        try:
            with pytest.raises(ObjectMissing):
                transfer.download([download(server, root, "slow"), download(server, root, "absent")])
            assert time.monotonic() - started < 30
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
        assert time.monotonic() - started < 30
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
