"""Control plane of one job on the sink: answers commits and restores without the cost of a real one.

It answers at once, as the store does: everything is on loopback, and latency is left out for all. It looks for each
pack in the store, as the real one does, but over one plain connection: in production that is not the worker's CPU.
URLs are not signed, since the sink checks no signature.
"""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from urllib.parse import urlsplit

from baton.contract.checkpoints.calls import BlobUpload, BlobUrls, CheckpointRef, CommitAnswer
from baton.contract.checkpoints.manifest import Manifest
from baton.contract.worker.calls import WorkItem
from gpu_client.transport.net.digests import digest_bytes

JOB_ID = "146683a1-cb76-4702-9fef-fcccd32594f1"


class Plane:
    """Stored objects and the last committed manifest; counts requests that S3 bills as PUTs."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        self._endpoint = endpoint
        self._bucket = bucket
        self._store = http.client.HTTPConnection(urlsplit(endpoint).netloc)
        self._committed: Manifest | None = None
        self.put_requests = 0

    def close(self) -> None:
        """Close the connection to the store."""
        self._store.close()

    def item(self) -> WorkItem:
        """Make the job as a worker claims it now."""
        resume = []
        if self._committed is not None:
            manifest = self._committed
            resume.append(
                CheckpointRef(
                    step=manifest.step,
                    epoch=manifest.epoch,
                    manifest_url=self._url(_manifest_key(manifest)),
                    manifest_blake3=digest_bytes(manifest.canonical_bytes()).blake3,
                    total_bytes=manifest.total_bytes,
                )
            )
        return WorkItem(
            id=JOB_ID,
            epoch=1,
            lease_token="token",
            lease_duration_s=90,
            lease_expires_at=0,
            heartbeat_interval_s=30,
            server_time=0,
            command=["train"],
            parameters={},
            environment={},
            inputs=[],
            outputs=[],
            data_bucket="training-data",
            checkpoint_bucket="training-checkpoints",
            checkpoint_prefix="jobs/",
            resume=resume,
        )

    def commit(self, lease_token: str, manifest: Manifest) -> CommitAnswer:
        """Answer POST /job/{id}/checkpoints."""
        missing = []
        for pack in manifest.packs:
            key = f"packs/{pack.blake3}"
            if self._stored_bytes(key) != pack.size_bytes:
                missing.append(BlobUpload(blake3=pack.blake3, url=self._url(key), headers={"If-None-Match": "*"}))
        self.put_requests += len(missing)
        if not missing:
            self.put_requests += 1
            status, _ = self._asked("PUT", _manifest_key(manifest), manifest.canonical_bytes())
            if status != 200:
                raise RuntimeError(f"the store answers {status}")
            self._committed = manifest
        return CommitAnswer(committed=not missing, step=manifest.step, epoch=manifest.epoch, missing=missing)

    def blob_urls(self, job_id: str, step: int, blake3: Sequence[str], *, lease_token: str | None = None) -> BlobUrls:
        """Answer POST /job/{id}/checkpoints/{step}/urls."""
        urls = {digest: self._url(f"packs/{digest}") for digest in blake3}
        ref = CheckpointRef(step=step, epoch=1, manifest_url="", total_bytes=0)
        return BlobUrls(urls=urls, expires_at=0, checkpoint=ref)

    def report_damaged(self, job_id: str, step: int, lease_token: str, *, epoch: int, message: str) -> None:
        """Accept a damage report; the sink damages nothing."""
        raise AssertionError(message)

    def _url(self, key: str) -> str:
        return f"{self._endpoint}/{self._bucket}/{key}"

    def _stored_bytes(self, key: str) -> int | None:
        """Read the size of an object in bytes; None for a missing object."""
        status, size_bytes = self._asked("HEAD", key)
        return size_bytes if status == 200 else None

    def _asked(self, method: str, key: str, body: bytes | None = None) -> tuple[int, int]:
        self._store.request(method, f"/{self._bucket}/{key}", body)
        answer = self._store.getresponse()
        answer.read()
        return answer.status, int(answer.headers.get("Content-Length", 0))


def _manifest_key(manifest: Manifest) -> str:
    return f"manifests/{manifest.step}-{manifest.epoch}.json"
