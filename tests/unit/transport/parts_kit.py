"""A large file as parts are fetched of it, small enough for tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.transfer import download_parts as module
from gpu_client.transport.transfer import manager as transfer_module
from gpu_client.transport.transfer.manager import Download
from tests.unit.transport.scripted_server import (
    ScriptedServer,
    reply,
)

DATA = os.urandom(700_001)
OTHER = os.urandom(700_001)
EXPIRED = reply(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
MIB = 1024**2
ALL = sorted(f"bytes={at}-{min(at + 99_999, 700_000)}" for at in range(0, 700_001, 100_000))
"""The parts that are asked for of what is so large."""


def make_parts_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight parts of what is 700,001 bytes."""
    monkeypatch.setattr(transfer_module, "PARTS_FROM_BYTES", 200_000)
    monkeypatch.setattr(module, "_LEAST_PART_BYTES", 100_000)


def download(
    server: ScriptedServer, root: Path, path: str = "o", *, data: bytes = DATA, digest: bool = True
) -> Download:
    return Download(
        name="o",
        url=f"{server.url}/o?X-Amz-Signature=s",
        root=root,
        path=path,
        size_bytes=len(data),
        blake3=digest_bytes(data).blake3 if digest else None,
        crc64nvme=digest_bytes(data).crc64nvme if digest else None,
        fsync=digest,
    )


def left_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*"))


def ranges(server: ScriptedServer) -> list[str | None]:
    return sorted((seen.headers.get("range") or "whole") for seen in server.seen)
