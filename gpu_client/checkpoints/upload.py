"""The commit of a checkpoint: manifest, missing blobs, the same manifest again.

Nothing counts as committed before the control plane has answered so: it has then seen every blob with its size and
checksum. Every failure is raised; repeating the commit is always safe and sends only what is still missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from contract.checkpoints import CommitAnswer, Manifest
from contract.work import WorkItem
from gpu_client.checkpoints.errors import CommitFailed
from gpu_client.checkpoints.manifest import LocalManifest, build_manifest
from gpu_client.transport.cancel import CancelEvent, stop_if_set
from gpu_client.transport.errors import NotStoredYet, UnexpectedAnswer, UrlExpired
from gpu_client.transport.transfer import Progress, Transfer, Upload

__all__ = ["CommitFailed", "Committed", "commit_checkpoint"]

logger = logging.getLogger(__name__)

MAX_FRUITLESS_ROUNDS = 3
"""Rounds that brought the commit no further before it is given up."""

_PAUSE_S = 1.0


class CommitApi(Protocol):
    """The one call that a commit needs; BatonClient has it."""

    def commit(self, lease_token: str, manifest: Manifest) -> CommitAnswer:
        """Post the manifest."""
        ...


@dataclass(frozen=True)
class Committed:
    """A commit that was accepted, and what it took. Blobs that were stored already count as skipped."""

    step: int
    epoch: int
    api_calls: int
    hashed_bytes: int
    uploaded_bytes: int
    uploaded_blobs: int
    skipped_bytes: int
    seconds: float


def commit_checkpoint(
    client: CommitApi,
    transfer: Transfer,
    item: WorkItem,
    directory: Path,
    step: int,
    *,
    metrics: Mapping[str, float] | None = None,
    created_by: Literal["session", "script"] = "session",
    cancel: CancelEvent | None = None,
    progress: Progress | None = None,
    sleep: Callable[[float], object] | None = None,
) -> Committed:
    """Commit the checkpoint in `directory` (complete, and left alone meanwhile) as `step` of the claimed job.

    Two API calls when nothing unusual happens, one when every blob is stored already. Raises BadDirectory, FileChanged,
    CommitFailed, what the transfer raises, and of ApiError above all LeaseLost, LeaseExpired, StepNotNewer.
    """
    started = time.monotonic()
    local = build_manifest(
        directory,
        job_id=item.id,
        step=step,
        epoch=item.epoch,
        metrics=metrics,
        created_by=created_by,
        cancel=cancel,
    )
    pause = sleep or (cancel.wait if cancel is not None else time.sleep)
    rounds = _Rounds(client, transfer, item.lease_token, local, cancel=cancel, progress=progress, pause=pause)
    rounds.run()
    sizes = local.blob_sizes
    uploaded_bytes = sum(sizes[digest] for digest in rounds.asked)
    return Committed(
        step=step,
        epoch=item.epoch,
        api_calls=rounds.api_calls,
        hashed_bytes=local.manifest.total_bytes,
        uploaded_bytes=uploaded_bytes,
        uploaded_blobs=len(rounds.asked),
        skipped_bytes=sum(sizes.values()) - uploaded_bytes,
        seconds=time.monotonic() - started,
    )


class _Rounds:
    """Post, upload what is missing, post again, until committed."""

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
        self.asked: set[str] = set()

    def run(self) -> None:
        """Raises CommitFailed when rounds stop bringing the commit any further."""
        reason: str | None = "nothing was uploaded yet"
        while reason is not None:
            reason = self._round(reason)

    def _round(self, reason: str) -> str | None:
        """One post with the uploads it asks for. None if committed, else why not yet; `reason` is the last one's."""
        if self._cancel is not None:
            stop_if_set(self._cancel)
        self.api_calls += 1
        try:
            answer = self._client.commit(self._lease_token, self._local.manifest)
        except NotStoredYet as error:
            self._no_nearer(error.message)
            return error.message
        if answer.committed:
            return None
        if not answer.missing:
            raise UnexpectedAnswer("commit: neither committed nor is anything missing")
        uploads = self._uploads(answer)
        asked = {upload.name for upload in uploads}
        if asked - self.asked:
            self._fruitless = 0
        elif len(asked) >= self._last_asked:
            self._no_nearer(reason)
        self._last_asked = len(asked)
        self.asked |= asked
        try:
            self._transfer.upload(uploads, cancel=self._cancel, progress=self._progress)
        except UrlExpired as error:
            return str(error)
        return "uploaded blobs are still said to be missing"

    def _no_nearer(self, reason: str) -> None:
        """A round in vain: nothing new was asked for, and no less than before."""
        step = self._local.manifest.step
        self._fruitless += 1
        if self._fruitless > MAX_FRUITLESS_ROUNDS:
            raise CommitFailed(f"checkpoint of step {step} cannot be committed: {reason}")
        logger.info("commit of step %d: %s; trying again", step, reason)
        self._pause(_PAUSE_S * self._fruitless)

    def _uploads(self, answer: CommitAnswer) -> list[Upload]:
        sizes = self._local.blob_sizes
        unknown = [blob.blake3 for blob in answer.missing if blob.blake3 not in sizes]
        if unknown:
            raise UnexpectedAnswer(f"commit: blob {unknown[0]} is asked for, which the manifest does not name")
        return [
            Upload(
                name=blob.blake3,
                path=self._local.blobs[blob.blake3],
                size_bytes=sizes[blob.blake3],
                url=blob.url,
                headers=blob.headers,
            )
            for blob in answer.missing
        ]
