"""Make uploads and downloads for tests of transfers, and list the files left behind."""

from __future__ import annotations

import os
from pathlib import Path

from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.transfer.manager import Download, Upload
from tests.unit.transport.scripted_server import (
    ScriptedServer,
    reply,
)

DATA = os.urandom(700_000)
EXPIRED = reply(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")


def upload(server: ScriptedServer, path: Path, name: str = "o", *, data: bytes | None = None) -> Upload:
    """The PUT that the control plane would sign for `data` (by default what the file holds)."""
    data = path.read_bytes() if data is None else data
    headers = {
        "content-length": str(len(data)),
        "x-amz-checksum-crc64nvme": digest_bytes(data).crc64nvme,
        "If-None-Match": "*",
    }
    return Upload.of_file(
        name=name, path=path, size_bytes=len(data), url=f"{server.url}/{name}?X-Amz-Signature=s", headers=headers
    )


def download(server: ScriptedServer, root: Path, name: str = "o", *, data: bytes = DATA, path: str = "") -> Download:
    return Download(
        name=name,
        url=f"{server.url}/{name}?X-Amz-Signature=s",
        root=root,
        path=path or name,
        size_bytes=len(data),
        blake3=digest_bytes(data).blake3,
        crc64nvme=digest_bytes(data).crc64nvme,
    )


def left_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*"))
