"""CRC-64/NVME of small data, in plain Python: what S3 reports of an object, for the in-memory twin."""

from __future__ import annotations

import base64

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
    """The checksum as S3 writes it: base64 of eight bytes, big-endian."""
    crc = _ALL_ONES
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return base64.b64encode((crc ^ _ALL_ONES).to_bytes(8, "big")).decode()
