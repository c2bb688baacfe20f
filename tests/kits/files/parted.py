"""Large files as they are declared for an upload in parts, the smallest that may be."""

from __future__ import annotations

import base64
import random
from typing import Any

from awscrt.checksums import crc64nvme

from baton.contract.parts import MIN_PART_BYTES

PART = MIN_PART_BYTES


def checksum(data: bytes) -> str:
    """CRC-64/NVME as the store has it."""
    return base64.b64encode(crc64nvme(data).to_bytes(8, "big")).decode()


def large(parts: int, *, seed: int = 1, last_bytes: int = 7) -> bytes:
    """Bytes that make so many parts, no two of which are alike."""
    return random.Random(seed).randbytes((parts - 1) * PART + last_bytes)


def pieces(data: bytes) -> list[bytes]:
    """Its parts."""
    return [data[offset : offset + PART] for offset in range(0, len(data), PART)]


def declared(data: bytes, **named: str) -> dict[str, Any]:
    """What is said of it; `named`: its key, or its path and BLAKE3."""
    parts = {"part_bytes": PART, "crc64nvme": [checksum(piece) for piece in pieces(data)]}
    return {**named, "size_bytes": len(data), "crc64nvme": checksum(data), "parts": parts}
