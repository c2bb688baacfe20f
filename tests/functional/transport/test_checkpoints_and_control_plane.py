"""Checkpoints through the real control plane: those of older workers, and chunks that two attempts send at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.contract.checkpoints import CommitAnswer
from baton.contract.jobs import JobSubmit
from baton.contract.manifest import Manifest, ManifestFile, ManifestV1
from baton.contract.work import ReleaseRequest, WorkItem, WorkQuery
from gpu_client.checkpoints.known import Known
from gpu_client.checkpoints.restore import restore
from gpu_client.checkpoints.store import LocalStore
from gpu_client.checkpoints.upload import Committed, commit_checkpoint
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.transfer.manager import Upload
from tests.emulator import unique
from tests.stack import Stack
from tests.trees import files_below, write_files

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

PATIENCE_S = 60


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        yield running


@pytest.fixture
def worker(stack: Stack) -> Iterator[BatonClient]:
    with BatonClient(stack.url, stack.keys["worker"]) as client:
        yield client


def claim(stack: Stack, worker: BatonClient, queue: str) -> WorkItem:
    stack.client.submit(JobSubmit(command=["train"], queue=queue))
    return claim_again(worker, queue)


def claim_again(worker: BatonClient, queue: str) -> WorkItem:
    item = worker.claim(WorkQuery(queue=queue))
    assert item is not None
    return item


def commit_whole_files(worker: BatonClient, item: WorkItem, place: Path, step: int) -> ManifestV1:
    """As workers did before there were chunks: each file an object."""
    digests = {name: digest_bytes(data) for name, data in files_below(place).items()}
    files = [
        ManifestFile(path=name, size_bytes=one.size_bytes, blake3=one.blake3, crc64nvme=one.crc64nvme)
        for name, one in digests.items()
    ]
    manifest = ManifestV1(job_id=item.id, step=step, epoch=item.epoch, files=files)
    missing = {blob.blake3: blob for blob in worker.commit(item.lease_token, manifest).missing}
    assert missing.keys() == {one.blake3 for one in digests.values()}
    uploads = {
        one.blake3: Upload.of_file(
            name=name,
            path=place / name,
            size_bytes=one.size_bytes,
            url=missing[one.blake3].url,
            headers=missing[one.blake3].headers,
        )
        for name, one in digests.items()
    }
    worker.transfer.upload(list(uploads.values()))
    assert worker.commit(item.lease_token, manifest).committed
    return manifest


def test_a_checkpoint_of_an_older_worker_comes_back_and_is_built_upon(
    stack: Stack, worker: BatonClient, tmp_path: Path
) -> None:
    queue = unique("q")
    first = claim(stack, worker, queue)
    made = {"model.bin": bytes(range(256)) * 200, "deep/ü.txt": b"x", "same.txt": b"x", "empty": b""}
    old = commit_whole_files(worker, first, write_files(tmp_path / "made", made), 10)
    worker.release(first.lease_token, ReleaseRequest(job_id=first.id))

    second = claim_again(worker, queue)
    store = LocalStore(tmp_path / "stores", second.id)
    restored = restore(worker, worker.transfer, second, tmp_path / "output", store=store)
    assert restored is not None
    assert (restored.step, restored.epoch, files_below(restored.path)) == (10, 1, made)
    assert store.manifests

    made["more.bin"] = b"new" * 1000
    known = Known.of(store.manifests, store)
    done = commit_checkpoint(worker, worker.transfer, second, write_files(tmp_path / "made", made), 20, known=known)
    assert done.uploaded_bytes == 3000, "what the older worker stored is not sent again"
    worker.release(second.lease_token, ReleaseRequest(job_id=second.id))

    third = claim_again(worker, queue)
    assert [ref.step for ref in third.resume] == [20, 10]
    restored = restore(worker, worker.transfer, third, tmp_path / "elsewhere")
    assert restored is not None
    assert (restored.step, files_below(restored.path)) == (20, made)
    stored = stack.keys_below("packs/")
    assert all(f"packs/{file.blake3}" in stored for file in old.files)


class AtOnce:
    """Passes commits on; the first answer is held back until another attempt has its own."""

    def __init__(self, worker: BatonClient, barrier: threading.Barrier) -> None:
        self._worker = worker
        self._barrier = barrier
        self.missing: list[set[str]] = []

    def commit(self, lease_token: str, manifest: Manifest) -> CommitAnswer:
        answer = self._worker.commit(lease_token, manifest)
        self.missing.append({blob.blake3 for blob in answer.missing})
        if len(self.missing) == 1:
            self._barrier.wait(PATIENCE_S)
        return answer


def test_two_attempts_that_send_the_same_chunks_at_once_both_commit(
    stack: Stack, worker: BatonClient, tmp_path: Path
) -> None:
    """Neither waits for the other; what both then name is there for both."""
    queues = [unique("q"), unique("q")]
    items = [claim(stack, worker, queue) for queue in queues]
    made = {"base.bin": unique("bytes").encode() * 100_000, "small": b"s" * 100}
    barrier = threading.Barrier(2)
    clients = [AtOnce(worker, barrier) for _ in items]

    def commit(number: int) -> Committed:
        place = write_files(tmp_path / f"made-{number}", made)
        return commit_checkpoint(clients[number], worker.transfer, items[number], place, 10)

    with ThreadPoolExecutor(2) as threads:
        done = list(threads.map(commit, range(2)))
    assert clients[0].missing == clients[1].missing == [{done[0].manifest.packs[0].blake3}, set()]
    assert done[0].manifest.packs == done[1].manifest.packs
    counts = worker.transfer.stats.counts
    assert counts.uploaded_objects + counts.already_stored_objects == 2, "both were asked for it, and sent it"
    for number, queue in enumerate(queues):
        worker.release(items[number].lease_token, ReleaseRequest(job_id=items[number].id))
        restored = restore(worker, worker.transfer, claim_again(worker, queue), tmp_path / f"output-{number}")
        assert restored is not None
        assert files_below(restored.path) == made
