"""Cut a file into spans at the borders of its tensors, so that unchanged tensors give unchanged chunks.

The cut is a pure function of the file. A header counts only if its entries fit the file. Other files are cut into
blocks of equal size, which deduplicate less.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from baton.contract.checkpoints.manifest import MAX_CHUNK_BYTES

MIN_SPAN_BYTES = 64 * 1024
"""Minimum span in bytes; smaller spans are joined with their small neighbors."""
MAX_SPAN_BYTES = 8 * 1024 * 1024
MAX_SPANS_PER_FILE = 8192
"""Maximum number of spans; a file with more spans is cut more coarsely."""
MAX_COARSENESS = 10

_BLOCKS_PER_FILE = 256
_MAX_HEADER_BYTES = 32 * 1024 * 1024
_MAX_RECORDS = 100_000

Width = Literal[1, 2, 4, 8]

_WIDTHS: dict[str, Width] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4, "C64": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
"""Bytes of an element by safetensors dtype. A complex number counts as two elements."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of a file's bytes. `width`: bytes of an element, if the file declares them."""

    offset: int
    size_bytes: int
    width: Width | None = None

    @property
    def end(self) -> int:
        """Return the offset of the first byte behind the span."""
        return self.offset + self.size_bytes


class _UnreadableFormat(Exception):  # noqa: N818 - caught here: the file is cut into blocks
    """Error of a file that does not follow the format that its first bytes declare."""


def cut_spans(path: Path, size_bytes: int, *, coarseness: int = 0) -> list[Span]:
    """Cut a file of `size_bytes` into spans that cover the file exactly, in order; [] for an empty file.

    Each step of `coarseness` doubles the smallest and the largest size. Raises OSError.
    """
    if size_bytes <= MIN_SPAN_BYTES:
        return [Span(0, size_bytes)] if size_bytes else []
    parts = _parts(path, size_bytes)
    if parts is None:
        parts, largest_bytes = [Span(0, size_bytes)], _block_bytes(size_bytes)
    else:
        largest_bytes = MAX_SPAN_BYTES
    while True:
        spans = list(_group(parts, MIN_SPAN_BYTES << coarseness, min(largest_bytes << coarseness, MAX_CHUNK_BYTES)))
        if len(spans) <= MAX_SPANS_PER_FILE or coarseness >= MAX_COARSENESS:
            return spans
        coarseness += 1


def _parts(path: Path, size_bytes: int) -> list[Span] | None:
    """Return the parts that the file declares, of any size; None without valid parts."""
    with path.open("rb") as file:
        first = file.read(9)
        try:
            if first[:4] == b"PK\x03\x04":
                return _fill(_records(file, size_bytes), size_bytes)
            if first[8:] == b"{":
                return _fill(_tensors(file, int.from_bytes(first[:8], "little"), size_bytes), size_bytes)
        except _UnreadableFormat:
            return None
    return None


def _block_bytes(size_bytes: int) -> int:
    """Return a block size for a file without parts: a power of two, so that a growing file seldom changes the size."""
    block_bytes = MIN_SPAN_BYTES
    while block_bytes * _BLOCKS_PER_FILE < size_bytes and block_bytes < MAX_SPAN_BYTES:
        block_bytes *= 2
    return block_bytes


def _fill(parts: Iterable[Span], size_bytes: int) -> list[Span]:
    """Sort the parts and fill the gaps between them. Raises _UnreadableFormat if parts overlap."""
    filled: list[Span] = []
    end = 0
    for part in sorted(parts, key=lambda part: (part.offset, part.size_bytes)):
        if part.size_bytes == 0:
            continue
        if part.offset < end or part.end > size_bytes:
            raise _UnreadableFormat
        if part.offset > end:
            filled.append(Span(end, part.offset - end))
        filled.append(part)
        end = part.end
    if not filled:
        raise _UnreadableFormat
    if end < size_bytes:
        filled.append(Span(end, size_bytes - end))
    return filled


def _tensors(file: BinaryIO, header_bytes: int, size_bytes: int) -> list[Span]:
    """Return the tensors of a safetensors file: eight bytes of header length, a JSON header, the tensors."""
    start = 8 + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or start > size_bytes:
        raise _UnreadableFormat
    file.seek(8)
    try:
        header = json.loads(file.read(header_bytes))
    except (ValueError, RecursionError) as error:
        raise _UnreadableFormat from error
    if not isinstance(header, dict):
        raise _UnreadableFormat
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        match entry:
            case {"dtype": str(dtype), "data_offsets": [int(begin), int(end)]} if 0 <= begin <= end:
                tensors.append(Span(start + begin, end - begin, _WIDTHS.get(dtype)))
            case _:
                raise _UnreadableFormat
    return tensors


def _records(file: BinaryIO, size_bytes: int) -> list[Span]:
    """Return the members of a zip file, as `torch.save` writes them."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        # zipfile raises NotImplementedError for an unknown zip version, ValueError for a name that is not UTF-8 or an
        # impossible offset. OSErrors of the disk propagate, because a failing disk says nothing about the format.
        raise _UnreadableFormat from error
    if len(members) > _MAX_RECORDS:
        raise _UnreadableFormat
    records = []
    for member in members:
        if not 0 <= member.header_offset < size_bytes:
            raise _UnreadableFormat
        local = os.pread(file.fileno(), 30, member.header_offset)
        if local[:4] != b"PK\x03\x04" or len(local) < 30:
            raise _UnreadableFormat
        # Read the lengths of the local header, because the central directory does not contain its padding.
        name_bytes, extra_bytes = struct.unpack("<HH", local[26:30])
        records.append(Span(member.header_offset + 30 + name_bytes + extra_bytes, member.compress_size))
    return records


def _group(parts: Iterable[Span], smallest_bytes: int, largest_bytes: int) -> Iterator[Span]:
    """Cut large parts to size and join runs of small parts; a small part never joins a large part."""
    group: Span | None = None
    for part in parts:
        if part.size_bytes >= smallest_bytes:
            if group is not None:
                yield group
                group = None
            for offset in range(part.offset, part.end, largest_bytes):
                yield Span(offset, min(largest_bytes, part.end - offset), part.width)
            continue
        if group is None:
            group = part
        else:
            width = group.width if group.width == part.width else None
            group = Span(group.offset, group.size_bytes + part.size_bytes, width)
        if group.size_bytes >= smallest_bytes:
            yield group
            group = None
    if group is not None:
        yield group
