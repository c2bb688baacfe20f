"""Small documents that prove themselves: JSON with a digest of all the rest at its end.

What was stored before there were digests is still read: it has none, and nothing else that is not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from typing import Any

import xxhash

_SEAL = re.compile(rb',"digest":"([0-9a-f]{32})"\}')
_SEAL_BYTES = 45
_DIGEST = re.compile(r"[0-9a-f]{32}")


def sealed(content: Mapping[str, Any]) -> bytes:
    """A document with this content, of which there has to be some."""
    data = json.dumps(content, separators=(",", ":")).encode()
    return data[:-1] + b',"digest":"%s"}' % xxhash.xxh3_128_hexdigest(data).encode()


def unsealed(data: bytes | memoryview, known: Set[str] | None = None) -> dict[str, Any]:
    """The content. `known`: what one without a digest may have; None: anything but what a digest can have become.

    Raises ValueError for what is not as it was sealed.
    """
    data = bytes(data)
    seal = _SEAL.fullmatch(data, max(len(data) - _SEAL_BYTES, 0))
    if seal is not None:
        data = data[:-_SEAL_BYTES] + b"}"
        if xxhash.xxh3_128_hexdigest(data).encode() != seal[1]:
            raise ValueError("it was altered")
    content = json.loads(data)
    if not isinstance(content, dict):
        raise ValueError("it is no object of JSON")
    if seal is None and known is None and any(name == "digest" or _like_digest(content[name]) for name in content):
        raise ValueError("its digest was altered")
    if seal is None and known is not None and content.keys() - known:
        raise ValueError(f"it was altered, or is no such thing: it has {min(content.keys() - known)[:40]!r}")
    return content


def _like_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None
