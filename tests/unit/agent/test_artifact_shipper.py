"""Test the upload of artifacts in the background: retried, bounded, never blocking the training."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from baton.contract.errors import ErrorCode
from gpu_client.agent.io import artifact_shipper
from gpu_client.agent.io.artifact_shipper import ArtifactShipper
from gpu_client.transport.errors import FileChanged, TransferCanceled, Unreachable
from gpu_client.transport.net.cancellation import CancelEvent
from tests.kits.waiting import until
from tests.unit.agent.agent_kit import refusal


class Store:
    """Takes files; `trouble` lists the errors of the next uploads."""

    def __init__(self) -> None:
        self.trouble: list[Exception] = []
        self.batches: list[list[str]] = []
        self.files: dict[str, bytes] = {}
        self.bad: set[str] = set()
        self.refused: set[str] = set()
        self.proven = True
        self.hang = False
        self.over = threading.Event()

    def upload(self, files: Mapping[str, Path], cancel: CancelEvent) -> None:
        self.batches.append(list(files))
        while self.hang:
            if cancel.wait(1):
                raise TransferCanceled("canceled by the caller")
        if self.trouble:
            raise self.trouble.pop(0)
        if self.bad & files.keys():
            raise FileChanged("it changed")
        if self.refused & files.keys():
            raise refusal(ErrorCode.INVALID_VALUE)
        self.files |= {path: file.read_bytes() for path, file in files.items()}


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def shipper(store: Store, tmp_path: Path) -> Iterator[ArtifactShipper]:
    made = ArtifactShipper(tmp_path, store.upload, lambda: store.proven, over=store.over, gather_s=0.0, retry_s=0.0)
    yield made
    made.close()
    assert not made._thread.is_alive()


def written(folder: Path, name: str, data: bytes = b"x") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_files_are_sent_by_their_path_below_the_output_directory(
    shipper: ArtifactShipper, store: Store, tmp_path: Path
) -> None:
    assert shipper.offer(written(tmp_path, "validation/step-1-0.png", b"1")) is None
    until(lambda: store.files == {"validation/step-1-0.png": b"1"})
    assert shipper.offer(written(tmp_path, "validation/step-1-0.png", b"2")) is None
    until(lambda: store.files == {"validation/step-1-0.png": b"2"}, what="the file that was written anew")


def test_what_comes_together_shares_a_call(shipper: ArtifactShipper, store: Store, tmp_path: Path) -> None:
    files = [written(tmp_path, f"{number}.png") for number in range(artifact_shipper.BATCH_FILES + 1)]
    with shipper._lock:  # all at once: the thread is faster than this one
        shipper._waiting.update({file.name: file for file in files})
    shipper._news.set()
    until(lambda: len(store.files) == len(files))
    assert store.batches == [[file.name for file in files[:-1]], [files[-1].name]]


@pytest.mark.parametrize(
    "trouble",
    [
        [Unreachable("no route")] * 7,
        [refusal(ErrorCode.LEASE_EXPIRED)] * 7,
        [refusal(ErrorCode.CONFLICT)],
        [OSError(5, "I/O error")],
    ],
    ids=["unreachable", "unproven", "conflict", "disk"],
)
def test_what_may_pass_is_waited_for(
    trouble: list[Exception], shipper: ArtifactShipper, store: Store, tmp_path: Path
) -> None:
    store.trouble = list(trouble)
    shipper.offer(written(tmp_path, "a.png"))
    shipper.offer(written(tmp_path, "b.png"))
    until(lambda: store.files.keys() == {"a.png", "b.png"})


def test_one_bad_file_does_not_hold_up_the_others_and_is_given_up(
    shipper: ArtifactShipper, store: Store, tmp_path: Path
) -> None:
    store.proven = False
    store.bad = {"bad.png"}
    for name in ("a.png", "bad.png", "b.png"):
        shipper.offer(written(tmp_path, name))
    store.proven = True
    until(lambda: store.files.keys() == {"a.png", "b.png"})
    tried = until(
        lambda: (
            len(found := [batch for batch in store.batches if "bad.png" in batch]) == artifact_shipper.MAX_TRIES
            and found
        ),
        5,
    )
    assert tried[1:] == [["bad.png"]] * (artifact_shipper.MAX_TRIES - 1)
    shipper.offer(written(tmp_path, "later.png"))
    until(lambda: "later.png" in store.files)


def test_a_file_that_is_refused_takes_no_other_with_it(shipper: ArtifactShipper, store: Store, tmp_path: Path) -> None:
    store.refused = {"bad.png"}
    files = [written(tmp_path, name) for name in ("a.png", "bad.png", "b.png")]
    with shipper._lock:  # all at once: the thread is faster than this one
        shipper._waiting.update({file.name: file for file in files})
    shipper._news.set()
    until(lambda: store.files.keys() == {"a.png", "b.png"} and not shipper._waiting)
    assert [batch for batch in store.batches if "bad.png" in batch] == [["a.png", "bad.png", "b.png"], ["bad.png"]]


@pytest.mark.parametrize("error", [refusal(ErrorCode.INVALID_VALUE), ZeroDivisionError()], ids=["refused", "bug"])
def test_what_will_never_do_is_dropped_at_once(
    error: Exception, shipper: ArtifactShipper, store: Store, tmp_path: Path
) -> None:
    store.trouble = [error]
    shipper.offer(written(tmp_path, "a.png"))
    until(lambda: store.batches == [["a.png"]])
    shipper.offer(written(tmp_path, "b.png"))
    until(lambda: "b.png" in store.files)
    assert "a.png" not in store.files


def test_a_lost_lease_ends_it(shipper: ArtifactShipper, store: Store, tmp_path: Path) -> None:
    store.trouble = [refusal(ErrorCode.LEASE_LOST)]
    shipper.offer(written(tmp_path, "a.png"))
    shipper._thread.join(60)
    assert not shipper._thread.is_alive()
    assert shipper.offer(written(tmp_path, "b.png")) is None, "whoever offers need not know"
    assert store.files == {}


@pytest.mark.parametrize("how", ["close", "over"])
def test_an_upload_that_hangs_is_cut_off(how: str, shipper: ArtifactShipper, store: Store, tmp_path: Path) -> None:
    store.hang = True
    shipper.offer(written(tmp_path, "a.png"))
    until(lambda: store.batches)
    store.over.set() if how == "over" else shipper.close()
    shipper._thread.join(60)
    assert not shipper._thread.is_alive()


def test_without_a_proven_lease_nothing_is_sent(shipper: ArtifactShipper, store: Store, tmp_path: Path) -> None:
    asked = threading.Event()

    def prove() -> bool:
        asked.set()
        return False

    shipper._prove = prove
    shipper.offer(written(tmp_path, "a.png"))
    assert asked.wait(60)
    assert store.batches == []


def absent(folder: Path) -> Path:
    return folder / "absent.png"


def folder_itself(folder: Path) -> Path:
    (folder / "d").mkdir()
    return folder / "d"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def outside(folder: Path) -> Path:
    return written(folder.parent, "secret.png")


def odd_name(folder: Path) -> Path:
    return written(folder, "a\\b.png")


def large(folder: Path) -> Path:
    path = written(folder, "large.png")
    os.truncate(path, artifact_shipper.MAX_FILE_BYTES + 1)
    return path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (absent, "does not exist"),
        (folder_itself, "is not a file"),
        (pipe, "is not a file"),
        (outside, "is not inside the output directory"),
        (odd_name, "contains a backslash"),
        (large, "at most 67108864 are sent before the end"),
    ],
)
def test_what_is_not_taken_is_said(
    make: Callable[[Path], Path], said: str, shipper: ArtifactShipper, store: Store, tmp_path: Path
) -> None:
    problem = shipper.offer(make(tmp_path))
    assert problem is not None and said in problem
    assert not shipper._waiting and store.batches == []


def test_thousands_are_bounded_and_that_is_said_once(
    shipper: ArtifactShipper, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_shipper, "MAX_FILES", 3)
    path = written(tmp_path, "a.png")
    assert [shipper.offer(path) for _ in range(6)] == [None, None, None, "more than 3 files to show", None, None]


def test_what_was_shown_last_can_be_waited_for(shipper: ArtifactShipper, store: Store, tmp_path: Path) -> None:
    assert shipper.drain(lambda: True), "there is nothing to wait for"
    store.trouble = [Unreachable("no route")] * 2
    for number in range(3):
        assert shipper.offer(written(tmp_path, f"{number}.zip", bytes([number]))) is None
    assert shipper.drain(lambda: False)
    assert store.files == {f"{number}.zip": bytes([number]) for number in range(3)}


def test_nobody_waits_longer_than_he_wants(shipper: ArtifactShipper, store: Store, tmp_path: Path) -> None:
    store.hang = True
    shipper.offer(written(tmp_path, "1.zip"))
    until(lambda: store.batches, what="the upload that hangs")
    looks = iter([False, False, True])
    assert not shipper.drain(lambda: next(looks)), "it is under way, not stored"
    store.over.set()
    assert not shipper.drain(lambda: False), "nothing may be sent any more"
    assert store.files == {}
