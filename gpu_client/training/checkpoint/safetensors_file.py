"""safetensors files: their layout from a set of tensors, written to disk or kept mapped and overwritten in place.

Large tensors come first, each at the beginning of a cache line (a copy to anywhere else takes a sixth longer); the
others are ordered by element size, large before small. So all are aligned, small ones that change do not cut large ones
that stay, and equal states make equal files.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the format can hold and its torch reader gives back."""

SMALL_BYTES = 64 * 1024
_CACHE_LINE_BYTES = 64


@dataclass(frozen=True)
class Contents:
    """What one file is to hold. metadata: texts for the file's header."""

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]

    def signature(self) -> tuple[object, ...]:
        """Equal for contents that have the same layout."""
        shapes = ((name, tensor.dtype, tensor.shape) for name, tensor in self.tensors.items())
        return (tuple(sorted(self.metadata.items())), *shapes)


@dataclass(frozen=True)
class Layout:
    """Where everything lies in the file. offsets are counted from the file's beginning, in the file's order."""

    header: bytes
    offsets: Mapping[str, int]
    size_bytes: int

    @classmethod
    def of(cls, contents: Contents) -> Layout:
        """The one layout for these contents."""

        def place(name: str) -> tuple[int, bool, str]:
            tensor = contents.tensors[name]
            small = tensor.nbytes < SMALL_BYTES
            whole_lines = not small and tensor.nbytes % _CACHE_LINE_BYTES == 0
            return -_CACHE_LINE_BYTES if whole_lines else -tensor.itemsize, small, name

        entries: dict[str, object] = {"__metadata__": {"format": "pt", **contents.metadata}}
        begins: dict[str, int] = {}
        end = 0
        for name in sorted(contents.tensors, key=place):
            tensor = contents.tensors[name]
            begins[name], end = end, end + tensor.nbytes
            entries[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begins[name], end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _CACHE_LINE_BYTES)
        header = len(text).to_bytes(8, "little") + text
        return cls(header, {name: len(header) + begin for name, begin in begins.items()}, len(header) + end)


def write(path: Path, contents: Contents) -> None:
    """Write the whole file. Needs no memory for tensors that lie on the CPU without gaps."""
    layout = Layout.of(contents)
    with path.open("wb") as stream:
        stream.write(layout.header)
        for name in layout.offsets:
            tensor = contents.tensors[name]
            if tensor.numel():
                plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
                # Not reshape: what has one element may have any stride and count as contiguous.
                flat = plain.as_strided((plain.numel(),), (1,))
                stream.write(flat.view(torch.uint8).numpy().data)


class MappedFile:
    """A safetensors file of one layout in shared memory, allocated once and mapped for as long as it is used.

    All of its pages are there from the beginning: copying into `targets` can neither fail nor kill the process for
    want of memory, and costs what copying into warm memory costs.
    """

    def __init__(self, path: Path, contents: Contents) -> None:
        """Make the file; raises OSError (ENOSPC) when there is no room, and leaves nothing behind then."""
        self.path = path
        self.signature = contents.signature()
        layout = Layout.of(contents)
        # Never in place: another process may still have the old one mapped.
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, layout.size_bytes)
            populate = getattr(mmap, "MAP_POPULATE", 0)
            self._memory = mmap.mmap(descriptor, layout.size_bytes, flags=mmap.MAP_SHARED | populate)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        self._memory[: len(layout.header)] = layout.header
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._pinned = False
        self.targets: dict[str, torch.Tensor] = {}
        """Where to copy each tensor; the empty ones need no place."""
        for name, offset in layout.offsets.items():
            tensor = contents.tensors[name]
            if tensor.numel():
                part = self._bytes[offset : offset + tensor.nbytes]
                self.targets[name] = part.view(tensor.dtype).view(tensor.shape)

    def pin(self) -> None:
        """Let GPUs copy into it at full speed. Where that is refused, they copy more slowly."""
        if self._pinned:
            return
        with contextlib.suppress(RuntimeError, AttributeError):
            answer = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), len(self._memory), 0)
            self._pinned = int(answer) == 0

    def remove(self) -> None:
        """Give the memory back. `targets` must not be used afterwards."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self.path.unlink(missing_ok=True)
        self.targets.clear()
        del self._bytes
        # Whoever still holds a target keeps the mapping: it goes with the last of them.
        with contextlib.suppress(BufferError):
            self._memory.close()
