"""Upload files in rounds: request URLs of missing files, send these files, and repeat until all files are stored.

A small file is one PUT. A large file consists of parts, several sent at once; the next request for its URLs lets the
control plane join the stored parts to an object. No round sends stored bytes again, including bytes of an earlier
process, therefore a process resumes the upload of a killed process.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from baton.contract.objects.parts import part_range
from gpu_client.transport.errors import TransferError, UnexpectedAnswer, UrlExpired
from gpu_client.transport.limits.bandwidth import Traffic
from gpu_client.transport.limits.transfer_channel import Progress
from gpu_client.transport.net.cancellation import CancelEvent
from gpu_client.transport.net.digests import FileDigest
from gpu_client.transport.transfer.manager import Transfer
from gpu_client.transport.transfer.transfer_requests import Segment, Upload

logger = logging.getLogger(__name__)

MAX_FRUITLESS_ROUNDS = 4
"""Consecutive rounds without progress after which the upload fails."""

_PAUSE_S = 1.0


@dataclass(frozen=True)
class LocalFile:
    """File to store, which must not change during the upload."""

    path: Path
    digest: FileDigest


@dataclass(frozen=True, kw_only=True)
class Target:
    """URL for the file `name`, or for the file's part `part`."""

    name: str
    url: str
    headers: Mapping[str, str]
    part: int | None


@dataclass(frozen=True)
class Missing:
    """Targets of the objects that the store lacks. `pending`: files in parts, which need a further round."""

    targets: Sequence[Target]
    pending: AbstractSet[str]


Ask = Callable[[Sequence[str]], Missing]
"""Function that requests from the control plane the missing files among the named files, with URLs."""


def upload_in_rounds(
    transfer: Transfer,
    files: Mapping[str, LocalFile],
    ask: Ask,
    *,
    traffic: Traffic,
    cancel: CancelEvent | None = None,
    progress: Progress | None = None,
) -> None:
    """Upload files until all are stored. `progress` counts every byte, including bytes stored earlier.

    Raises the errors of `ask` and the transfer; UrlExpired or TransferError after rounds without progress.
    """
    _Rounds(transfer, files, ask, traffic=traffic, cancel=cancel, progress=progress).run()


@dataclass(frozen=True)
class _Piece:
    """File, or part of a file."""

    name: str
    part: int | None


@dataclass
class _Rounds:
    transfer: Transfer
    files: Mapping[str, LocalFile]
    ask: Ask
    _: KW_ONLY
    traffic: Traffic
    cancel: CancelEvent | None
    progress: Progress | None
    stored: set[_Piece] = field(default_factory=set)
    """Pieces stored in the current round."""
    sent_bytes: Counter[str] = field(default_factory=Counter)
    """Number of sent bytes of each file."""

    def run(self) -> None:
        wanted = list(self.files)
        asked: frozenset[_Piece] = frozenset()
        expired: UrlExpired | None = None
        fruitless = 0
        while wanted:
            missing = self.ask(wanted)
            uploads = self._uploads(missing, wanted)
            left = frozenset(uploads) | {_Piece(name, None) for name in missing.pending}
            fruitless = fruitless + 1 if asked and asked <= left else 0
            if fruitless:
                self._give_up_after(fruitless, expired, wanted)
            asked = left
            self._finish(set(wanted) - {piece.name for piece in left})
            expired = self._send(uploads)
            unsent = {piece.name for piece in uploads if piece not in self.stored}
            wanted = [name for name in wanted if name in missing.pending or name in unsent]

    def _send(self, uploads: Mapping[_Piece, Upload]) -> UrlExpired | None:
        """Send one round. Returns UrlExpired if URLs expired, whose pieces the next round sends."""
        pieces = {id(upload): piece for piece, upload in uploads.items()}
        self.stored.clear()
        try:
            self.transfer.upload(
                list(uploads.values()),
                cancel=self.cancel,
                progress=self.progress,
                stored=lambda upload: self.stored.add(pieces[id(upload)]),
            )
        except UrlExpired as error:
            return error
        finally:
            for piece in self.stored:
                self.sent_bytes[piece.name] += uploads[piece].size_bytes
        return None

    def _finish(self, names: AbstractSet[str]) -> None:
        """Count files as stored, and the bytes sent by an earlier process as progress."""
        for name in names:
            size_bytes, sent_bytes = self.files[name].digest.size_bytes, self.sent_bytes[name]
            if self.progress is not None and size_bytes > sent_bytes:
                self.progress(size_bytes - sent_bytes)
            if sent_bytes:
                self.transfer.stats.add(uploaded_objects=1)

    def _give_up_after(self, fruitless: int, expired: UrlExpired | None, wanted: Sequence[str]) -> None:
        if fruitless > MAX_FRUITLESS_ROUNDS:
            raise expired or TransferError(f"{wanted[0]}: uploaded, but the control plane still reports it as missing")
        logger.info("%s: no progress in this round; asking for URLs again", wanted[0])
        self.transfer.wait(_PAUSE_S * fruitless, self.cancel)

    def _uploads(self, missing: Missing, wanted: Sequence[str]) -> dict[_Piece, Upload]:
        unknown = ({target.name for target in missing.targets} | missing.pending) - set(wanted)
        if unknown:
            raise UnexpectedAnswer(f"upload: {min(unknown)!r} is requested by the control plane, but was not declared")
        return {_Piece(target.name, target.part): self._upload(target) for target in missing.targets}

    def _upload(self, target: Target) -> Upload:
        file = self.files[target.name]
        if target.part is None:
            return Upload.of_file(
                name=target.name,
                path=file.path,
                size_bytes=file.digest.size_bytes,
                url=target.url,
                headers=target.headers,
                traffic=self.traffic,
            )
        parts = file.digest.parts
        if parts is None or not 1 <= target.part <= len(parts.crc64nvme):
            raise UnexpectedAnswer(
                f"upload: part {target.part} of {target.name!r} is requested by the control plane, but does not exist"
            )
        offset, size_bytes = part_range(file.digest.size_bytes, parts.part_bytes, target.part)
        return Upload(
            name=f"part {target.part} of {target.name}",
            segments=(Segment(file.path, offset, size_bytes),),
            size_bytes=size_bytes,
            url=target.url,
            headers=target.headers,
            traffic=self.traffic,
            file_bytes=file.digest.size_bytes,
            part=True,
        )
