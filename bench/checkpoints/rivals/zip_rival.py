"""Checkpoints of the original Dreambooth worker: requests and zipfile.

The directory becomes a deflated zip, which goes up in parts of 10 MiB by 25 threads, and comes down in one stream of
8 KiB pieces.
"""

from __future__ import annotations

import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

PART_BYTES = 10 * 1024 * 1024
ZIP_THREADS = 25
_LIFE_S = 3600


class ZipRival:
    """Store a zip of the whole directory each time."""

    def __init__(self, client: Any, bucket: str, scratch: Path) -> None:
        self._client = client
        self._bucket = bucket
        self._scratch = scratch

    def save(self, directory: Path, name: str) -> int:
        """Zip and upload a directory; returns the sent bytes."""
        archive = self._scratch / "checkpoint.zip"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
            for path in sorted(directory.rglob("*")):
                if path.is_file():
                    target.write(path, path.relative_to(directory))
        place = {"Bucket": self._bucket, "Key": f"{name}.zip"}
        upload_id = self._client.create_multipart_upload(**place)["UploadId"]
        size_bytes = archive.stat().st_size

        def send(number: int) -> dict[str, Any]:
            url = self._client.generate_presigned_url(
                "upload_part", {**place, "UploadId": upload_id, "PartNumber": number}, ExpiresIn=_LIFE_S
            )
            with archive.open("rb") as file:
                file.seek((number - 1) * PART_BYTES)
                answer = requests.put(url, data=file.read(PART_BYTES), timeout=600)
            answer.raise_for_status()
            return {"PartNumber": number, "ETag": answer.headers["ETag"]}

        with ThreadPoolExecutor(ZIP_THREADS) as pool:
            parts = list(pool.map(send, range(1, -(-size_bytes // PART_BYTES) + 1)))
        self._client.complete_multipart_upload(**place, UploadId=upload_id, MultipartUpload={"Parts": parts})
        archive.unlink()
        return size_bytes

    def fetch(self, name: str, directory: Path) -> None:
        """Restore a usable directory."""
        url = self._client.generate_presigned_url(
            "get_object", {"Bucket": self._bucket, "Key": f"{name}.zip"}, ExpiresIn=_LIFE_S
        )
        archive = self._scratch / "fetched.zip"
        with requests.get(url, stream=True, timeout=600) as answer, archive.open("wb") as file:
            answer.raise_for_status()
            for piece in answer.iter_content(8192):
                file.write(piece)
        with zipfile.ZipFile(archive) as source:
            source.extractall(directory)
        archive.unlink()
