"""Two attempts commit the same chunks concurrently through the real control plane."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.contract.checkpoints.calls import CommitAnswer
from baton.contract.checkpoints.manifest import Manifest
from baton.contract.elastic.nodes import NodesSpec
from baton.contract.jobs.job import JobSubmit
from baton.contract.worker.calls import ReleaseRequest, WorkItem, WorkQuery
from gpu_client.checkpoints.local.chunk_cache import LocalChunkCache
from gpu_client.checkpoints.restore.checkpoint_restore import restore
from gpu_client.checkpoints.save.checkpoint_commit import Committed, commit_checkpoint
from gpu_client.transport.api.client import BatonClient
from tests.kits.clouds.emulator import unique
from tests.kits.files.directories import files_below, write_files
from tests.kits.stack.stack import Stack

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
    item = worker.claim(WorkQuery(queue=queue, runs_nodes=True))
    assert item is not None
    return item


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
    """Concurrent commits of the same chunks do not wait for each other; both checkpoints can be restored."""
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


def test_a_checkpoint_of_one_node_is_restored_by_another(stack: Stack, worker: BatonClient, tmp_path: Path) -> None:
    queue = unique("q")
    job = stack.client.submit(JobSubmit(command=["train"], queue=queue, nodes=NodesSpec(max=3)))
    first, second = claim_again(worker, queue), claim_again(worker, queue)
    made = {"base.bin": unique("bytes").encode() * 1000}
    committed = commit_checkpoint(worker, worker.transfer, second, write_files(tmp_path / "made", made), 10)
    assert (committed.manifest.job_id, committed.epoch) == (job.id, 2) != (second.id, second.epoch)
    third = claim_again(worker, queue)
    assert first.resume == [] and [one.step for one in third.resume] == [10]
    store = LocalChunkCache(tmp_path / "store", third.checkpoint_job)
    restored = restore(worker, worker.transfer, third, tmp_path / "output", store=store)
    assert restored is not None and files_below(restored.path) == made
    assert [manifest.job_id for manifest in store.manifests] == [job.id]
