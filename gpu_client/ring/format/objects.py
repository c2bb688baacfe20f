"""Encode and decode stored objects: a header that describes the samples, then their arrays, aligned to cache lines.

    offset  bytes
    0       8      b"BATON\\0RG"
    8       4      version of the format: 1
    12      4      length of the header
    16      8      xxh3-64 of the header
    24      8      length of the object
    32             the header: JSON, then zeros up to the next multiple of 64
                   arrays, zeros between them up to the next multiple of 64

All numbers are little-endian. An object contains one sample, or several small samples (a pack). The header's digest, an
array's digest, or a required zero covers every bit.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import xxhash

from gpu_client.ring.errors import ObjectDamaged
from gpu_client.ring.format.codecs import decode_array_bytes, encode_array
from gpu_client.ring.format.sample_tree import ALIGNED, FlattenedSample, decode_array, find_path, make_schema, unflatten
from gpu_client.ring.settings import Codec

MAGIC = b"BATON\x00RG"
VERSION = 1
_PREFIX = struct.Struct("<8sIIQQ")
_MAX_HEADER_BYTES = 64 * 1024 * 1024
_DIGEST, _NO_DIGEST = 7, "?" * 16
"""Index of the digest in an array's entry, and its placeholder."""
_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
"""Shared encoder, because `json.dumps` makes an encoder for each call, as slow as encoding a small header.

This module makes the headers, which contain no cycles; the check for cycles would take a sixth of the time.
"""
_PART_BYTES = 2 * 1024 * 1024
"""Bytes of one write, hashed afterwards from the processor's cache; also one mapped page of the page cache."""
_LARGE_BYTES = 1024 * 1024
"""Array size in bytes below which arrays are hashed before the write and written several at a time."""


class Provenance(NamedTuple):
    """Origin of an object's samples, sufficient to make the samples again."""

    writer: str
    epoch: int
    seq: int
    made_at: float
    """Unix time, by the writer's clock."""
    generator: str = ""
    version: str = ""


class EncodedObject(Sequence[memoryview]):
    """Encoded object: the header, then arrays and gaps.

    The header contains the digests of the arrays. A store that can write the header last hashes each array during its
    write, and reads the bytes from memory once.
    """

    def __init__(self, header: dict[str, Any], body: list[memoryview], undigested: dict[int, list[Any]]) -> None:
        """`undigested`: header entries without a digest, by the index of their bytes in the body."""
        self._header, self._body, self._undigested = header, body, undigested
        self._body_bytes = sum(map(len, body))
        self._head = self._head_now()

    @property
    def size_bytes(self) -> int:
        """Size of the object."""
        return len(self._head) + self._body_bytes

    @property
    def head_is_known(self) -> bool:
        """Return True if all digests are known, which permits writing the pieces in order."""
        return not self._undigested

    @property
    def head_bytes(self) -> int:
        """Return the size of the header in bytes."""
        return len(self._head)

    def behind_head(self) -> Iterator[list[memoryview]]:
        """Yield the body, a few pieces at a time, and hash each piece after the caller's write. Repeatable."""
        end = len(self._head)
        waiting: list[memoryview] = []
        for place, piece in enumerate(self._body):
            entry = self._undigested.get(place)
            if entry is None:
                waiting.append(piece)
                end += len(piece)
                continue
            digest, begin = xxhash.xxh3_64(), 0
            while begin < len(piece):
                # Parts end at multiples of their length in the file; other parts take the kernel a tenth longer.
                part = piece[begin : begin + _PART_BYTES - end % _PART_BYTES]
                yield [*waiting, part]
                digest.update(part)
                waiting = []
                begin, end = begin + len(part), end + len(part)
            entry[_DIGEST] = digest.hexdigest()
        yield waiting
        if self._undigested:
            self._undigested = {}
            self._head = self._head_now()

    def head(self) -> memoryview:
        """Return the header, after hashing the body if digests are missing."""
        if self._undigested:
            for _ in self.behind_head():
                pass
        return self._head

    def __len__(self) -> int:
        return 1 + len(self._body)

    def __getitem__(self, at: Any) -> Any:
        return [self.head(), *self._body][at]

    def __iter__(self) -> Iterator[memoryview]:
        return iter([self.head(), *self._body])

    def _head_now(self) -> memoryview:
        """Encode the header in its final length, with placeholders for missing digests."""
        header = _json(self._header).encode()
        end = _PREFIX.size + len(header)
        gap = -end % ALIGNED
        digest = xxhash.xxh3_64_intdigest(header)
        return memoryview(
            _PREFIX.pack(MAGIC, VERSION, len(header), digest, end + gap + self._body_bytes) + header + bytes(gap)
        )


def encode(
    samples: Sequence[FlattenedSample],
    provenance: Provenance,
    *,
    seeds: Sequence[object] = (),
    codec: Codec = "none",
    quantised: dict[str, Codec] | None = None,
) -> EncodedObject:
    """Encode samples into an object. `seeds`: one JSON value for each sample. `quantised`: lossy codecs by path."""
    body: list[memoryview] = []
    undigested: dict[int, list[Any]] = {}
    entries: list[dict[str, Any]] = []
    offset = 0
    for number, sample in enumerate(samples):
        arrays = []
        for leaf in sample.leaves:
            stored = encode_array(leaf, (quantised or {}).get(leaf.path, codec))
            digest = (stored.data is leaf.data and leaf.digest) or _NO_DIGEST
            entry = [leaf.form, leaf.dtype, leaf.shape, len(leaf.data), stored.codec, offset, len(stored.data), digest]
            if digest == _NO_DIGEST and len(stored.data) >= _LARGE_BYTES:
                undigested[len(body)] = entry
            elif digest == _NO_DIGEST:
                entry[_DIGEST] = xxhash.xxh3_64_hexdigest(stored.data)
            if stored.scale:
                entry.append(stored.scale)
            arrays.append(entry)
            gap = -len(stored.data) % ALIGNED
            body += [stored.data, memoryview(bytes(gap))] if gap else [stored.data]
            offset += len(stored.data) + gap
        seed = seeds[number] if number < len(seeds) else None
        entries.append({"structure": sample.structure, "arrays": arrays, "seed": seed})
    return EncodedObject({**provenance._asdict(), "samples": entries}, body, undigested)


class StoredSamples:
    """Opened object. The first access to a sample verifies the sample."""

    def __init__(self, name: str, data: memoryview) -> None:
        """`name`: name of the object in messages. Raises ObjectDamaged for a damaged header."""
        self.name = name
        self._data = data
        self._verified: set[int] = set()
        header = self._header()
        try:
            self.provenance = Provenance(**{key: value for key, value in header.items() if key != "samples"})
            self._samples: list[dict[str, Any]] = header["samples"]
        except (TypeError, KeyError) as error:
            raise self._damaged(f"the header lacks a field ({error})") from error

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def size_bytes(self) -> int:
        """Size of the object."""
        return len(self._data)

    def seed(self, number: int = 0) -> Any:
        """Return the seed of a sample."""
        return self._samples[number]["seed"]

    def sample(self, number: int = 0) -> Any:
        """Decode a sample; its arrays share the memory of the object. Raises ObjectDamaged."""
        entry = self._samples[number]
        first_time = number not in self._verified
        try:
            arrays = [self._array(number, place, first_time) for place in range(len(entry["arrays"]))]
            found = unflatten(entry["structure"], arrays)
        except ObjectDamaged:
            raise
        except Exception as error:  # A codec's library may raise any error.
            raise self._damaged(f"sample {number} cannot be read ({error})") from error
        self._verified.add(number)
        return found

    def schema(self, number: int = 0, *, shapes: bool) -> str:
        """Make the schema of a sample."""
        entry = self._samples[number]
        arrays = [(form, dtype, shape) for form, dtype, shape, *_ in entry["arrays"]]
        return make_schema(entry["structure"], arrays, shapes=shapes)

    def verify(self) -> None:
        """Verify all samples. Raises ObjectDamaged."""
        for number in range(len(self)):
            self.sample(number)

    def _header(self) -> dict[str, Any]:
        data = self._data
        if len(data) < _PREFIX.size:
            raise self._damaged(f"the object ends after {len(data)} bytes")
        magic, version, header_bytes, digest, size_bytes = _PREFIX.unpack_from(data)
        if magic != MAGIC:
            raise self._damaged("not an object of a ring")
        if version != VERSION:
            raise self._damaged(f"unknown format version {version}; known is {VERSION}")
        if size_bytes != len(data) or header_bytes > min(_MAX_HEADER_BYTES, len(data) - _PREFIX.size):
            raise self._damaged(f"the object has {len(data)} bytes instead of {size_bytes}")
        header = bytes(data[_PREFIX.size : _PREFIX.size + header_bytes])
        if xxhash.xxh3_64_intdigest(header) != digest:
            raise self._damaged("the header was altered")
        end = _PREFIX.size + header_bytes
        self._body = end + -end % ALIGNED
        if any(data[end : self._body]):
            raise self._damaged("the gap behind the header is not zero")
        found = json.loads(header)
        if not isinstance(found, dict):
            raise self._damaged("the header is not a JSON object")
        return found

    def _array(self, number: int, place: int, first_time: bool) -> Any:
        entry = self._samples[number]["arrays"][place]
        form, dtype, shape, size_bytes, codec, offset, stored_bytes, digest = entry[:8]
        begin = self._body + offset
        end = begin + stored_bytes
        stored = self._data[begin:end]
        if first_time:
            behind = self._data[end : end + -stored_bytes % ALIGNED]
            if len(stored) != stored_bytes or any(behind) or xxhash.xxh3_64_hexdigest(stored) != digest:
                path = find_path(self._samples[number]["structure"], place)
                path += f", number {number} of a pack" if len(self) > 1 else ""
                raise self._damaged(f"the bytes from {begin} to {end} were altered ({path})")
        return decode_array(
            form, dtype, shape, decode_array_bytes(codec, stored, dtype, size_bytes, (entry[8:] or [None])[0])
        )

    def _damaged(self, how: str) -> ObjectDamaged:
        return ObjectDamaged(
            f"{self.name} is damaged: {how}", "Readers exclude the object; its generator makes other samples"
        )
