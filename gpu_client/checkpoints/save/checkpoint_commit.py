"""The commit of a checkpoint: manifest, missing packs, the same manifest again.

Nothing counts as committed before the control plane has answered so: it has then seen every pack with its size and
checksum. Every failure is raised; repeating the commit is always safe and sends only what is still missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from baton.contract.checkpoints import CommitAnswer
from baton.contract.errors import ErrorCode
from baton.contract.manifest import Manifest
from baton.contract.work import WorkItem
from gpu_client.checkpoints.save.chunk_index import ChunkIndex
from gpu_client.checkpoints.save.manifest_builder import LocalManifest, build_manifest
from gpu_client.transport.errors import BatonError, Conflict, NotStoredYet, UnexpectedAnswer, UrlExpired
from gpu_client.transport.net.cancellation import CancelEvent, stop_if_set
from gpu_client.transport.transfer.manager import Progress, Transfer, Upload

logger = logging.getLogger(__name__)

MAX_FRUITLESS_ROUNDS = 3
"""Rounds that brought the commit no further before it is given up."""

_PAUSE_S = 1.0


class CommitFailed(BatonError):  # noqa: N818
    """The blobs were uploaded, yet the control plane does not see them."""


class CommitApi(Protocol):
    """The one call that a commit needs; BatonClient has it."""

    def commit(self, lease_token: str, manifest: Manifest) -> CommitAnswer:
        """Post the manifest."""
        ...


@dataclass(frozen=True)
class Committed:
    """A commit that was accepted, and what it took."""

    step: int
    epoch: int
    manifest: Manifest = field(repr=False)
    api_calls: int
    raw_bytes: int
    """Of all files."""
    reused_bytes: int
    """Of these, what is not stored anew: an earlier checkpoint has it, this one has it twice, or it is zeros."""
    encoded_bytes: int
    """What the rest has become: the size of the new packs."""
    uploaded_bytes: int
    """Of these, what was not stored already: somebody else may have written an equal pack."""
    uploaded_packs: int
    hash_s: float
    """Until there was a manifest, encoding included."""
    encode_s: float
    """In all threads together."""
    upload_s: float
    seconds: float


@contextmanager
def log_failures(what: str) -> Iterator[None]:
    """For everything behind an accepted commit. The checkpoint exists: whatever fails now is logged and not raised, for
    it would be taken for the commit's failure."""
    try:
        yield
    except Exception:
        logger.exception("%s failed, behind the commit of a checkpoint", what)


class _PacksGone(Exception):  # noqa: N818 - their chunks are written anew
    """Packs of earlier checkpoints are not stored any more."""

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
    """Commit the checkpoint in `directory` (complete, and left alone meanwhile) as `step` of the claimed job.

    What is in `known` is not sent again; `known` learns what was committed. `upload_bytes_per_s` and `spool` are for
    the codecs, as in build_manifest: when a commit is repeated, they have to be the same. Two API calls when nothing
    unusual happens, one when every pack is stored already. Raises BadDirectory, FileChanged, CommitFailed, what the
    transfer raises, and of ApiError above all LeaseLost, LeaseExpired, StepNotNewer.
    """
    started = time.monotonic()
    known = known if known is not None else ChunkIndex()
    pause = sleep or (cancel.wait if cancel is not None else time.sleep)
    api_calls = 0
    while True:
        local = build_manifest(
            directory,
            job_id=item.id,
            step=step,
            epoch=item.epoch,
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
            # all that the checkpoint consists of is in its files: it only has to be sent after all
            logger.warning("commit of step %d: %s; their chunks are written anew", step, error)
            known.forget(error.packs)
        finally:
            with log_failures("removing what was encoded"):
                local.close()
            api_calls += rounds.api_calls
    with log_failures("noting what is stored"):
        known.learn(local.manifest)
    sizes = local.sizes
    return Committed(
        step=step,
        epoch=item.epoch,
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
        self.upload_s = 0.0
        self.asked: set[str] = set()

    def run(self) -> None:
        """Raises CommitFailed when rounds stop bringing the commit any further, _PacksGone."""
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
        except (NotStoredYet, Conflict) as error:
            if isinstance(error, Conflict) and error.code != ErrorCode.CONFLICT:
                raise
            self._no_nearer(error.message)
            return error.message
        if answer.committed:
            return None
        if not answer.missing:
            raise UnexpectedAnswer("commit: neither committed nor is anything missing")
        uploads = self._uploads(answer)
        asked = {blob.blake3 for blob in answer.missing}
        if asked - self.asked:
            self._fruitless = 0
        elif len(asked) >= self._last_asked:
            self._no_nearer(reason)
        self._last_asked = len(asked)
        self.asked |= asked
        started = time.monotonic()
        try:
            self._transfer.upload(uploads, cancel=self._cancel, progress=self._progress)
        except UrlExpired as error:
            return str(error)
        finally:
            self.upload_s += time.monotonic() - started
        return "uploaded packs are still said to be missing"

    def _no_nearer(self, reason: str) -> None:
        """A round in vain: nothing new was asked for, and no less than before."""
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
            raise UnexpectedAnswer(f"commit: pack {unknown[0]} is asked for, which the manifest does not name")
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
