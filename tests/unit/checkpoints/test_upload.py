"""The commit protocol, with everything that can come in between."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gpu_client.checkpoints.errors import BadDirectory
from gpu_client.checkpoints.upload import CommitFailed, Committed, commit_checkpoint
from gpu_client.transport.errors import (
    ChecksumMismatch,
    FileChanged,
    LeaseExpired,
    LeaseLost,
    StepNotNewer,
    TransferCanceled,
    TransferError,
    UnexpectedAnswer,
    Unreachable,
)
from gpu_client.transport.transfer import Transfer
from tests.unit.checkpoints.fake_cloud import EXPIRED, FakeCloud, refusal
from tests.unit.transport.scripted_server import Handler, reply

FILES = {"model.bin": b"m" * 5000, "optimizer.bin": b"o" * 3000, "sub/copy.bin": b"m" * 5000, "empty": b""}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "checkpoint-5"
    for name, data in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    return place


@pytest.fixture
def pauses() -> list[float]:
    return []


def commit(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float], step: int = 5, **more: object
) -> Committed:
    return commit_checkpoint(
        cloud, transfer, cloud.item(), directory, step, metrics={"loss": 1.0}, sleep=pauses.append, **more  # type: ignore[arg-type]
    )  # fmt: skip


def test_two_calls_and_each_blob_once(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    done = commit(cloud, transfer, directory, pauses)
    assert cloud.calls == ["commit", "commit"]
    assert sorted(cloud.store.objects[path] for path in cloud.store.objects if path.startswith("/blobs")) == [
        b"",
        b"m" * 5000,
        b"o" * 3000,
    ]
    assert [manifest.step for manifest in cloud.committed] == [5]
    assert cloud.committed[0].metrics == {"loss": 1.0}
    assert (done.step, done.epoch, done.api_calls) == (5, 2, 2)
    assert (done.hashed_bytes, done.uploaded_bytes, done.uploaded_blobs, done.skipped_bytes) == (13_000, 8000, 3, 0)
    assert pauses == []


def test_what_is_stored_is_not_sent_again(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    commit(cloud, transfer, directory, pauses)
    (directory / "model.bin").write_bytes(b"n" * 10)
    before = len(cloud.store.paths("PUT"))
    done = commit(cloud, transfer, directory, pauses, step=6)
    assert len(cloud.store.paths("PUT")) == before + 1
    assert (done.uploaded_bytes, done.skipped_bytes) == (10, 8000)
    again = commit(cloud, transfer, directory, pauses, step=6)
    assert (again.api_calls, again.uploaded_bytes) == (1, 0)


def test_long_lists_come_in_pieces(cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]) -> None:
    cloud.max_missing = 1
    assert commit(cloud, transfer, directory, pauses).api_calls == 4
    assert len(cloud.committed) == 1


def test_urls_that_ran_out_are_asked_for_again(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    blob = "/blobs/" + _digest(b"o" * 3000)
    cloud.store.script("PUT", blob, EXPIRED, EXPIRED)
    done = commit(cloud, transfer, directory, pauses)
    assert len(cloud.committed) == 1
    assert (done.uploaded_blobs, done.uploaded_bytes) == (3, 8000)


def test_urls_that_always_run_out_end_the_commit(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    for data in set(FILES.values()):
        cloud.store.routes["PUT", "/blobs/" + _digest(data)] = EXPIRED
    with pytest.raises(CommitFailed, match=r"step 5 cannot be committed: .*run out"):
        commit(cloud, transfer, directory, pauses)
    assert cloud.committed == []
    assert pauses == [1, 2, 3]


def test_blobs_that_are_never_seen_end_the_commit(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    cloud.blind = True
    with pytest.raises(CommitFailed, match="still said to be missing"):
        commit(cloud, transfer, directory, pauses)
    assert cloud.committed == []


def test_not_stored_yet_is_asked_again_after_a_pause(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    cloud.raises["commit"] = [refusal("not_stored_yet"), refusal("not_stored_yet")]
    commit(cloud, transfer, directory, pauses)
    assert len(cloud.committed) == 1
    assert pauses == [1, 2]
    cloud.raises["commit"] = [refusal("not_stored_yet")] * 9
    with pytest.raises(CommitFailed):
        commit(cloud, transfer, directory, pauses, step=6)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("lease_lost", LeaseLost),
        ("job_canceled", LeaseLost),
        ("lease_expired", LeaseExpired),
        ("step_not_newer", StepNotNewer),
    ],
)
def test_refusals_are_raised_at_once(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float], code: str, kind: type[Exception]
) -> None:
    cloud.raises["commit"] = [refusal(code)]
    with pytest.raises(kind):
        commit(cloud, transfer, directory, pauses)
    assert cloud.calls == ["commit"]
    assert cloud.store.seen == []


def test_a_failed_upload_is_never_committed(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    """Regression (Dreambooth worker): a failed upload was printed, and progress reported anyway."""
    cloud.store.routes["PUT", "/blobs/" + _digest(b"o" * 3000)] = reply(500)
    with pytest.raises(Unreachable):
        commit(cloud, transfer, directory, pauses)
    assert cloud.calls == ["commit"]
    assert cloud.committed == []
    # the store is back: only what is missing is sent
    del cloud.store.routes["PUT", "/blobs/" + _digest(b"o" * 3000)]
    commit(cloud, transfer, directory, pauses)
    assert len(cloud.committed) == 1


@pytest.mark.parametrize(("change", "kind"), [(b"O" * 3000, ChecksumMismatch), (b"o" * 2000, FileChanged)])
def test_a_file_that_changes_after_hashing_is_not_committed(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float], change: bytes, kind: type[Exception]
) -> None:
    """Regression (Kelpie worker): a change during an upload was dropped, and a mix of two steps could be resumed."""

    class Meddling(Transfer):
        def upload(self, items, **more) -> None:  # type: ignore[no-untyped-def, override]
            (directory / "optimizer.bin").write_bytes(change)
            transfer.upload(items, **more)

    with pytest.raises(kind):
        commit(cloud, Meddling(), directory, pauses)
    assert cloud.committed == []


def test_losing_the_lease_stops_the_upload(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    cancel = threading.Event()

    def lose(handler: Handler) -> None:
        cancel.set()
        handler.answer(503)

    cloud.store.script("PUT", "/blobs/" + _digest(b"m" * 5000), lose)
    with pytest.raises(TransferCanceled):
        commit(cloud, transfer, directory, pauses, cancel=cancel)
    assert cloud.committed == []


def test_a_bad_directory_is_refused_before_any_call(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    (directory / "out").symlink_to("/etc/passwd")
    with pytest.raises(BadDirectory):
        commit(cloud, transfer, directory, pauses)
    assert cloud.calls == []


def test_a_store_that_refuses_is_an_error(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    cloud.store.routes["PUT", "/blobs/" + _digest(b"")] = reply(403, b"<Code>SignatureDoesNotMatch</Code>")
    with pytest.raises(TransferError, match="SignatureDoesNotMatch"):
        commit(cloud, transfer, directory, pauses)


def test_an_answer_that_asks_for_an_unknown_blob(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cloud.commit

    def other(lease_token, manifest):  # type: ignore[no-untyped-def]
        answer = real(lease_token, manifest)
        return answer.model_copy(update={"missing": [answer.missing[0].model_copy(update={"blake3": "f" * 64})]})

    monkeypatch.setattr(cloud, "commit", other)
    with pytest.raises(UnexpectedAnswer, match="ffff"):
        commit(cloud, transfer, directory, pauses)


def test_progress_is_the_bytes_that_moved(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    moved: list[int] = []
    commit(cloud, transfer, directory, pauses, progress=moved.append)
    assert sum(moved) == 8000


def _digest(data: bytes) -> str:
    from gpu_client.transport.digests import digest_bytes

    return digest_bytes(data).blake3
