"""Share outputs of complete jobs with later jobs of a tenant, one file for each key, and parts with later attempts."""

from __future__ import annotations

from dataclasses import dataclass

from baton.contract.jobs.job import JobState
from baton.contract.names import CHECKPOINTS_BUCKET, SHARED_PARTS
from functions.domain.checkpoints.object_keys import artifact_key, artifacts_prefix
from functions.domain.record_base import Record
from functions.domain.records import Job


class SharedRecord(Record):
    """Artifact of a complete job that later jobs with the same key receive."""

    tenant: str
    key: str
    """Key in the plans of the jobs that share the file."""
    object_key: str
    """Object key, unique to one attempt."""
    size_bytes: int
    crc64nvme: str
    blake3: str
    offered_at: int


@dataclass(frozen=True)
class SharedPart:
    """Part of a shared file, made by attempt `epoch`. The present attempt finds the part at `path`."""

    epoch: int
    path: str


def shared_records(job: Job, now: int) -> list[SharedRecord]:
    """Return the shared outputs that the last attempt of a complete job has stored; empty for any other job."""
    if job.state is not JobState.COMPLETE or job.spec.plan is None:
        return []
    artifacts = {artifact.key: artifact for artifact in job.artifacts if artifact.bucket == CHECKPOINTS_BUCKET}
    found = []
    for shared in job.spec.plan.shared:
        artifact = artifacts.get(artifact_key(job.id, job.epoch, shared.path))
        if artifact is None or artifact.size_bytes is None or artifact.crc64nvme is None or artifact.blake3 is None:
            continue
        found.append(
            SharedRecord(
                tenant=job.tenant,
                key=shared.key,
                object_key=artifact.key,
                size_bytes=artifact.size_bytes,
                crc64nvme=artifact.crc64nvme,
                blake3=artifact.blake3,
                offered_at=now,
            )
        )
    return found


def should_replace(new: SharedRecord, seen: SharedRecord | None, *, stored: bool, started_at: int) -> bool:
    """Return True if later jobs should receive `new`, of a job that began at `started_at`.

    A job that received a shared file and leaves another file has extended the file or could not use the file. Of two
    jobs that began without a shared file, the larger output stays. `stored`: True if the object of `seen` exists.
    """
    if seen is None:
        return True
    if seen.object_key == new.object_key:
        return False
    return not stored or seen.offered_at < started_at or new.size_bytes > seen.size_bytes


def may_have_parts(job: Job) -> bool:
    """Return True if earlier attempts may have left parts of shared files; a checkpoint contains such parts itself."""
    shares = job.spec.plan is not None and bool(job.spec.plan.shared)
    return shares and job.epoch > 1 and job.checkpoint_step is None


def part_of(job: Job, key: str) -> SharedPart | None:
    """Return the part that an artifact key names; None unless an earlier attempt stored a part there."""
    number, _, path = key.removeprefix(artifacts_prefix(job.id)).partition("/")
    epoch = int(number)
    if job.spec.plan is None or epoch >= job.epoch:
        return None
    for shared in job.spec.plan.shared:
        parts = f"{shared.path}{SHARED_PARTS}/"
        if path.startswith(parts):
            return SharedPart(epoch, f"{parts}{epoch}/{path.removeprefix(parts)}")
    return None
