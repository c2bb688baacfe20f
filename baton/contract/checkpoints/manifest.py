"""Define the manifest: the list of a checkpoint's files, chunks and packs.

A file is a sequence of chunks. A chunk is named by the BLAKE3 of its bytes and stored, encoded or raw, in a pack. A
pack is one stored object, named by the BLAKE3 of its chunks' BLAKE3s. All checkpoints of a tenant may name the same
pack. docs/checkpoints.md specifies how to read and write a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from baton.contract.base import Blake3, Crc64, Epoch, JobId, Metrics, RelativePath, SizeBytes, Step, WireModel

CheckpointTag = Annotated[str, Field(max_length=64)]
"""The name under which a checkpoint is kept; empty for most checkpoints."""
MANIFEST_VERSION: Final = 2
"""The only version; readers refuse every other version."""
MAX_MANIFEST_FILES = 10_000
MAX_MANIFEST_CHUNKS = 30_000
"""Bound of one request to a Lambda function."""
MAX_MANIFEST_PACKS = 10_000
MAX_CHUNK_BYTES = 2**30
MAX_FILE_BYTES = 2**40

Codec = Literal["raw", "zeros", "planes", "delta"]
"""The encoding of a chunk's stored bytes.

`raw`: the bytes themselves. `zeros`: no bytes, because all are zero. `planes`: the first byte of every `width`-byte
element, then the second byte of each, ..., then the rest behind the last whole element, as one zstd frame. `delta`: XOR
with the bytes of the chunk `base`, which has the same size, then as `planes`.
"""


class Pack(WireModel):
    """Stored object that holds chunks.

    Example: `{"blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262", "size_bytes": 1024,
    "crc64nvme": "UvieJR3alJI="}`
    """

    blake3: Blake3
    size_bytes: SizeBytes
    crc64nvme: Crc64


class Chunk(WireModel):
    """Some bytes of one or more files, and where they are stored.

    Example: `{"blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262", "size_bytes": 1024,
    "pack": 0, "offset": 0, "length_bytes": 700, "codec": "planes", "width": 2}`
    """

    blake3: Blake3
    """BLAKE3 of the decoded bytes."""
    size_bytes: Annotated[int, Field(ge=1, le=MAX_CHUNK_BYTES)]
    """Bytes after decoding."""
    pack: Annotated[int, Field(ge=0, lt=MAX_MANIFEST_PACKS)] | None = None
    """Index in the manifest's `packs`; None for `zeros` only."""
    offset: SizeBytes = 0
    """Offset in the pack."""
    length_bytes: Annotated[int, Field(ge=1, le=MAX_CHUNK_BYTES)] | None = None
    """Stored bytes; None if equal to `size_bytes`, as for `raw`."""
    codec: Codec = "raw"
    width: Literal[1, 2, 4, 8] = 1
    """Bytes of an element, for `planes` and `delta`."""
    base: Annotated[int, Field(ge=0, lt=MAX_MANIFEST_CHUNKS)] | None = None
    """For `delta`: index of the base in the manifest's `chunks`. The base is no `delta`."""

    @property
    def stored_bytes(self) -> int:
        """Return the bytes that the chunk takes in its pack."""
        if self.codec == "zeros":
            return 0
        return self.size_bytes if self.length_bytes is None else self.length_bytes

    @model_validator(mode="after")
    def _fits_its_codec(self) -> Self:
        if (self.codec == "zeros") != (self.pack is None):
            raise ValueError("a chunk has a 'pack' unless its codec is 'zeros'")
        if self.codec == "raw" and self.length_bytes not in (None, self.size_bytes):
            raise ValueError("a 'raw' chunk has a 'length_bytes' other than its 'size_bytes'")
        if (self.codec == "delta") != (self.base is not None):
            raise ValueError("a 'delta' chunk, and no other, has a 'base'")
        return self


class ChunkedFile(WireModel):
    """File of a checkpoint: its chunks in order. An empty file has none.

    Example: `{"path": "model.safetensors", "size_bytes": 1024, "chunks": [0]}`
    """

    path: RelativePath
    size_bytes: Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)]
    chunks: Annotated[
        list[Annotated[int, Field(ge=0, lt=MAX_MANIFEST_CHUNKS)]], Field(max_length=MAX_MANIFEST_CHUNKS * 10)
    ]
    """Indices in the manifest's `chunks`; an index may repeat."""


class Manifest(WireModel):
    """Content of a checkpoint; never changes.

    Example: `{"version": 2, "job_id": "146683a1-cb76-4702-9fef-fcccd32594f1", "step": 100, "epoch": 2,
    "packs": [{"blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262", "size_bytes": 1024,
    "crc64nvme": "UvieJR3alJI="}], "chunks": [{"blake3":
    "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262", "size_bytes": 1024, "pack": 0}],
    "files": [{"path": "model.safetensors", "size_bytes": 1024, "chunks": [0]}], "metrics": {"loss": 0.4},
    "created_by": "session"}`
    """

    version: Literal[2]
    job_id: JobId
    step: Step
    epoch: Epoch
    packs: Annotated[list[Pack], Field(max_length=MAX_MANIFEST_PACKS)]
    chunks: Annotated[list[Chunk], Field(max_length=MAX_MANIFEST_CHUNKS)]
    files: Annotated[list[ChunkedFile], Field(min_length=1, max_length=MAX_MANIFEST_FILES)]
    metrics: Metrics = {}
    created_by: Literal["session", "script"] = "session"
    tag: CheckpointTag = ""
    """The name under which a rule or command keeps the checkpoint; the newest one of each tag stays."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _require_separate_paths([file.path for file in self.files])
        if len({pack.blake3 for pack in self.packs}) != len(self.packs):
            raise ValueError("'packs' names a pack twice")
        if len({chunk.blake3 for chunk in self.chunks}) != len(self.chunks):
            raise ValueError("'chunks' names a chunk twice")
        for chunk in self.chunks:
            self._require_stored(chunk)
        for file in self.files:
            if any(index >= len(self.chunks) for index in file.chunks):
                raise ValueError(f"{file.path[:80]!r} names a chunk that is not in 'chunks'")
            if sum(self.chunks[index].size_bytes for index in file.chunks) != file.size_bytes:
                raise ValueError(f"the chunks of {file.path[:80]!r} do not add up to its {file.size_bytes} bytes")
        used = {index for file in self.files for index in file.chunks}
        used |= {base for index in used if (base := self.chunks[index].base) is not None}
        if len(used) != len(self.chunks):
            raise ValueError("'chunks' has a chunk that no file uses")
        if len({chunk.pack for chunk in self.chunks} - {None}) != len(self.packs):
            raise ValueError("'packs' has a pack without chunks")
        return self

    def _require_stored(self, chunk: Chunk) -> None:
        if chunk.pack is not None:
            if chunk.pack >= len(self.packs):
                raise ValueError(f"chunk {chunk.blake3} lies in a pack that is not in 'packs'")
            if chunk.offset + chunk.stored_bytes > self.packs[chunk.pack].size_bytes:
                raise ValueError(f"chunk {chunk.blake3} ends behind the end of its pack")
        if chunk.base is not None:
            if chunk.base >= len(self.chunks):
                raise ValueError(f"the base of chunk {chunk.blake3} is not in 'chunks'")
            base = self.chunks[chunk.base]
            if base.codec == "delta" or base.size_bytes != chunk.size_bytes:
                raise ValueError(f"the base of chunk {chunk.blake3} is a delta or has another size")

    def canonical_bytes(self) -> bytes:
        """Return the stored bytes, whose BLAKE3 names the manifest: compact JSON without defaults."""
        ordered = self.model_copy(update={"metrics": dict(sorted(self.metrics.items()))})
        return ordered.model_dump_json(exclude_defaults=True).encode()

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all files, each path counted."""
        return sum(file.size_bytes for file in self.files)


def parse_manifest(data: bytes) -> Manifest:
    """Parse the JSON of a stored manifest. Raises pydantic's ValidationError."""
    return Manifest.model_validate_json(data)


def _require_separate_paths(paths: Iterable[str]) -> None:
    """Raise ValueError if a path repeats or is a directory of another path."""
    listed = list(paths)
    unique = set(listed)
    if len(unique) != len(listed):
        raise ValueError("'files' names a path twice")
    for path in unique:
        parts = path.split("/")
        for end in range(1, len(parts)):
            if "/".join(parts[:end]) in unique:
                raise ValueError(f"{path[:80]!r} lies below another file of the checkpoint")
