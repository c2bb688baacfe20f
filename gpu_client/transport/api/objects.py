"""Upload users' objects by batches of presigned URLs, and download single objects by one-time tokens."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from baton.contract.errors import ErrorCode
from baton.contract.objects.transfers import (
    ObjectPage,
    PresignedUrl,
    TokenAnswer,
    TokenQuery,
    UploadBatch,
    UploadFile,
    UploadTargets,
)
from gpu_client.transport.api.calls import ApiCalls, segment
from gpu_client.transport.api.http import HttpClient
from gpu_client.transport.errors import FalseDigest, TokenRefused, TransferError, UnexpectedAnswer, UrlExpired
from gpu_client.transport.limits.thread_batch import run_batch
from gpu_client.transport.net.cancellation import CancelEvent
from gpu_client.transport.net.digests import FileDigest, hash_file
from gpu_client.transport.transfer.manager import DEFAULT_WORKERS, Download, Progress, Transfer
from gpu_client.transport.transfer.upload_rounds import LocalFile, Missing, Target, upload_in_rounds

FILES_PER_BATCH = 500
"""Files of one call, half of the call's limit, so that URLs are made shortly before their use."""

MAX_EXPIRED_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Object and its destination, the file `path` below `root`. The download verifies given sizes and digests."""

    bucket: str
    key: str
    root: Path
    path: str
    size_bytes: int | None = None
    blake3: str | None = None
    crc64nvme: str | None = None


class ObjectCalls(ApiCalls):
    """Calls that upload, download, list and delete objects of the API's buckets."""

    def __init__(self, http: HttpClient, transfer: Transfer, *, budget_s: float | None = None) -> None:
        super().__init__(http, budget_s=budget_s)
        self.transfer = transfer

    def upload_files(
        self,
        bucket: str,
        files: Mapping[str, Path],
        *,
        cancel: CancelEvent | None = None,
        progress: Progress | None = None,
    ) -> dict[str, FileDigest]:
        """Upload local files under the given keys. Returns the digests of the stored files.

        Raises the errors of Transfer, after which some files may be stored; a repeated call is idempotent.
        """
        stored: dict[str, FileDigest] = {}
        remaining = iter(files.items())
        while batch := dict(islice(remaining, FILES_PER_BATCH)):
            with ThreadPoolExecutor(max_workers=2, thread_name_prefix="hash") as pool:
                digests = dict(
                    zip(batch, pool.map(lambda path: hash_file(path, cancel=cancel), batch.values()), strict=True)
                )
            self._upload_batch(bucket, batch, digests, cancel=cancel, progress=progress)
            stored |= digests
        return stored

    def _upload_batch(
        self,
        bucket: str,
        paths: Mapping[str, Path],
        digests: Mapping[str, FileDigest],
        *,
        cancel: CancelEvent | None,
        progress: Progress | None,
    ) -> None:
        files = {key: LocalFile(path, digests[key]) for key, path in paths.items()}
        upload_in_rounds(
            self.transfer,
            files,
            lambda keys: self._missing(bucket, keys, digests),
            traffic="data",
            cancel=cancel,
            progress=progress,
        )

    def _missing(self, bucket: str, keys: Sequence[str], digests: Mapping[str, FileDigest]) -> Missing:
        wanted = UploadBatch(bucket=bucket, files=[_upload_file(key, digests[key]) for key in keys])
        answer = self._read(UploadTargets, "upload_urls", "POST", "/uploads", body=wanted)
        named = {target.key for target in answer.uploads} | set(answer.pending)
        if named - set(keys) or any(key not in named for key in keys if digests[key].parts is None):
            raise UnexpectedAnswer("upload_urls: the answer names other keys than were asked for")
        targets = [
            Target(name=target.key, url=target.url, headers=target.headers, part=target.part)
            for target in answer.uploads
        ]
        return Missing(targets, frozenset(answer.pending))

    def download(
        self,
        bucket: str,
        key: str,
        path: Path,
        *,
        digest: FileDigest | None = None,
        cancel: CancelEvent | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Fetch one object to the file `path`; with `digest`, verify the object first.

        Raises NotFound for a missing object, and the errors of Transfer.
        """
        wanted = Wanted(
            bucket=bucket,
            key=key,
            root=path.parent,
            path=path.name,
            size_bytes=digest.size_bytes if digest else None,
            blake3=digest.blake3 if digest else None,
            crc64nvme=digest.crc64nvme if digest else None,
        )
        self._fetch(wanted, cancel=cancel, progress=progress)

    def fetch_objects(
        self,
        wanted: Sequence[Wanted],
        *,
        workers: int = DEFAULT_WORKERS,
        cancel: CancelEvent | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Fetch several objects at once. A file under its final name is complete, also after an error.

        Raises the errors of `download`. The first failure stops the other fetches; FalseDigest is raised after them.
        """
        lock = threading.Lock()
        false: list[FalseDigest] = []

        def moved(size_bytes: int) -> None:
            with lock:
                if progress is not None:
                    progress(size_bytes)

        def fetch(one: Wanted, flight: CancelEvent) -> None:
            try:
                self._fetch(one, cancel=flight, progress=moved)
            except FalseDigest as error:
                with lock:
                    false.append(error)

        run_batch(wanted, fetch, workers=workers, cancel=cancel)
        if false:
            raise false[0]

    def _fetch(self, wanted: Wanted, *, cancel: CancelEvent | None, progress: Progress | None) -> None:
        for last in (False,) * (MAX_EXPIRED_ROUNDS - 1) + (True,):
            try:
                item = Download(
                    name=wanted.key,
                    url=self.download_url(wanted.bucket, wanted.key),
                    root=wanted.root,
                    path=wanted.path,
                    size_bytes=wanted.size_bytes,
                    blake3=wanted.blake3,
                    crc64nvme=wanted.crc64nvme,
                )
                self.transfer.download([item], cancel=cancel, progress=progress)
            except (UrlExpired, TokenRefused) as error:
                # A request whose answer was lost has redeemed its token, which the server refuses afterwards.
                if last or (isinstance(error, TokenRefused) and error.code != ErrorCode.TOKEN_INVALID):
                    raise
            else:
                return

    def delete_objects(self, bucket: str, keys: Sequence[str], *, cancel: CancelEvent | None = None) -> None:
        """Delete objects in parallel. The first failure stops the other deletions; a repeated call is idempotent."""
        run_batch(keys, lambda key, _: self.delete_object(bucket, key), workers=DEFAULT_WORKERS, cancel=cancel)

    def delete_object(self, bucket: str, key: str) -> None:
        """Delete one object; a missing object is no error."""
        token = self._read(
            TokenAnswer, "upload_token", "GET", "/upload/token", query=TokenQuery(bucket=bucket, key=key)
        ).token
        path = f"/upload/{segment(bucket)}/{quote(key, safe='/')}"
        self._send("delete", "DELETE", path, query={"action": "delete"}, headers={"x-upload-token": token})

    def download_url(self, bucket: str, key: str) -> str:
        """Return a presigned URL of one object."""
        query = TokenQuery(bucket=bucket, key=key)
        token = self._read(TokenAnswer, "download_token", "GET", "/download/token", query=query).token
        path = f"/download/{segment(bucket)}/{quote(key, safe='/')}"
        return self._read(
            PresignedUrl, "download", "GET", path, query={"as": "url"}, headers={"x-download-token": token}
        ).url

    def list_objects(
        self, bucket: str = "training-data", *, prefix: str = "", limit: int = 1000, cursor: str | None = None
    ) -> ObjectPage:
        """Return one page of a bucket's objects below `prefix`, by key."""
        query = {"bucket": bucket, "prefix": prefix or None, "limit": limit, "cursor": cursor}
        return self._read(ObjectPage, "list_objects", "GET", "/data", query=query)


def _upload_file(key: str, digest: FileDigest) -> UploadFile:
    named = UploadFile(key=key, size_bytes=digest.size_bytes, crc64nvme=digest.crc64nvme)
    # pydantic omits unset fields, therefore `parts` stays unset for a file without parts.
    return named if digest.parts is None else named.model_copy(update={"parts": digest.parts})


def files_below(directory: Path, *, prefix: str = "") -> dict[str, Path]:
    """Return keys and paths of all files below a directory. Raises TransferError for any other kind of entry."""
    found: dict[str, Path] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        if not path.is_file():
            raise TransferError(f"{path} is not a regular file")
        found[prefix + path.relative_to(directory).as_posix()] = path
    return found
