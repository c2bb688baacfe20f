"""Calls of tests to a running control plane."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.contract.checkpoints.manifest import Manifest, parse_manifest
from baton.contract.jobs.history import AttemptView, EventView
from baton.contract.jobs.job import InputRef, JobState, JobSubmit, JobView
from baton.contract.jobs.policy import Policy
from gpu_client.checkpoints.format.codecs import decode
from gpu_client.transport.api.client import BatonClient
from tests.kits.waiting import PATIENCE_S, until

TRAINERS = Path(__file__).resolve().parents[2] / "e2e" / "trainers"


class ControlPlane:
    """Control plane at `url` with `keys` by name ("admin", "worker").

    `objects`, `tables`: clients of the S3 and the DynamoDB behind it, for looks past everybody's back. `prefix`: of the
    tables' names. `buckets`: their physical names.
    """

    def __init__(
        self,
        url: str,
        keys: Mapping[str, str],
        objects: Any,
        tables: Any,
        *,
        prefix: str = "baton-",
        buckets: Mapping[str, str] | None = None,
    ) -> None:
        self.url = url
        self.keys = dict(keys)
        self.objects = objects
        self.tables = tables
        self.prefix = prefix
        self.client = BatonClient(url, self.keys["admin"])
        self._buckets = dict(buckets or {})

    # Jobs

    def submit(
        self,
        script: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        queue: str,
        outputs: tuple[str, ...] = ("model.bin",),
        inputs: tuple[str, ...] = (),
        arguments: tuple[str, ...] = (),
        command: list[str] | None = None,
        environment: Mapping[str, str] | None = None,
        rules: str | None = None,
        **policy: Any,
    ) -> str:
        """Submit a job that runs one of our trainers; returns its id. A retry is immediate and on any machine."""
        defaults = {"heartbeat_interval_s": 2, "backoff_s": 0, "avoid_machine_s": 0, "stop_grace_s": 20}
        job = self.client.submit(
            JobSubmit(
                command=command or ["python", str(TRAINERS / script), *arguments],
                parameters=dict(parameters or {}),
                queue=queue,
                outputs=list(outputs),
                inputs=[InputRef(prefix=prefix) for prefix in inputs],
                environment=dict(environment or {}),
                rules=rules,
                policy=Policy(**{**defaults, **policy}),
            )
        )
        return job.id

    def job(self, job_id: str) -> JobView:
        """Read the job."""
        return self.client.get_job(job_id)

    def attempts(self, job_id: str) -> list[AttemptView]:
        """Read the attempts, oldest first."""
        return self.client.attempts(job_id).attempts

    def events(self, job_id: str) -> list[EventView]:
        """Read the history, oldest first."""
        return self.client.events(job_id, limit=1000).events

    def steps(self, job_id: str) -> list[int]:
        """List committed steps in order of their commits."""
        return [int(event.data["step"]) for event in self.events(job_id) if event.type == "checkpoint.committed"]

    def log_lines(self, job_id: str) -> list[str]:
        """Read all output lines of the job."""
        return [line.text for line in self.client.logs(job_id, limit=1000).lines]

    def wait_for(self, job_id: str, *states: JobState | str, timeout_s: float = PATIENCE_S) -> JobView:
        """Wait until the job is in one of these states."""
        found: JobView = until(
            lambda: job if (job := self.job(job_id)).state in states else None,
            timeout_s,
            what=f"job {job_id} becoming {' or '.join(states)}",
        )
        return found

    def wait_for_step(self, job_id: str, step: int, timeout_s: float = PATIENCE_S) -> JobView:
        """Wait until the trainer has reported this step or a later one."""
        found: JobView = until(
            lambda: job if (job := self.job(job_id)).progress and job.progress.step >= step else None,
            timeout_s,
            what=f"step {step}",
        )
        return found

    def wait_for_commit(self, job_id: str, step: int = 1, timeout_s: float = PATIENCE_S) -> int:
        """Wait until a checkpoint of this step or a later one is committed; its step."""
        found: int = until(
            lambda: newest if (newest := self.job(job_id).checkpoint_step or 0) >= step else 0,
            timeout_s,
            what=f"a checkpoint of step {step}",
        )
        return found

    def expire_lease(self, job_id: str) -> None:
        """Move the expiry of a dead worker's lease into the past, so that the next sweep revokes the lease.

        `test_e2e_local_stack` waits for a lease to expire by itself; other tests need not.
        """
        long_ago = {"N": str(int(time.time()) - 600)}
        self.tables.update_item(
            TableName=f"{self.prefix}heartbeats",
            Key={"pk": {"S": job_id}},
            UpdateExpression="SET expires_at = :then, due_at = :then",
            ExpressionAttributeValues={":then": long_ago},
        )

    # Objects, behind everybody's back

    def artifact(self, job_id: str, path: str = "model.bin") -> bytes:
        """Read an output of a finished job."""
        key = next(artifact.key for artifact in self.job(job_id).artifacts if artifact.path == path)
        return self.read(key)

    def read(self, key: str, bucket: str = "training-checkpoints") -> bytes:
        """Read an object."""
        body: bytes = self.objects.get_object(**self._place(key, bucket))["Body"].read()
        return body

    def write(self, key: str, data: bytes, bucket: str = "training-checkpoints") -> None:
        """Write an object, also over an existing one."""
        self.objects.put_object(**self._place(key, bucket), Body=data, ChecksumAlgorithm="CRC64NVME")

    def keys_below(self, prefix: str, bucket: str = "training-checkpoints") -> dict[str, str]:
        """List keys and ETags below a prefix."""
        place = self._place(prefix, bucket)
        listed = self.objects.list_objects_v2(Bucket=place["Bucket"], Prefix=place["Key"]).get("Contents", [])
        return {entry["Key"].removeprefix("default/"): entry["ETag"] for entry in listed}

    def parts_of(self, key: str, bucket: str = "training-checkpoints") -> list[int]:
        """List the stored part numbers of a key's open uploads."""
        place = self._place(key, bucket)
        listed = self.objects.list_multipart_uploads(Bucket=place["Bucket"], Prefix=place["Key"])
        numbers: list[int] = []
        for upload in listed.get("Uploads", []):
            parts = self.objects.list_parts(**place, UploadId=upload["UploadId"]).get("Parts", [])
            numbers += [part["PartNumber"] for part in parts]
        return numbers

    def manifest(self, key: str) -> Manifest:
        """Read a checkpoint's manifest by its key."""
        return parse_manifest(self.read(key))

    def files_of(self, manifest: Manifest) -> dict[str, bytes]:
        """Restore a checkpoint's files from the stored packs."""
        packs = [self.read(f"packs/{pack.blake3}") for pack in manifest.packs]

        def raw(index: int) -> bytes:
            chunk = manifest.chunks[index]
            stored = b"" if chunk.pack is None else packs[chunk.pack][chunk.offset :][: chunk.stored_bytes]
            base = None if chunk.base is None else raw(chunk.base)
            return bytes(decode(chunk.codec, stored, size_bytes=chunk.size_bytes, width=chunk.width, base=base))

        return {file.path: b"".join(map(raw, file.chunks)) for file in manifest.files}

    def _place(self, key: str, bucket: str) -> dict[str, str]:
        return {"Bucket": self._buckets.get(bucket, bucket), "Key": f"default/{key}"}
