"""Commit a checkpoint: post the manifest, upload the missing packs, post the same manifest again.

The control plane verifies size and checksum of every pack before its answer, and the answer commits the checkpoint.
Every failure raises. A repeated commit is idempotent and sends only missing packs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from baton.contract.checkpoints.calls import CommitAnswer
from baton.contract.checkpoints.manifest import Manifest
from baton.contract.errors import ErrorCode
from baton.contract.worker.calls import WorkItem
from gpu_client.checkpoints.save.chunk_index import ChunkIndex
from gpu_client.checkpoints.save.manifest_builder import LocalManifest, build_manifest
from gpu_client.transport.errors import BatonError, Conflict, NotStoredYet, UnexpectedAnswer, UrlExpired
from gpu_client.transport.net.cancellation import CancelEvent, stop_if_set
from gpu_client.transport.transfer.manager import Progress, Transfer, Upload

logger = logging.getLogger(__name__)

MAX_FRUITLESS_ROUNDS = 3
"""Rounds without progress after which the commit fails."""

_PAUSE_S = 1.0


class CommitFailed(BatonError):  # noqa: N818
    """Error of a commit whose uploaded packs the control plane still reports as missing."""


class CommitApi(Protocol):
    """Control-plane API of a commit, implemented by BatonClient."""

    def commit(self, lease_token: str, manifest: Manifest) -> CommitAnswer:
        """Post the manifest."""
        ...


@dataclass(frozen=True)
class Committed:
    """Sizes and times of an accepted commit."""

    step: int
    epoch: int
    manifest: Manifest = field(repr=False)
    api_calls: int
    raw_bytes: int
    """Bytes of all files."""
    reused_bytes: int
    """Bytes of the files without a new stored copy: in an earlier checkpoint, repeated, or zeros."""
    encoded_bytes: int
    """Bytes of the new packs."""
    uploaded_bytes: int
    """Bytes of the uploaded packs. Another job may have stored an equal pack, which needs no upload."""
    uploaded_packs: int
    hash_s: float
    """Time to build the manifest, with encoding."""
    encode_s: float
    """Encoding time, summed over the threads."""
    upload_s: float
    seconds: float


@contextmanager
def log_failures(operation: str) -> Iterator[None]:
    """Log errors after an accepted commit instead of raising, because callers would assume a failed commit."""
    try:
        yield
    except Exception:
        logger.exception("%s failed after the commit of a checkpoint", operation)


class _PacksGone(Exception):  # noqa: N818 - caught here: their chunks are written anew
    """Error of packs of earlier checkpoints that are no longer stored."""

    def __init__(self, packs: Collection[str]) -> None:
        self.packs = frozenset(packs)
        super().__init__(f"{len(self.packs)} packs are gone")


def commit_checkpoint(
    client: CommitApi,
    transfer: Transfer,
    item: WorkItem,
    directory: Path,
    step: int,
    *,
    metrics: Mapping[str, float] | None = None,
    created_by: Literal["session", "script"] = "session",
    tag: str = "",
    known: ChunkIndex | None = None,
    upload_bytes_per_s: float | None = None,
    spool: Path | None = None,
    cancel: CancelEvent | None = None,
    progress: Progress | None = None,
    sleep: Callable[[float], object] | None = None,
) -> Committed:
    """Commit the complete checkpoint in `directory`, which must not change, as `step` of the claimed job.

    The function does not send chunks in `known`, and adds the committed manifest to `known`. `upload_bytes_per_s` and
    `spool` control the codecs as in build_manifest; pass equal values to a repeated commit. A commit makes two API
    calls, or one if every pack is stored already. Raises BadDirectory, FileChanged, CommitFailed, the errors of the
    transfer, and ApiError, such as LeaseLost, LeaseExpired, StepNotNewer.
    """
    started = time.monotonic()
    known = known if known is not None else ChunkIndex()
    pause = sleep or (cancel.wait if cancel is not None else time.sleep)
    api_calls = 0
    while True:
        local = build_manifest(
            directory,
            job_id=item.checkpoint_job,
            step=step,
            epoch=item.checkpoint_epoch,
            metrics=metrics,
            created_by=created_by,
            tag=tag,
            known=known,
            upload_bytes_per_s=upload_bytes_per_s,
            spool=spool,
            cancel=cancel,
        )
        rounds = _CommitRounds(client, transfer, item.lease_token, local, cancel=cancel, progress=progress, pause=pause)
        try:
            rounds.run()
            break
        except _PacksGone as error:
            # The local files contain all bytes, therefore the next manifest sends the chunks of the missing packs.
            logger.warning("commit of step %d: %s; their chunks are written anew", step, error)
            known.forget(error.packs)
        finally:
            with log_failures("removing the spool"):
                local.close()
            api_calls += rounds.api_calls
    with log_failures("indexing the stored chunks"):
        known.learn(local.manifest)
    sizes = local.sizes
    return Committed(
        step=step,
        epoch=item.checkpoint_epoch,
        manifest=local.manifest,
        api_calls=api_calls,
        raw_bytes=local.manifest.total_bytes,
        reused_bytes=local.manifest.total_bytes - local.new_bytes,
        encoded_bytes=sum(sizes[digest] for digest in local.packs),
        uploaded_bytes=sum(sizes[digest] for digest in rounds.asked),
        uploaded_packs=len(rounds.asked),
        hash_s=local.hash_s,
        encode_s=local.encode_s,
        upload_s=rounds.upload_s,
        seconds=time.monotonic() - started,
    )


class _CommitRounds:
    """Rounds of one commit: each posts the manifest and uploads missing packs."""

    def __init__(
        self,
        client: CommitApi,
        transfer: Transfer,
        lease_token: str,
        local: LocalManifest,
        *,
        cancel: CancelEvent | None,
        progress: Progress | None,
        pause: Callable[[float], object],
    ) -> None:
        self._client = client
        self._transfer = transfer
        self._lease_token = lease_token
        self._local = local
        self._cancel = cancel
        self._progress = progress
        self._pause = pause
        self._fruitless = 0
        self._last_asked = 0
        self.api_calls = 0
        self.upload_s = 0.0
        self.asked: set[str] = set()

    def run(self) -> None:
        """Run the rounds. Raises CommitFailed after rounds without progress, _PacksGone."""
        reason: str | None = "nothing was uploaded yet"
        while reason is not None:
            reason = self._round(reason)

    def _round(self, reason: str) -> str | None:
        """Post once and upload the missing packs. Returns the reason for another round, or None.

        `reason`: the last round's result.
        """
        if self._cancel is not None:
            stop_if_set(self._cancel)
        self.api_calls += 1
        try:
            answer = self._client.commit(self._lease_token, self._local.manifest)
        except (NotStoredYet, Conflict) as error:
            if isinstance(error, Conflict) and error.code != ErrorCode.CONFLICT:
                raise
            self._count_fruitless(error.message)
            return error.message
        if answer.committed:
            return None
        if not answer.missing:
            raise UnexpectedAnswer("commit: the answer is neither committed nor names missing packs")
        uploads = self._uploads(answer)
        asked = {blob.blake3 for blob in answer.missing}
        if asked - self.asked:
            self._fruitless = 0
        elif len(asked) >= self._last_asked:
            self._count_fruitless(reason)
        self._last_asked = len(asked)
        self.asked |= asked
        started = time.monotonic()
        try:
            self._transfer.upload(uploads, cancel=self._cancel, progress=self._progress)
        except UrlExpired as error:
            return str(error)
        finally:
            self.upload_s += time.monotonic() - started
        return "the control plane still reports uploaded packs as missing"

    def _count_fruitless(self, reason: str) -> None:
        """Count a round without progress: no new and not fewer requested packs. Raises CommitFailed after too many."""
        step = self._local.manifest.step
        self._fruitless += 1
        if self._fruitless > MAX_FRUITLESS_ROUNDS:
            raise CommitFailed(f"checkpoint of step {step} cannot be committed: {reason}")
        logger.info("commit of step %d: %s; trying again", step, reason)
        self._pause(_PAUSE_S * self._fruitless)

    def _uploads(self, answer: CommitAnswer) -> list[Upload]:
        sizes = self._local.sizes
        asked = [blob.blake3 for blob in answer.missing]
        unknown = [digest for digest in asked if digest not in sizes]
        if unknown:
            raise UnexpectedAnswer(
                f"commit: pack {unknown[0]} is reported as missing, but the manifest does not name it"
            )
        gone = [digest for digest in asked if digest not in self._local.packs]
        if gone:
            raise _PacksGone(gone)
        return [
            Upload(
                name=f"pack {blob.blake3}",
                segments=self._local.packs[blob.blake3],
                size_bytes=sizes[blob.blake3],
                url=blob.url,
                headers=blob.headers,
            )
            for blob in answer.missing
        ]
