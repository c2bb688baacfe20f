"""Lay out tensors in safetensors files, write the files, or map and overwrite the files in place.

Large tensors come first, each at the beginning of a cache line (a copy to another place takes a sixth longer); small
tensors follow, ordered by element size. Therefore all tensors are aligned, small changing tensors do not split large
constant tensors into new chunks, and equal states make equal files.
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
"""Types that both the format and its torch reader support."""

SMALL_BYTES = 64 * 1024
_CACHE_LINE_BYTES = 64


@dataclass(frozen=True)
class FileContents:
    """Tensors and header texts of one file."""

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]

    def signature(self) -> tuple[object, ...]:
        """Return a key that is equal for contents with equal layouts."""
        shapes = ((name, tensor.dtype, tensor.shape) for name, tensor in self.tensors.items())
        return (tuple(sorted(self.metadata.items())), *shapes)


@dataclass(frozen=True)
class FileLayout:
    """Header, offsets (bytes from the file's beginning), and size of a file."""

    header: bytes
    offsets: Mapping[str, int]
    size_bytes: int

    @classmethod
    def of(cls, contents: FileContents) -> FileLayout:
        """Compute the layout of `contents`."""

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


def write(path: Path, contents: FileContents) -> None:
    """Write the whole file. Contiguous tensors on the CPU need no extra memory."""
    layout = FileLayout.of(contents)
    with path.open("wb") as stream:
        stream.write(layout.header)
        for name in layout.offsets:
            tensor = contents.tensors[name]
            if tensor.numel():
                plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
                # A tensor with one element counts as contiguous with any stride, therefore `reshape` would not do.
                flat = plain.as_strided((plain.numel(),), (1,))
                stream.write(flat.view(torch.uint8).numpy().data)


class MappedFile:
    """Safetensors file in shared memory with a fixed layout, allocated once and mapped during its use.

    All pages exist from the beginning, therefore a copy into `targets` cannot fail for lack of memory and has the speed
    of warm memory.
    """

    def __init__(self, path: Path, contents: FileContents) -> None:
        """Create the file. Raises OSError (ENOSPC), after removing the file, if memory is short."""
        self.path = path
        self.signature = contents.signature()
        layout = FileLayout.of(contents)
        # Another process may still map the old file, therefore the file is new.
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
        """Destination of each tensor, except empty tensors."""
        for name, offset in layout.offsets.items():
            tensor = contents.tensors[name]
            if tensor.numel():
                part = self._bytes[offset : offset + tensor.nbytes]
                self.targets[name] = part.view(tensor.dtype).view(tensor.shape)

    def pin(self) -> None:
        """Register the memory for fast copies from GPUs; a failure only makes the copies slower."""
        if self._pinned:
            return
        with contextlib.suppress(RuntimeError, AttributeError):
            answer = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), len(self._memory), 0)
            self._pinned = int(answer) == 0

    def remove(self) -> None:
        """Release the memory, which invalidates `targets`."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self.path.unlink(missing_ok=True)
        self.targets.clear()
        del self._bytes
        # A target in use keeps the mapping alive; the last target's end also ends the mapping.
        with contextlib.suppress(BufferError):
            self._memory.close()
