"""Verify ES256 signatures: ECDSA over P-256 with SHA-256 (FIPS 186-5, RFC 7518 section 3.4).

Verification handles no secret, therefore its timing may depend on its values, and plain integers suffice: 5 ms against
16 MB of the package `cryptography` in every deployment. The tests compare the function with that package.
"""

from __future__ import annotations

import hashlib

Point = tuple[int, int]

_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_B = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)


def verify(message: bytes, signature: bytes, key: Point) -> bool:
    """Return True if the owner of the public key signed the message. `signature`: r and s, 32 bytes each."""
    r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
    if len(signature) != 64 or not (0 < r < _N and 0 < s < _N) or not _is_on_curve(key):
        return False
    inverse = pow(s, -1, _N)
    digest = int.from_bytes(hashlib.sha256(message).digest(), "big")
    point = _combine(digest * inverse % _N, r * inverse % _N, key)
    return point is not None and point[0] % _N == r


def _is_on_curve(point: Point) -> bool:
    x, y = point
    return 0 <= x < _P and 0 <= y < _P and (y * y - (x * x * x - 3 * x + _B)) % _P == 0


def _combine(times_base: int, times_key: int, key: Point) -> Point | None:
    """Return times_base * G + times_key * key, bit by bit for both factors together; None for infinity."""
    summands = (None, _G, key, _add(_G, key))
    total: Point | None = None
    for bit in range(255, -1, -1):
        total = _add(total, total)
        total = _add(total, summands[(times_base >> bit & 1) | (times_key >> bit & 1) << 1])
    return total


def _add(a: Point | None, b: Point | None) -> Point | None:
    """Return the sum of two points of the curve; None is infinity."""
    if a is None or b is None:
        return b if a is None else a
    if a[0] == b[0]:
        if (a[1] + b[1]) % _P == 0:
            return None
        slope = 3 * (a[0] * a[0] - 1) * pow(2 * a[1], -1, _P) % _P
    else:
        slope = (b[1] - a[1]) * pow(b[0] - a[0], -1, _P) % _P
    x = (slope * slope - a[0] - b[0]) % _P
    return x, (slope * (a[0] - x) - a[1]) % _P
