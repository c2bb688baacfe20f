"""Requests of transfers: uploads, downloads to files, ranges to memory. `name` is the object's name in messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu_client.transport.limits.bandwidth import Traffic


@dataclass(frozen=True)
class Segment:
    """A range of a local file."""

    path: Path
    offset: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Upload:
    """PUT of segments, one after the other. `headers` are signed, therefore they are sent exactly as given."""

    name: str
    segments: tuple[Segment, ...]
    size_bytes: int
    url: str
    headers: Mapping[str, str]
    traffic: Traffic = "checkpoint"
    file_bytes: int | None = None
    """Size of the segments' file, checked before sending, so that a file that has grown is not sent."""
    part: bool = False
    """True for one part of a multipart upload; the object exists after the control plane has joined its parts."""

    def __post_init__(self) -> None:
        if sum(segment.size_bytes for segment in self.segments) != self.size_bytes:
            raise ValueError(f"{self.name}: the segments have other than its {self.size_bytes} bytes")

    @classmethod
    def of_file(
        cls,
        *,
        name: str,
        path: Path,
        size_bytes: int,
        url: str,
        headers: Mapping[str, str],
        traffic: Traffic = "checkpoint",
    ) -> Upload:
        """Make the upload of a whole file."""
        segments = (Segment(path, 0, size_bytes),)
        return cls(
            name=name,
            segments=segments,
            size_bytes=size_bytes,
            url=url,
            headers=headers,
            traffic=traffic,
            file_bytes=size_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Download:
    """GET of an object into the file `path` below `root`. Given size and digests are verified before the file appears.

    `fsync=False` suits directories that a crash of the machine loses anyway.
    """

    name: str
    url: str
    root: Path
    path: str
    size_bytes: int | None = None
    blake3: str | None = None
    crc64nvme: str | None = None
    fsync: bool = True


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class RangeDownload:
    """A range of an object of `object_bytes`, to memory.

    `deliver` is called in a worker thread with the bytes in order, `piece_bytes` at a time (None: all at once); each
    piece is valid until `deliver` returns. `begin` is called before the first piece. If `deliver` raises
    ChecksumMismatch, the range is fetched once more from its first byte; a second one, and every other exception, ends
    the batch. `deliver` must not raise OSError, because the transfer would treat it as a failure of the connection.
    """

    name: str
    url: str
    offset: int
    size_bytes: int
    object_bytes: int
    deliver: Callable[[memoryview], None]
    piece_bytes: int | None = None
    begin: Callable[[], None] = _nothing

    def __post_init__(self) -> None:
        if self.offset < 0 or self.size_bytes < 1 or self.offset + self.size_bytes > self.object_bytes:
            raise ValueError(f"{self.name}: not a range of an object of {self.object_bytes} bytes")
