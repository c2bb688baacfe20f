"""A control plane of one job, on an S3 server: what a commit and a restore ask of it, without what they do not measure.

The real one costs two calls for a commit and two for a restore, some 0.1 s each over the internet: CALL_S is waited for
each, so that nothing is won by leaving it out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from botocore.exceptions import ClientError

from contract.checkpoints import BlobUpload, BlobUrls, CheckpointRef, CommitAnswer
from contract.manifest import Manifest
from contract.work import WorkItem
from gpu_client.checkpoints.manifest import manifest_digest

CALL_S = 0.1
_LIFE_S = 3600
JOB_ID = "146683a1-cb76-4702-9fef-fcccd32594f1"


class Plane:
    """Knows what is stored, and the last committed manifest. Counts requests that S3 bills as PUTs."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket
        self._committed: Manifest | None = None
        self.put_requests = 0

    def item(self) -> WorkItem:
        """The job as a worker claims it now."""
        resume = []
        if self._committed is not None:
            manifest = self._committed
            resume.append(
                CheckpointRef(
                    step=manifest.step,
                    epoch=manifest.epoch,
                    manifest_url=self._url("get_object", self._manifest_key(manifest)),
                    manifest_blake3=manifest_digest(manifest),
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
        """As POST /job/{id}/checkpoints."""
        time.sleep(CALL_S)
        missing = []
        for pack in manifest.packs:
            if not self._is_stored(f"packs/{pack.blake3}", pack.size_bytes):
                url = self._url("put_object", f"packs/{pack.blake3}")
                missing.append(BlobUpload(blake3=pack.blake3, url=url, headers={}))
        self.put_requests += len(missing)
        if not missing:
            self.put_requests += 1
            self._client.put_object(
                Bucket=self._bucket, Key=self._manifest_key(manifest), Body=manifest.canonical_bytes()
            )
            self._committed = manifest
        return CommitAnswer(committed=not missing, step=manifest.step, epoch=manifest.epoch, missing=missing)

    def blob_urls(self, job_id: str, step: int, blake3: Sequence[str], *, lease_token: str | None = None) -> BlobUrls:
        """As POST /job/{id}/checkpoints/{step}/urls."""
        time.sleep(CALL_S)
        return BlobUrls(urls={digest: self._url("get_object", f"packs/{digest}") for digest in blake3}, expires_at=0)

    def report_damaged(self, job_id: str, step: int, lease_token: str, *, epoch: int, message: str) -> None:
        """Nothing is damaged here."""
        raise AssertionError(message)

    def _manifest_key(self, manifest: Manifest) -> str:
        return f"manifests/{manifest.step}-{manifest.epoch}.json"

    def _url(self, method: str, key: str) -> str:
        url: str = self._client.generate_presigned_url(method, {"Bucket": self._bucket, "Key": key}, ExpiresIn=_LIFE_S)
        return url

    def _is_stored(self, key: str, size_bytes: int) -> bool:
        try:
            found: int = self._client.head_object(Bucket=self._bucket, Key=key)["ContentLength"]
        except ClientError:
            return False
        return found == size_bytes
