"""The commit protocol, with an interruption at every step."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from blake3 import blake3

from baton.contract.checkpoints.calls import CommitAnswer
from baton.contract.checkpoints.manifest import Manifest
from gpu_client.checkpoints.format import packing
from gpu_client.checkpoints.format.packing import name_pack
from gpu_client.checkpoints.local.directory_files import BadDirectory
from gpu_client.checkpoints.save.checkpoint_commit import CommitFailed, Committed, commit_checkpoint
from gpu_client.checkpoints.save.chunk_index import ChunkIndex
from gpu_client.checkpoints.save.source_files import Spool
from gpu_client.transport.errors import (
    ChecksumMismatch,
    Conflict,
    FileChanged,
    LeaseExpired,
    LeaseLost,
    StepNotNewer,
    TransferCanceled,
    TransferError,
    UnexpectedAnswer,
    Unreachable,
)
from gpu_client.transport.transfer.manager import Transfer
from tests.kits.files.directories import write_files
from tests.unit.checkpoints.fake_cloud import EXPIRED, FakeCloud, refusal
from tests.unit.transport.scripted_server import Handler, reply

FILES = {"model.bin": b"m" * 5000, "optimizer.bin": b"o" * 3000, "sub/copy.bin": b"m" * 5000, "empty": b""}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_files(tmp_path / "checkpoint-5", FILES)


@pytest.fixture(autouse=True)
def _a_pack_for_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_PACK_BYTES", 1)
    monkeypatch.setattr(packing, "MAX_PACK_BYTES", 1)


@pytest.fixture
def pauses() -> list[float]:
    return []


def commit(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float], step: int = 5, **more: object
) -> Committed:
    return commit_checkpoint(
        cloud, transfer, cloud.item(), directory, step, metrics={"loss": 1.0}, sleep=pauses.append, **more  # type: ignore[arg-type]
    )  # fmt: skip


def test_two_calls_and_each_pack_once(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    done = commit(cloud, transfer, directory, pauses)
    assert cloud.calls == ["commit", "commit"]
    assert sorted(cloud.store.objects[path] for path in cloud.store.objects if path.startswith("/packs")) == [
        b"m" * 5000,
        b"o" * 3000,
    ]
    assert [manifest.step for manifest in cloud.committed] == [5]
    assert cloud.committed[0].metrics == {"loss": 1.0}
    assert (done.step, done.epoch, done.api_calls) == (5, 2, 2)
    assert (done.raw_bytes, done.reused_bytes, done.encoded_bytes) == (13_000, 5000, 8000)
    assert (done.uploaded_bytes, done.uploaded_packs) == (8000, 2)
    assert done.manifest == cloud.committed[0]
    assert pauses == []


def test_what_is_stored_is_not_sent_again(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    commit(cloud, transfer, directory, pauses)
    (directory / "model.bin").write_bytes(b"n" * 10)
    before = len(cloud.store.paths("PUT"))
    done = commit(cloud, transfer, directory, pauses, step=6)
    assert len(cloud.store.paths("PUT")) == before + 1
    assert (done.uploaded_bytes, done.encoded_bytes) == (10, 8010)
    again = commit(cloud, transfer, directory, pauses, step=6)
    assert (again.api_calls, again.uploaded_bytes) == (1, 0)


def test_what_an_earlier_checkpoint_has_is_not_even_asked_for(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    known = ChunkIndex()
    commit(cloud, transfer, directory, pauses, known=known)
    (directory / "model.bin").write_bytes(b"n" * 10)
    done = commit(cloud, transfer, directory, pauses, step=6, known=known)
    assert (done.raw_bytes, done.reused_bytes, done.encoded_bytes, done.uploaded_bytes) == (8010, 8000, 10, 10)
    assert len(done.manifest.packs) == 3
    again = commit(cloud, transfer, directory, pauses, step=7, known=known)
    assert (again.api_calls, again.encoded_bytes) == (1, 0)


def test_a_known_pack_that_is_gone_is_written_anew(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    """Retention or a user deleted a pack: the files are here, so nothing is lost."""
    known = ChunkIndex()
    commit(cloud, transfer, directory, pauses, known=known)
    del cloud.store.objects[_pack(b"o" * 3000)]
    (directory / "model.bin").write_bytes(b"n" * 10)
    done = commit(cloud, transfer, directory, pauses, step=6, known=known)
    assert cloud.store.objects[_pack(b"o" * 3000)] == b"o" * 3000
    assert (done.api_calls, done.uploaded_packs, done.uploaded_bytes) == (3, 2, 3010)
    assert cloud.committed[-1] == done.manifest
    assert pauses == []
    assert commit(cloud, transfer, directory, pauses, step=7, known=known).api_calls == 1


def test_what_was_not_committed_is_not_known(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    known = ChunkIndex()
    cloud.store.routes["PUT", _pack(b"o" * 3000)] = reply(500)
    with pytest.raises(Unreachable):
        commit(cloud, transfer, directory, pauses, known=known)
    assert known.find(_digest(b"m" * 5000)) is None
    assert known.find(_digest(b"o" * 3000)) is None


def test_a_repeated_commit_offers_the_same_manifest(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float], tmp_path: Path
) -> None:
    """The answer to the first may have been lost: other contents for the same step would be refused."""
    (directory / "weights").write_bytes(bytes(range(256)) * 4000)
    offered: list[Manifest] = []
    real = cloud.commit

    def once(lease_token: str, manifest: Manifest) -> CommitAnswer:
        offered.append(manifest)
        answer = real(lease_token, manifest)
        if answer.committed and len(cloud.calls) == 2:
            raise Unreachable("the answer was lost")
        return answer

    cloud.commit = once  # type: ignore[method-assign]
    more = {"known": ChunkIndex(), "upload_bytes_per_s": 1e6, "spool": tmp_path / "spool"}
    with pytest.raises(Unreachable):
        commit(cloud, transfer, directory, pauses, **more)
    done = commit(cloud, transfer, directory, pauses, **more)
    assert done.uploaded_packs == 0
    assert len(offered) == 3
    assert offered[0] == offered[1] == offered[2]
    assert "planes" in {chunk.codec for chunk in offered[0].chunks}


def test_nothing_encoded_is_left_behind(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float], tmp_path: Path
) -> None:
    (directory / "weights").write_bytes(bytes(range(256)) * 4000)
    more = {"upload_bytes_per_s": 1e6, "spool": tmp_path / "spool"}
    done = commit(cloud, transfer, directory, pauses, **more)
    assert done.encoded_bytes < done.raw_bytes / 10
    assert list((tmp_path / "spool").iterdir()) == []
    cloud.raises["commit"] = [refusal("lease_lost")]
    (directory / "weights").write_bytes(bytes(range(255)) * 4000)
    with pytest.raises(LeaseLost):
        commit(cloud, transfer, directory, pauses, step=6, **more)
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_pack_that_is_being_deleted_is_asked_for_again_after_a_pause(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    cloud.raises["commit"] = [refusal("conflict"), refusal("conflict")]
    commit(cloud, transfer, directory, pauses)
    assert len(cloud.committed) == 1
    assert pauses == [1, 2]
    cloud.raises["commit"] = [refusal("checkpoint_conflict")]
    with pytest.raises(Conflict):
        commit(cloud, transfer, directory, pauses, step=6)


def test_long_lists_come_in_pieces(cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]) -> None:
    cloud.max_missing = 1
    assert commit(cloud, transfer, directory, pauses).api_calls == 3
    assert len(cloud.committed) == 1


def test_urls_that_ran_out_are_asked_for_again(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    cloud.store.script("PUT", _pack(b"o" * 3000), EXPIRED, EXPIRED)
    done = commit(cloud, transfer, directory, pauses)
    assert len(cloud.committed) == 1
    assert (done.uploaded_packs, done.uploaded_bytes) == (2, 8000)


def test_urls_that_always_run_out_end_the_commit(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    for data in set(FILES.values()) - {b""}:
        cloud.store.routes["PUT", _pack(data)] = EXPIRED
    with pytest.raises(CommitFailed, match=r"step 5 cannot be committed: .*run out"):
        commit(cloud, transfer, directory, pauses)
    assert cloud.committed == []
    assert pauses == [1, 2, 3]


def test_packs_that_are_never_seen_end_the_commit(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float]
) -> None:
    cloud.blind = True
    with pytest.raises(CommitFailed, match="still reports uploaded packs as missing"):
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
    cloud.store.routes["PUT", _pack(b"o" * 3000)] = reply(500)
    with pytest.raises(Unreachable):
        commit(cloud, transfer, directory, pauses)
    assert cloud.calls == ["commit"]
    assert cloud.committed == []
    # the store is back: only what is missing is sent
    del cloud.store.routes["PUT", _pack(b"o" * 3000)]
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

    cloud.store.script("PUT", _pack(b"m" * 5000), lose)
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
    cloud.store.routes["PUT", _pack(b"o" * 3000)] = reply(403, b"<Code>SignatureDoesNotMatch</Code>")
    with pytest.raises(TransferError, match="SignatureDoesNotMatch"):
        commit(cloud, transfer, directory, pauses)


def test_an_answer_that_asks_for_an_unknown_pack(
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


def _pack(data: bytes) -> str:
    """Return the store's path of the pack that holds this one chunk."""
    return "/packs/" + name_pack([blake3(data).digest()])


def _digest(data: bytes) -> str:
    from gpu_client.transport.net.digests import digest_bytes

    return digest_bytes(data).blake3


def test_what_fails_behind_the_commit_does_not_undo_it(
    cloud: FakeCloud,
    transfer: Transfer,
    directory: Path,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The checkpoint exists. Told that it had failed, the agent counted it as given up."""

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    known = ChunkIndex()
    monkeypatch.setattr(ChunkIndex, "learn", broken)
    monkeypatch.setattr(Spool, "close", broken)
    done = commit(cloud, transfer, directory, pauses, known=known)
    assert [manifest.step for manifest in cloud.committed] == [done.step] == [5]
    failed = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert failed == [
        "removing the spool failed after the commit of a checkpoint",
        "indexing the stored chunks failed after the commit of a checkpoint",
    ]


def test_what_fails_behind_a_failed_commit_does_not_hide_why(
    cloud: FakeCloud, transfer: Transfer, directory: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spool, "close", lambda _: (_ for _ in ()).throw(RuntimeError("broken")))
    monkeypatch.setattr(cloud, "commit", lambda *_: (_ for _ in ()).throw(Unreachable("down")))
    with pytest.raises(Unreachable):
        commit(cloud, transfer, directory, pauses)
