"""Altered bits (target 1) and undetected damage (target 10). Counts, not times."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness.figures import Figure
from gpu_client.ring.core.ring import PointerRecord, decode_schema, make_ring
from gpu_client.ring.errors import ObjectDamaged
from gpu_client.ring.format.manifest import RingManifest, manifest_key
from gpu_client.ring.format.objects import StoredSamples
from gpu_client.ring.format.records import POINTER, SCHEMA
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import Codec, RingSettings

CODECS: tuple[Codec, ...] = ("none", "zstd", "lz4")
MOST_DIMENSIONS = 5
NUMPY = (
    "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "c8", "c16", "G",
    ">i4", ">f8", "S7", "U5", "M8[ns]", "m8[s]", "V9",
)  # fmt: skip
TORCH = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
FIELDS = [("a", "<f4", (2, 3)), ("b", "u1"), ("c", [("d", ">i2")])]


def torch_dtypes() -> list[torch.dtype]:
    """List the dtypes of this torch, without quantized ones, which a ring refuses."""
    return [getattr(torch, name) for name in TORCH if hasattr(torch, name)]


def round_trips(scratch: Path) -> list[Figure]:
    """Pass every dtype of 0 to 5 dimensions, also empty, alone and nested, through a ring in a directory."""
    # torch says so of each tensor of complex32.
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    chance = np.random.default_rng(0)
    samples: list[Any] = []
    for dimensions in range(MOST_DIMENSIONS + 1):
        shapes = [tuple(range(2, 2 + dimensions))]
        shapes += [(*shapes[0][:-1], 0)] if dimensions else []
        for shape in shapes:
            samples += [_numpy(kind, shape, chance) for kind in (*NUMPY, FIELDS)]
            samples += [_torch(kind, shape, chance) for kind in torch_dtypes()]
    samples += [chance.random(3)[0], np.datetime64("2026-01-01")]
    # All of them in one: nested, and as tuples, lists and dicts.
    samples.append({"all": (list(samples), {"deeper": [(samples[0], {"text": "ä", "none": None, "number": 0.1})]})})
    wrong = []
    for number, codec in enumerate(CODECS):
        place = scratch / f"exact-{number}"
        for at, sample in enumerate(samples):
            ring = make_ring(f"{place}/{at}", RingSettings(cap=1, codec=codec, finite=False))
            with RingWriter(ring, threads=False) as writer:
                writer.put({"it": sample, "and": np.zeros(1)})
            with RingReader(ring, threads=False) as reader:
                back = reader.sample(reader.newest().slots[0])["it"]
            if not same(sample, back):
                wrong.append(f"{codec}: {sample!r:.80}")
    dtypes = len(torch_dtypes()) + len(NUMPY) + 1
    return [
        Figure(
            name=f"{dtypes} dtypes, 0 to {MOST_DIMENSIONS} dimensions, nested: altered",
            unit="",
            rounds=[len(wrong)],
            at_most=0,
            counted=True,
            details={
                "samples": len(samples),
                "codecs": CODECS,
                "torch": [str(one) for one in torch_dtypes()],
                "altered": wrong,
            },
        )
    ]


def _numpy(kind: Any, shape: tuple[int, ...], chance: np.random.Generator) -> np.ndarray[Any, Any]:
    dtype = np.dtype(kind)
    count = int(np.prod(shape, dtype=int))
    if dtype.kind == "U":
        return np.full(shape, "häß€x"[: dtype.itemsize // 4], dtype)
    data = chance.integers(0, 2 if dtype.kind == "b" else 256, count * dtype.itemsize, np.uint8)
    if dtype.char in "gG":
        # Of the x87's 16 bytes 6 mean nothing, and some patterns are no numbers.
        return chance.random(shape).astype(dtype)
    return np.frombuffer(data.tobytes(), dtype, count).reshape(shape).copy() if count else np.empty(shape, dtype)


def _torch(kind: torch.dtype, shape: tuple[int, ...], chance: np.random.Generator) -> torch.Tensor:
    count = int(np.prod(shape, dtype=int))
    data = chance.integers(0, 2 if kind is torch.bool else 256, count * kind.itemsize, np.uint8)
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.from_numpy(data).view(kind).reshape(shape)


def same(put: Any, back: Any) -> bool:
    """Compare types, dtypes, shapes and all bits."""
    if type(put) is not type(back):
        return False
    if isinstance(put, dict):
        return list(put) == list(back) and all(same(put[name], back[name]) for name in put)
    if isinstance(put, list | tuple):
        return len(put) == len(back) and all(same(*pair) for pair in zip(put, back, strict=True))
    if isinstance(put, torch.Tensor):
        if put.dtype != back.dtype or put.shape != back.shape:
            return False
        return put.numel() == 0 or bool(torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (put, back))))
    if isinstance(put, np.ndarray | np.generic):
        return put.dtype == back.dtype and put.shape == back.shape and put.tobytes() == back.tobytes()
    return bool(put == back)


def flipped_bits(scratch: Path, *, flips: int) -> list[Figure]:
    """Flip one bit of an object at a time: every bit of small objects, many of a larger one."""
    unnoticed, tried = 0, 0
    for codec in CODECS:
        for size, every in ((16, True), (20_000, False)):
            ring = make_ring(str(scratch / f"flips-{codec}-{size}"), RingSettings(cap=1, codec=codec))
            with RingWriter(ring, "w", threads=False) as writer:
                writer.put({"x": np.arange(size), "y": torch.arange(7)}, seed=1)
            key = ring.newest().slots[0].object.key
            data = ring.store.read(key)
            assert data is not None
            bits = range(8 * len(data)) if every else random.Random(size).choices(range(8 * len(data)), k=flips)
            for bit in bits:
                data[bit // 8] ^= 1 << bit % 8
                try:
                    StoredSamples(key, data).verify()
                    unnoticed += 1
                except ObjectDamaged:
                    pass
                data[bit // 8] ^= 1 << bit % 8
                tried += 1
            StoredSamples(key, data).verify()
    # What the last of these rings is run by.
    number, _ = ring.pointer()
    documents: dict[str, Callable[[bytes], object]] = {
        manifest_key(number): lambda data: RingManifest.from_bytes(data, number),
        POINTER: PointerRecord.from_bytes,
        SCHEMA: lambda data: decode_schema(memoryview(data)),
    }
    for key, read in documents.items():
        document = bytearray(ring.store.read(key) or b"")
        read(bytes(document))
        for bit in range(8 * len(document)):
            document[bit // 8] ^= 1 << bit % 8
            try:
                read(bytes(document))
                unnoticed += 1
            except ValueError:
                pass
            document[bit // 8] ^= 1 << bit % 8
            tried += 1
    return [
        Figure(
            name="flipped bits that were not noticed",
            unit="",
            rounds=[unnoticed],
            at_most=0,
            counted=True,
            details={"flips": tried, "codecs": CODECS},
        )
    ]
