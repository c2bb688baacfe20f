"""Test uploads in rounds of URLs, large files in parts, against faults of stores, lines and other writers."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gpu_client.transport.errors import (
    ChecksumMismatch,
    FileChanged,
    TransferCanceled,
    TransferError,
    UnexpectedAnswer,
    Unreachable,
    UrlExpired,
)
from gpu_client.transport.net import digests
from gpu_client.transport.net.connections import Connections
from gpu_client.transport.net.digests import hash_file
from gpu_client.transport.transfer.manager import Transfer
from gpu_client.transport.transfer.upload_rounds import (
    MAX_FRUITLESS_ROUNDS,
    LocalFile,
    Missing,
    Target,
    upload_in_rounds,
)
from tests.kits.files.declared_files import PART, checksum, large, pieces
from tests.unit.transport.scripted_server import Handler, ScriptedServer, refuse_unread, reply, reset

EXPIRED = reply(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
NO_UPLOAD = reply(404, b"<Error><Code>NoSuchUpload</Code><Message>none</Message></Error>")
DATA = large(4)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make parts as small as S3 permits: the product's 64 MiB are many bytes for each test."""
    monkeypatch.setattr(digests, "PARTS_FROM_BYTES", PART)
    monkeypatch.setattr(digests, "part_bytes_of", lambda _: PART)


class Plane:
    """A control plane over a store: it names the missing objects, and completes uploads whose parts are all stored."""

    def __init__(self, store: ScriptedServer, files: dict[str, LocalFile], *, query: str = "") -> None:
        self.store = store
        self.files = files
        self.query = query
        self.asked: list[Sequence[str]] = []
        self.named: list[list[tuple[str, int | None]]] = []
        self.before: list[Callable[[], object]] = []
        """Called in turn before an answer is made."""
        self.most = 100
        self.completes = True

    def ask(self, names: Sequence[str]) -> Missing:
        self.asked.append(names)
        if self.before:
            self.before.pop(0)()
        targets: list[Target] = []
        pending = set()
        for name in names:
            parts = self.files[name].digest.parts
            if parts is None:
                targets.append(self._target(name, None, self.files[name].digest.crc64nvme))
            elif f"/{name}" not in self.store.objects:
                paths = {number: part_path(name, number) for number in range(1, len(parts.crc64nvme) + 1)}
                left = [number for number, path in paths.items() if path not in self.store.objects]
                if not left and self.completes:
                    self.store.objects[f"/{name}"] = b"".join(self.store.objects.pop(path) for path in paths.values())
                    continue
                pending.add(name)
                targets += [self._target(name, number, parts.crc64nvme[number - 1]) for number in left]
        self.named.append([(target.name, target.part) for target in targets[: self.most]])
        return Missing(targets[: self.most], pending)

    def _target(self, name: str, part: int | None, crc64nvme: str) -> Target:
        path = f"/{name}" if part is None else part_path(name, part)
        headers = {"x-amz-checksum-crc64nvme": crc64nvme}
        return Target(name=name, url=f"{self.store.url}{path}{self.query}", headers=headers, part=part)


def part_path(name: str, number: int) -> str:
    return f"/{name}.parts/{number}"


@pytest.fixture
def plane(server: ScriptedServer, tmp_path: Path) -> Plane:
    """Return a control plane that wants one file of four parts, `big`."""
    return Plane(server, {"big": local(tmp_path / "big", DATA)})


def local(path: Path, data: bytes) -> LocalFile:
    path.write_bytes(data)
    return LocalFile(path, hash_file(path))


def upload(plane: Plane, transfer: Transfer, **more: object) -> list[int]:
    moved: list[int] = []
    upload_in_rounds(transfer, plane.files, plane.ask, traffic="data", progress=moved.append, **more)  # type: ignore[arg-type]
    return moved


def sent(plane: Plane) -> Counter[str]:
    """Return how often the store received each path."""
    return Counter(plane.store.paths("PUT"))


ALL_ONCE = Counter(part_path("big", number) for number in range(1, 5))


def test_parts_go_up_at_the_same_time_and_every_byte_is_reported(plane: Plane, transfer: Transfer) -> None:
    together = threading.Barrier(2, timeout=30)

    def meet(handler: Handler) -> None:
        together.wait()
        seen = handler.request_seen
        handler._put(seen.path, seen.headers, seen.body)

    for path in ALL_ONCE:
        plane.store.script("PUT", path, meet)
    moved = upload(plane, transfer)
    assert plane.store.objects == {"/big": DATA}
    assert sent(plane) == ALL_ONCE
    assert plane.asked == [["big"], ["big"]]
    assert sum(moved) == len(DATA)
    counts = transfer.stats.counts
    assert (counts.uploaded_objects, counts.uploaded_parts, counts.uploaded_bytes) == (1, 4, len(DATA))
    assert (counts.retries, counts.wasted_bytes) == (0, 0)


def test_each_part_is_sent_with_its_length_and_checksum(plane: Plane, transfer: Transfer) -> None:
    upload(plane, transfer)
    by_path = {request.path: request for request in plane.store.seen}
    for number, piece in enumerate(pieces(DATA), start=1):
        request = by_path[part_path("big", number)]
        assert request.body == piece
        assert request.headers["content-length"] == str(len(piece))
        assert request.headers["x-amz-checksum-crc64nvme"] == checksum(piece)


def before_the_body(handler: Handler) -> None:
    reset(handler)


before_the_body.reads_body = False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fault", "answered"),
    [
        (reply(500), True),
        (reply(503, b"<Error><Code>SlowDown</Code></Error>"), True),
        (reset, False),
        (before_the_body, False),
    ],
    ids=range(4),
)
def test_only_the_part_that_failed_is_sent_again(
    plane: Plane, transfer: Transfer, delays: list[float], fault: Callable[[Handler], None], answered: bool
) -> None:
    plane.store.script("PUT", part_path("big", 2), fault, fault)
    moved = upload(plane, transfer)
    assert plane.store.objects == {"/big": DATA}
    assert sent(plane) == ALL_ONCE + Counter([part_path("big", 2)] * 2)
    assert sum(moved) == len(DATA)
    if answered:  # else it may pass for a connection that was idle for too long, which is replaced at once
        assert transfer.stats.counts.retries == 2
        assert len(delays) == 2 and 0 < delays[0] < delays[1], "it waits, and longer the second time"
    assert len(plane.asked) == 2, "its URL was good"


def test_a_store_that_has_too_much_to_do_is_asked_by_fewer(plane: Plane, transfer: Transfer) -> None:
    before = transfer._sending.limit.allowed
    plane.store.script("PUT", part_path("big", 1), reply(503, b"<Error><Code>SlowDown</Code></Error>"))
    upload(plane, transfer)
    assert transfer._sending.limit.allowed < before


def test_a_part_that_fails_for_good_is_never_called_stored(plane: Plane, transfer: Transfer) -> None:
    plane.store.routes["PUT", part_path("big", 3)] = reply(500)
    with pytest.raises(Unreachable, match="part 3 of big"):
        upload(plane, transfer)
    assert "/big" not in plane.store.objects


def test_urls_that_ran_out_are_asked_for_again_and_stored_parts_are_not_sent_again(
    plane: Plane, transfer: Transfer
) -> None:
    plane.store.script("PUT", part_path("big", 3), EXPIRED)
    plane.store.script("PUT", part_path("big", 4), EXPIRED)
    moved = upload(plane, transfer)
    assert plane.store.objects == {"/big": DATA}
    assert sent(plane)[part_path("big", 1)] == sent(plane)[part_path("big", 2)] == 1
    assert sum(moved) == len(DATA)


def test_urls_that_run_out_again_and_again_are_no_failure_while_parts_arrive(
    server: ScriptedServer, tmp_path: Path
) -> None:
    """A slow line: each round of URLs lasts for one part."""
    data = large(MAX_FRUITLESS_ROUNDS + 4)
    plane = Plane(server, {"big": local(tmp_path / "big", data)})
    for number in range(2, MAX_FRUITLESS_ROUNDS + 5):
        server.script("PUT", part_path("big", number), EXPIRED)
    transfer = Transfer(workers=1, pause=lambda *_: None)
    upload(plane, transfer)
    transfer.close()
    assert server.objects == {"/big": data}
    assert len(plane.asked) > MAX_FRUITLESS_ROUNDS + 2


def test_urls_that_are_no_good_are_given_up(plane: Plane, transfer: Transfer, delays: list[float]) -> None:
    for number in range(1, 5):
        plane.store.routes["PUT", part_path("big", number)] = EXPIRED
    with pytest.raises(UrlExpired):
        upload(plane, transfer)
    assert len(plane.asked) == MAX_FRUITLESS_ROUNDS + 2
    assert delays == [1.0 * n for n in range(1, MAX_FRUITLESS_ROUNDS + 1)]


def test_a_url_is_not_used_shortly_before_it_runs_out(server: ScriptedServer, tmp_path: Path) -> None:
    """A URL that would expire before its turn is not used: the uploader asks for a new one."""
    now = [0.0]
    plane = Plane(server, {"big": local(tmp_path / "big", DATA)}, query="?X-Amz-Expires=900")

    def slowly(handler: Handler) -> None:
        now[0] += 500.0
        handler._put(handler.path.partition("?")[0], handler.request_seen.headers, handler.request_seen.body)

    for number in range(1, 5):
        server.routes["PUT", part_path("big", number)] = slowly
    transfer = Transfer(workers=1, clock=lambda: now[0], pause=lambda *_: None)
    upload(plane, transfer)
    transfer.close()
    assert server.objects == {"/big": DATA}
    assert sent(plane) == ALL_ONCE, "nothing was refused"
    parts = [[number for _, number in named] for named in plane.named]
    assert parts == [[1, 2, 3, 4], [3, 4], []]


def test_bytes_that_were_altered_are_sent_once_more(plane: Plane, transfer: Transfer) -> None:
    bad = reply(400, b"<Error><Code>BadDigest</Code><Message>no match</Message></Error>")
    plane.store.script("PUT", part_path("big", 2), bad)
    upload(plane, transfer)
    assert plane.store.objects == {"/big": DATA}
    del plane.store.objects["/big"]
    plane.store.routes["PUT", part_path("big", 2)] = bad
    with pytest.raises(ChecksumMismatch, match="part 2 of big"):
        upload(plane, transfer)
    assert "/big" not in plane.store.objects


def test_a_file_that_changed_after_it_was_hashed_is_refused_by_the_store(plane: Plane, transfer: Transfer) -> None:
    with plane.files["big"].path.open("r+b") as file:
        file.seek(PART + 5)
        file.write(b"!!")
    with pytest.raises(ChecksumMismatch, match="part 2 of big"):
        upload(plane, transfer)


@pytest.mark.parametrize("size_bytes", [len(DATA) + 1, len(DATA) - 1, PART])
def test_a_file_that_grew_or_shrank_is_not_sent(plane: Plane, transfer: Transfer, size_bytes: int) -> None:
    with plane.files["big"].path.open("r+b") as file:
        file.truncate(size_bytes)
    with pytest.raises(FileChanged):
        upload(plane, transfer)
    assert "/big" not in plane.store.objects


def test_a_part_that_is_gone_at_the_completion_is_sent_again(plane: Plane, transfer: Transfer) -> None:
    plane.before = [lambda: None, lambda: plane.store.objects.pop(part_path("big", 2))]
    upload(plane, transfer)
    assert plane.store.objects == {"/big": DATA}
    assert sent(plane) == ALL_ONCE + Counter([part_path("big", 2)])


def test_a_completion_whose_answer_was_lost_is_asked_for_once_more(plane: Plane, transfer: Transfer) -> None:
    asked = plane.ask
    lost = [False]

    def ask(names: Sequence[str]) -> Missing:
        answer = asked(names)
        if "/big" in plane.store.objects and not lost[0]:
            lost[0] = True
            return Missing([], frozenset(names))  # it was overtaken by another who has put it together
        return answer

    plane.ask = ask  # type: ignore[method-assign]
    upload(plane, transfer)
    assert lost[0]
    assert plane.store.objects == {"/big": DATA}
    assert sent(plane) == ALL_ONCE


def test_an_upload_that_somebody_else_has_ended_is_looked_at_again(plane: Plane, transfer: Transfer) -> None:
    """The uploader asks again after another worker or a lifecycle rule has ended its upload."""

    def overtaken(handler: Handler) -> None:
        with plane.store.lock:
            plane.store.objects["/big"] = DATA
        NO_UPLOAD(handler)

    for number in range(1, 5):
        plane.store.routes["PUT", part_path("big", number)] = overtaken
    moved = upload(plane, transfer)
    assert plane.store.objects == {"/big": DATA}
    assert sum(moved) == len(DATA)
    assert transfer.stats.counts.uploaded_objects == 0
    plane.store.objects.clear()
    for number in range(1, 5):
        plane.store.routes["PUT", part_path("big", number)] = NO_UPLOAD
    with pytest.raises(UrlExpired, match="has ended"):
        upload(plane, transfer)


def test_what_is_never_put_together_is_given_up(plane: Plane, transfer: Transfer) -> None:
    plane.completes = False
    with pytest.raises(TransferError, match="big: uploaded, but the control plane still reports it as missing"):
        upload(plane, transfer)
    assert sent(plane) == ALL_ONCE


def test_stopped_in_the_middle_it_goes_on_with_what_is_missing(
    plane: Plane, transfer: Transfer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    cancel = threading.Event()

    def stop(handler: Handler) -> None:
        cancel.set()
        refuse_unread(500, b"")(handler)

    stop.reads_body = False  # type: ignore[attr-defined]
    plane.store.objects[part_path("big", 1)] = pieces(DATA)[0]
    plane.store.script("PUT", part_path("big", 4), stop)
    with pytest.raises(TransferCanceled):
        upload(plane, transfer, cancel=cancel)
    plane.store.settle()
    assert "/big" not in plane.store.objects
    there = set(plane.store.objects)
    plane.store.seen.clear()
    moved = upload(plane, transfer)
    assert plane.store.objects == {"/big": DATA}
    assert set(sent(plane)) == set(ALL_ONCE) - there, "only what was missing"
    assert sum(moved) == len(DATA), "what was there counts as moved"


def test_answers_that_name_some_parts_at_a_time(plane: Plane, transfer: Transfer) -> None:
    plane.most = 1
    moved = upload(plane, transfer)
    assert plane.store.objects == {"/big": DATA}
    assert sent(plane) == ALL_ONCE
    assert len(plane.asked) == 5
    assert sum(moved) == len(DATA)


def test_small_files_are_one_put_each_and_cost_no_round_more(
    server: ScriptedServer, transfer: Transfer, tmp_path: Path
) -> None:
    plane = Plane(server, {name: local(tmp_path / name, name.encode() * 9) for name in "abc"})
    moved = upload(plane, transfer)
    assert server.objects == {f"/{name}": name.encode() * 9 for name in "abc"}
    assert plane.asked == [["a", "b", "c"]]
    assert sum(moved) == 27
    assert transfer.stats.counts.uploaded_objects == 3


def test_small_files_that_are_stored_are_not_sent_again_when_urls_run_out(
    server: ScriptedServer, tmp_path: Path
) -> None:
    """Regression: all files of a batch were sent again, so that on a slow line a large batch never came to its end."""
    names = [str(number) for number in range(MAX_FRUITLESS_ROUNDS + 4)]
    plane = Plane(server, {name: local(tmp_path / name, name.encode()) for name in names})
    for name in names[1:]:
        server.script("PUT", f"/{name}", EXPIRED)
    transfer = Transfer(workers=1, pause=lambda *_: None)
    moved = upload(plane, transfer)
    transfer.close()
    assert server.objects == {f"/{name}": name.encode() for name in names}
    assert plane.asked[-1] == [names[-1]]
    assert sum(moved) == len(names)
    assert transfer.stats.counts.uploaded_objects == len(names)


def test_large_and_small_ones_together(server: ScriptedServer, transfer: Transfer, tmp_path: Path) -> None:
    other = large(2, seed=3)
    plane = Plane(
        server,
        {
            "small": local(tmp_path / "small", b"s"),
            "big": local(tmp_path / "big", DATA),
            "bigger": local(tmp_path / "bigger", other),
        },
    )
    moved = upload(plane, transfer)
    assert server.objects == {"/small": b"s", "/big": DATA, "/bigger": other}
    assert plane.asked == [["small", "big", "bigger"], ["big", "bigger"]]
    assert sum(moved) == len(DATA) + len(other) + 1
    assert transfer.stats.counts.uploaded_objects == 3


@pytest.mark.parametrize(("name", "part"), [("big", 5), ("big", 0), ("small", 1), ("unknown", None), ("unknown", 1)])
def test_what_nobody_has_is_not_sent(
    server: ScriptedServer, transfer: Transfer, tmp_path: Path, name: str, part: int | None
) -> None:
    files = {"small": local(tmp_path / "small", b"s"), "big": local(tmp_path / "big", DATA)}
    target = Target(name=name, url=server.url, headers={}, part=part)
    with pytest.raises(UnexpectedAnswer):
        upload_in_rounds(transfer, files, lambda _: Missing([target], frozenset()), traffic="data")
    with pytest.raises(UnexpectedAnswer):
        upload_in_rounds(transfer, files, lambda _: Missing([], frozenset({"unknown"})), traffic="data")
    assert server.seen == []


def test_nothing_costs_no_call(transfer: Transfer) -> None:
    def never(_: Sequence[str]) -> Missing:
        raise AssertionError

    upload_in_rounds(transfer, {}, never, traffic="data")


def test_over_tls(tls: tuple[object, object], tmp_path: Path) -> None:
    server_tls, client_tls = tls
    with ScriptedServer(tls=server_tls) as server:  # type: ignore[arg-type]
        plane = Plane(server, {"big": local(tmp_path / "big", DATA)})
        transfer = Transfer(workers=2, connections=Connections(tls=client_tls))  # type: ignore[arg-type]
        upload(plane, transfer)
        transfer.close()
    assert server.objects == {"/big": DATA}
