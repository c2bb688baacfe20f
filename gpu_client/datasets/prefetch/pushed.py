"""List and link the files of a data set that `baton data push` has stored."""

from __future__ import annotations

from blake3 import blake3

from baton.contract.errors import ErrorCode
from baton.contract.names import DATA_BUCKET
from baton.contract.objects.dataset_manifest import (
    DATASET_MANIFEST,
    MAX_DATASET_MANIFEST_BYTES,
    PushedFiles,
    is_manifest,
)
from gpu_client.datasets.prefetch.errors import PrefetchCode, PrefetchError
from gpu_client.datasets.prefetch.selection import FileLink, ListedFile
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import TokenRefused, UrlExpired
from gpu_client.transport.net.cancellation import CancelEvent, stop_if_set


class PushedDataSet:
    """Data set below the prefix `name` of the data bucket."""

    def __init__(self, name: str, client: BatonClient) -> None:
        self.name = name
        self.directory = name.strip("/")
        self._client = client

    def list_files(self, cancel: CancelEvent) -> tuple[str, list[ListedFile]]:
        """Return the files of all manifests that describe the folder, and the digest of the list as revision."""
        folder = f"{self.directory}/"
        stored = self._list_objects(folder)
        parents = self.directory.split("/")[:-1]
        around = ["/".join([*parents[:depth], DATASET_MANIFEST]) for depth in range(1, len(parents) + 1)]
        manifests = [key for place in around for key in self._list_objects(place)]
        manifests += [key for key in stored if is_manifest(key)]
        pushed = PushedFiles([folder])
        for key in manifests:
            stop_if_set(cancel)
            url = self._client.download_url(DATA_BUCKET, key)
            data = self._client.transfer.read(url, name=key, max_bytes=MAX_DATASET_MANIFEST_BYTES, cancel=cancel)
            try:
                pushed.add(key, data)
            except ValueError as error:
                raise self._unfinished(str(error)) from error
        if not pushed.files:
            raise PrefetchError(
                PrefetchCode.SOURCE_MISSING,
                f"no pushed data set lies below {folder}",
                f"See: baton data ls; to push a directory: baton data push DIR {self.directory}",
            )
        for key, file in pushed.files.items():
            if stored.get(key) != file.size_bytes:
                raise self._unfinished(f"{key} is not stored as it was pushed")
        files = [
            ListedFile(path=key, size_bytes=file.size_bytes, checksum=f"blake3:{file.blake3}")
            for key, file in sorted(pushed.files.items())
        ]
        revision = blake3("".join(f"{file.path}\0{file.checksum}\n" for file in files).encode()).hexdigest()
        return revision, files

    def link(self, file: ListedFile, cancel: CancelEvent) -> FileLink:
        """Return a presigned URL. Raises UrlExpired for a used one-time token, whose answer was lost."""
        stop_if_set(cancel)
        try:
            return FileLink(self._client.download_url(DATA_BUCKET, file.path))
        except TokenRefused as error:
            if error.code != ErrorCode.TOKEN_INVALID:
                raise
            raise UrlExpired(f"{file.path}: the download token is used up") from error

    def _list_objects(self, prefix: str) -> dict[str, int]:
        """Return the sizes in bytes of the stored objects by key."""
        listed = pages(lambda cursor: self._client.list_objects(DATA_BUCKET, prefix=prefix, cursor=cursor))
        return {item.key: item.size_bytes for page in listed for item in page.objects}

    def _unfinished(self, message: str) -> PrefetchError:
        return PrefetchError(PrefetchCode.PUSH_UNFINISHED, message, f"Run again: baton data push DIR {self.directory}")
