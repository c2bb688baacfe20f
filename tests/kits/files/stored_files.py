"""Files as manifests and declarations name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from functions.storage.s3.crc64 import crc64nvme


def described(path: str, data: bytes) -> dict[str, Any]:
    """A file as declarations, and manifests of version 1, name it."""
    return {
        "path": path,
        "size_bytes": len(data),
        "blake3": blake3(data).hexdigest(),
        "crc64nvme": crc64nvme(data),
    }


def pack_of(data: bytes) -> dict[str, Any]:
    """A pack as manifests declare it."""
    return {"blake3": blake3(data).hexdigest(), "size_bytes": len(data), "crc64nvme": crc64nvme(data)}


def in_packs(files: Mapping[str, bytes]) -> dict[str, Any]:
    """What a manifest of version 2 says of files: each one's bytes are one chunk, which is a pack of its own.

    Equal ones are stored once.
    """
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
