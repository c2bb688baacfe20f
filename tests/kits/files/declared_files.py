"""Declarations of files: whole, as packs of a manifest, and in parts."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import awscrt.checksums
from blake3 import blake3

from baton.contract.objects.parts import MIN_PART_BYTES

PART = MIN_PART_BYTES
"""Size of a part in bytes: the least that the API accepts."""


def checksum(data: bytes) -> str:
    """Compute CRC-64/NVME in the notation of S3."""
    return base64.b64encode(awscrt.checksums.crc64nvme(data).to_bytes(8, "big")).decode()


def described(path: str, data: bytes) -> dict[str, Any]:
    """Declare a file for one upload."""
    return {"path": path, **pack_of(data)}


def pack_of(data: bytes) -> dict[str, Any]:
    """Declare a pack of a manifest."""
    return {"blake3": blake3(data).hexdigest(), "size_bytes": len(data), "crc64nvme": checksum(data)}


def in_packs(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Declare files by a manifest: each file is one chunk in a pack of its own; equal files share chunk and pack."""
    stored = {blake3(data).hexdigest(): data for data in files.values() if data}
    index = {digest: number for number, digest in enumerate(stored)}
    return {
        "packs": [pack_of(data) for data in stored.values()],
        "chunks": [
            {"blake3": digest, "size_bytes": len(data), "pack": index[digest]} for digest, data in stored.items()
        ],
        "files": [
            {"path": path, "size_bytes": len(data), "chunks": [index[blake3(data).hexdigest()]] if data else []}
            for path, data in files.items()
        ],
    }


def large(parts: int, *, seed: int = 1, last_bytes: int = 7) -> bytes:
    """Make bytes for `parts` parts, all of them different."""
    return random.Random(seed).randbytes((parts - 1) * PART + last_bytes)


def pieces(data: bytes) -> list[bytes]:
    """Split bytes into parts."""
    return [data[offset : offset + PART] for offset in range(0, len(data), PART)]


def declared(data: bytes, **named: str) -> dict[str, Any]:
    """Declare a file for an upload in parts; `named`: the key, or the path and BLAKE3."""
    parts = {"part_bytes": PART, "crc64nvme": [checksum(piece) for piece in pieces(data)]}
    return {**named, "size_bytes": len(data), "crc64nvme": checksum(data), "parts": parts}
