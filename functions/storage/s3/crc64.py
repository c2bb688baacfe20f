"""Compute CRC-64/NVME in plain Python, of small data and of joined parts, for the twin and the store check."""

from __future__ import annotations

import base64
from collections.abc import Iterable

_POLYNOMIAL = 0x9A6C9329AC4BC9B5  # 0xAD93D23594C93659, bits reversed
_ALL_ONES = 0xFFFFFFFFFFFFFFFF


def _table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _table()


def crc64nvme(data: bytes) -> str:
    """Return the checksum in the form of S3: base64 of eight bytes, big-endian."""
    crc = _ALL_ONES
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return base64.b64encode((crc ^ _ALL_ONES).to_bytes(8, "big")).decode()


def joined(parts: Iterable[tuple[str, int]]) -> str:
    """Return the checksum of concatenated parts, from the checksum and the size in bytes of each part."""
    whole = 0
    for checksum, size_bytes in parts:
        whole = _times(whole, _shift(8 * size_bytes)) ^ int.from_bytes(base64.b64decode(checksum), "big")
    return base64.b64encode(whole.to_bytes(8, "big")).decode()


def _shift(bits: int) -> int:
    """Return x to the power of `bits` modulo the polynomial, with reversed bits like the checksum."""
    power, square = 1 << 63, 1 << 62
    while bits:
        if bits & 1:
            power = _times(power, square)
        square = _times(square, square)
        bits >>= 1
    return power


def _times(left: int, right: int) -> int:
    product = 0
    for bit in range(63, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return product
