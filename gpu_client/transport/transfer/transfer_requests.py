"""Define the requests of transfers: uploads, downloads to files, ranges to memory.

`name` is the object's name in messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpu_client.transport.limits.bandwidth import Traffic


@dataclass(frozen=True)
class Segment:
    """Range of a local file."""

    path: Path
    offset: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Upload:
    """PUT of joined segments. The signed `headers` are sent unchanged."""

    name: str
    segments: tuple[Segment, ...]
    size_bytes: int
    url: str
    headers: Mapping[str, str]
    traffic: Traffic = "checkpoint"
    file_bytes: int | None = None
    """Size of the segments' file, compared before sending, so that no grown file is sent."""
    part: bool = False
    """True for a part of a multipart upload, whose parts the control plane joins to an object."""

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
    """GET of an object to the file `path` below `root`, which appears after the check of given sizes and digests.

    `fsync=False` suits directories that do not survive a crash of the machine.
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
    """GET of a range of an object of `object_bytes` to memory. `headers`: headers besides Range, such as a token.

    A worker thread calls `begin`, then `deliver` with the bytes in order, `piece_bytes` at a time (None: all at once);
    each piece is valid until `deliver` returns. After the first ChecksumMismatch of `deliver` the transfer fetches the
    range again from its first byte; a second mismatch, and every other exception, ends the batch. `deliver` must not
    raise OSError, which the transfer would treat as a failure of the connection.
    """

    name: str
    url: str
    offset: int
    size_bytes: int
    object_bytes: int
    deliver: Callable[[memoryview], None]
    piece_bytes: int | None = None
    begin: Callable[[], None] = _nothing
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.offset < 0 or self.size_bytes < 1 or self.offset + self.size_bytes > self.object_bytes:
            raise ValueError(f"{self.name}: not a range of an object of {self.object_bytes} bytes")
