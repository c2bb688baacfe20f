"""The manifest: the list of a checkpoint's files, chunks and packs.

A file is a sequence of chunks; a chunk is named by the BLAKE3 of its bytes, and lies, encoded or as it is, in a pack. A
pack is one stored object, named by the BLAKE3 of its chunks' BLAKE3s, and shared by all checkpoints of all jobs of a
tenant that name it. docs/checkpoints.md says how to read and write one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from baton.contract.base import Blake3, Crc64, Epoch, JobId, Metrics, RelativePath, SizeBytes, Step, WireModel

CheckpointTag = Annotated[str, Field(max_length=64)]
"""A name for a checkpoint that is worth keeping; empty for most."""
MANIFEST_VERSION: Final = 2
"""The one version that exists; every reader refuses another one."""
MAX_MANIFEST_FILES = 10_000
MAX_MANIFEST_CHUNKS = 30_000
"""As many as one request to a Lambda function can carry."""
MAX_MANIFEST_PACKS = 10_000
MAX_CHUNK_BYTES = 2**30
MAX_FILE_BYTES = 2**40

Codec = Literal["raw", "zeros", "planes", "delta"]
"""How a chunk's bytes are stored.

`raw`: as they are. `zeros`: not at all, for all of them are zero. `planes`: the first byte of every `width`-byte
element, then the second of each, ..., then what is left behind the last whole element; all of it one zstd frame.
`delta`: XOR with the bytes of the chunk `base`, which has as many, then as `planes`.
"""


class Pack(WireModel):
    """One stored object that holds chunks.

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
    """Of the decoded bytes."""
    size_bytes: Annotated[int, Field(ge=1, le=MAX_CHUNK_BYTES)]
    """Decoded."""
    pack: Annotated[int, Field(ge=0, lt=MAX_MANIFEST_PACKS)] | None = None
    """Index in the manifest's `packs`; None for `zeros` only."""
    offset: SizeBytes = 0
    """Where in the pack it begins."""
    length_bytes: Annotated[int, Field(ge=1, le=MAX_CHUNK_BYTES)] | None = None
    """Stored; None if that is `size_bytes`, as for `raw`."""
    codec: Codec = "raw"
    width: Literal[1, 2, 4, 8] = 1
    """Bytes of an element, for `planes` and `delta`."""
    base: Annotated[int, Field(ge=0, lt=MAX_MANIFEST_CHUNKS)] | None = None
    """For `delta`: index in the manifest's `chunks`. That chunk is no `delta` itself."""

    @property
    def stored_bytes(self) -> int:
        """Bytes in the pack."""
        if self.codec == "zeros":
            return 0
        return self.size_bytes if self.length_bytes is None else self.length_bytes

    @model_validator(mode="after")
    def _fits_its_codec(self) -> Self:
        if (self.codec == "zeros") != (self.pack is None):
            raise ValueError("a chunk has a 'pack' unless its codec is 'zeros'")
        if self.codec == "raw" and self.length_bytes not in (None, self.size_bytes):
            raise ValueError("a 'raw' chunk is stored with as many bytes as it has")
        if (self.codec == "delta") != (self.base is not None):
            raise ValueError("a 'delta' chunk, and no other, has a 'base'")
        return self


class ChunkedFile(WireModel):
    """One file of a checkpoint: its chunks one behind the other. An empty file has none.

    Example: `{"path": "model.safetensors", "size_bytes": 1024, "chunks": [0]}`
    """

    path: RelativePath
    size_bytes: Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)]
    chunks: Annotated[
        list[Annotated[int, Field(ge=0, lt=MAX_MANIFEST_CHUNKS)]], Field(max_length=MAX_MANIFEST_CHUNKS * 10)
    ]
    """Indices in the manifest's `chunks`; one may come several times."""


class Manifest(WireModel):
    """What a checkpoint consists of; never changes.

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
    """By which a rule or command wants it kept: of each tag the newest one stays."""

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
                raise ValueError(f"the chunks of {file.path[:80]!r} have other than its {file.size_bytes} bytes")
        used = {index for file in self.files for index in file.chunks}
        used |= {base for index in used if (base := self.chunks[index].base) is not None}
        if len(used) != len(self.chunks):
            raise ValueError("'chunks' has one that no file consists of")
        if len({chunk.pack for chunk in self.chunks} - {None}) != len(self.packs):
            raise ValueError("'packs' has one that no chunk lies in")
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
                raise ValueError(f"the base of chunk {chunk.blake3} is a delta itself, or has another size")

    def canonical_bytes(self) -> bytes:
        """The bytes that are stored, and whose BLAKE3 names the manifest: compact JSON without defaults."""
        ordered = self.model_copy(update={"metrics": dict(sorted(self.metrics.items()))})
        return ordered.model_dump_json(exclude_defaults=True).encode()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, each path counted."""
        return sum(file.size_bytes for file in self.files)


def parse_manifest(data: bytes) -> Manifest:
    """Parse the JSON of a stored manifest. Raises pydantic's ValidationError."""
    return Manifest.model_validate_json(data)


def _require_separate_paths(paths: Iterable[str]) -> None:
    """Each path once, and none both a file and a directory of another."""
    listed = list(paths)
    unique = set(listed)
    if len(unique) != len(listed):
        raise ValueError("'files' names a path twice")
    for path in unique:
        parts = path.split("/")
        for end in range(1, len(parts)):
            if "/".join(parts[:end]) in unique:
                raise ValueError(f"{path[:80]!r} lies below another file of the checkpoint")
