"""What is moved: uploads, downloads to files, ranges fetched into memory. Names stand for objects in messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu_client.transport.limits.bandwidth import Traffic


@dataclass(frozen=True)
class Segment:
    """A piece of a local file."""

    path: Path
    offset: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Upload:
    """One PUT of the segments, one behind the other. `headers` are signed: they are sent exactly as given."""

    name: str
    segments: tuple[Segment, ...]
    size_bytes: int
    url: str
    headers: Mapping[str, str]
    traffic: Traffic = "checkpoint"
    file_bytes: int | None = None
    """How many bytes the file has that the segments are of: one that has grown meanwhile is not sent."""
    part: bool = False
    """True if it is one part of an object, which is there when somebody puts its parts together."""

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
        """Of one whole file."""
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
    """One object to the file `path` below `root`. What is given of size and digests is verified before it appears.

    `fsync` can be left out where a crash of the machine loses the directory anyway.
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
    """Some bytes of an object of `object_bytes`, to memory.

    `deliver` is called in a worker thread with the bytes in order, `piece_bytes` at a time (None: all at once), which
    are valid until it returns; before the first of them `begin` is called. If `deliver` raises ChecksumMismatch, the
    bytes come once more from the first one on; what it raises then, or else, ends the batch. It raises no OSError:
    between pieces that would be taken for one of the connection.
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
