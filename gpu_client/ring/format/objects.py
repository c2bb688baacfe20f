"""The bytes of stored samples: a header that says everything, and the arrays behind it, each where a cache line begins.

    offset  bytes
    0       8      b"BATON\\0RG"
    8       4      version of the format: 1
    12      4      length of the header
    16      8      xxh3-64 of the header
    24      8      length of the object
    32             the header: JSON (`Header`), then zeros up to the next multiple of 64
                   arrays, zeros between them up to the next multiple of 64

All numbers are little-endian. An object has one sample, or several small ones (a pack). Every bit is covered: by the
header's digest, by an array's own, or by being zero.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import xxhash

from gpu_client.ring.errors import ObjectDamaged
from gpu_client.ring.format.codecs import decoded, encoded
from gpu_client.ring.format.sample_tree import ALIGNED, Taken, array_of, path_of, put_together, schema_of
from gpu_client.ring.settings import Codec

MAGIC = b"BATON\x00RG"
VERSION = 1
_PREFIX = struct.Struct("<8sIIQQ")
_MAX_HEADER_BYTES = 64 * 1024 * 1024
_DIGEST, _NO_DIGEST = 7, "?" * 16
"""Its place in an array's entry, and what is there before it is known."""
_json = json.JSONEncoder(separators=(",", ":")).encode
"""Made once: `json.dumps` makes an encoder for each call, which takes as long as a small header."""
_PART_BYTES = 2 * 1024 * 1024
"""Written at a time, then hashed from the processor's cache. So much lies together in the page cache, too, and is
mapped as one page when it is read."""
_LARGE_BYTES = 1024 * 1024
"""Smaller arrays are hashed before, and written several at a time."""


class Provenance(NamedTuple):
    """Who made the samples of an object, and from what: enough to make one again."""

    writer: str
    epoch: int
    seq: int
    made_at: float
    """Unix time, by the writer's clock."""
    generator: str = ""
    version: str = ""


class Encoded(Sequence[memoryview]):
    """An object ready to be stored: the header with what is before it, then arrays, and gaps between them."""

    def __init__(self, header: dict[str, Any], body: list[memoryview], undigested: dict[int, list[Any]]) -> None:
        """`undigested`: entries of the header that have no digest yet, by where their bytes are in the body."""
        self._header, self._body, self._undigested = header, body, undigested
        self._body_bytes = sum(map(len, body))
        self._head = self._head_now()

    @property
    def size_bytes(self) -> int:
        """Of the whole object."""
        return len(self._head) + self._body_bytes

    @property
    def head_is_known(self) -> bool:
        """As in the protocol."""
        return not self._undigested

    @property
    def head_bytes(self) -> int:
        """As in the protocol."""
        return len(self._head)

    def behind_head(self) -> Iterator[list[memoryview]]:
        """As in the protocol: an array is hashed part by part, each while it is in the cache."""
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
                # To where a multiple of the length is in the file: other parts take the kernel a tenth longer.
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
        """As in the protocol."""
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
        """As long as it is going to be, even where digests are missing."""
        header = _json(self._header).encode()
        end = _PREFIX.size + len(header)
        gap = -end % ALIGNED
        digest = xxhash.xxh3_64_intdigest(header)
        return memoryview(
            _PREFIX.pack(MAGIC, VERSION, len(header), digest, end + gap + self._body_bytes) + header + bytes(gap)
        )


def encode(
    samples: Sequence[Taken],
    provenance: Provenance,
    *,
    seeds: Sequence[object] = (),
    codec: Codec = "none",
    quantised: dict[str, Codec] | None = None,
) -> Encoded:
    """`seeds`: one for each sample, as JSON has them. `quantised`: a lossy codec for the arrays of some paths."""
    body: list[memoryview] = []
    undigested: dict[int, list[Any]] = {}
    entries: list[dict[str, Any]] = []
    offset = 0
    for number, sample in enumerate(samples):
        arrays = []
        for leaf in sample.leaves:
            stored = encoded(leaf, (quantised or {}).get(leaf.path, codec))
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
    return Encoded({**provenance._asdict(), "samples": entries}, body, undigested)


class StoredSamples:
    """An object as it was read. Each sample is verified when it is taken out for the first time."""

    def __init__(self, name: str, data: memoryview) -> None:
        """`name`: for messages. Raises ObjectDamaged where the header is not what was put."""
        self.name = name
        self._data = data
        self._verified: set[int] = set()
        header = self._header()
        try:
            self.provenance = Provenance(**{key: value for key, value in header.items() if key != "samples"})
            self._samples: list[dict[str, Any]] = header["samples"]
        except (TypeError, KeyError) as error:
            raise self._damaged(f"its header lacks something ({error})") from error

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def size_bytes(self) -> int:
        """Of the whole object."""
        return len(self._data)

    def seed(self, number: int = 0) -> Any:
        """What the generator made that sample from."""
        return self._samples[number]["seed"]

    def sample(self, number: int = 0) -> Any:
        """One sample; arrays lie in the object's own memory. Raises ObjectDamaged."""
        entry = self._samples[number]
        first_time = number not in self._verified
        try:
            arrays = [self._array(number, place, first_time) for place in range(len(entry["arrays"]))]
            found = put_together(entry["structure"], arrays)
        except ObjectDamaged:
            raise
        except Exception as error:  # a codec's library raises whatever it likes
            raise self._damaged(f"sample {number} cannot be read ({error})") from error
        self._verified.add(number)
        return found

    def schema(self, number: int = 0, *, shapes: bool) -> str:
        """As that sample had it when it was put."""
        entry = self._samples[number]
        arrays = [(form, dtype, shape) for form, dtype, shape, *_ in entry["arrays"]]
        return schema_of(entry["structure"], arrays, shapes=shapes)

    def verify(self) -> None:
        """Read everything. Raises ObjectDamaged."""
        for number in range(len(self)):
            self.sample(number)

    def _header(self) -> dict[str, Any]:
        data = self._data
        if len(data) < _PREFIX.size:
            raise self._damaged(f"it ends after {len(data)} bytes")
        magic, version, header_bytes, digest, size_bytes = _PREFIX.unpack_from(data)
        if magic != MAGIC:
            raise self._damaged("it is no object of a ring")
        if version != VERSION:
            raise self._damaged(f"it has version {version} of the format, and only {VERSION} is known")
        if size_bytes != len(data) or header_bytes > min(_MAX_HEADER_BYTES, len(data) - _PREFIX.size):
            raise self._damaged(f"it has {len(data)} bytes instead of {size_bytes}")
        header = bytes(data[_PREFIX.size : _PREFIX.size + header_bytes])
        if xxhash.xxh3_64_intdigest(header) != digest:
            raise self._damaged("its header was altered")
        end = _PREFIX.size + header_bytes
        self._body = end + -end % ALIGNED
        if any(data[end : self._body]):
            raise self._damaged("there is something behind its header")
        found = json.loads(header)
        if not isinstance(found, dict):
            raise self._damaged("its header is none")
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
                whose = path_of(self._samples[number]["structure"], place)
                whose += f", number {number} of a pack" if len(self) > 1 else ""
                raise self._damaged(f"the bytes from {begin} to {end} were altered ({whose})")
        return array_of(form, dtype, shape, decoded(codec, stored, dtype, size_bytes, (entry[8:] or [None])[0]))

    def _damaged(self, how: str) -> ObjectDamaged:
        return ObjectDamaged(f"{self.name} is damaged: {how}", "It is left out; its generator makes another one")
