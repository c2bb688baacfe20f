"""Outputs that jobs leave for later ones of their tenant: by a key, one file each. And what there is of a file that no
attempt at its job has finished."""

from __future__ import annotations

from dataclasses import dataclass

from baton.contract.jobs import JobState
from baton.contract.names import CHECKPOINTS_BUCKET, SHARED_PARTS
from functions.domain.checkpoints.object_keys import artifact_key, artifacts_prefix
from functions.domain.record_base import Record
from functions.domain.records import Job


class SharedRecord(Record):
    """What later jobs with this key are given: an artifact of a complete job."""

    tenant: str
    key: str
    """As in the plans of the jobs that share it."""
    object_key: str
    """No other attempt has the same."""
    size_bytes: int
    crc64nvme: str
    blake3: str
    offered_at: int


@dataclass(frozen=True)
class SharedPart:
    """A part of a shared file, made by the attempt `epoch`; `path` is where the present one finds it, below the
    directory of what is shared."""

    epoch: int
    path: str


def shared_records(job: Job, now: int) -> list[SharedRecord]:
    """What the job leaves for others: nothing unless it is complete, and nothing but what that attempt has stored."""
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
    """True if later jobs should be given the new one, of a job that was first begun at `started_at`.

    A job that was given something and leaves another file all the same has added to it, or could not use it. Of two
    that began without, the larger one stays. `stored`: whether the object of what was seen is there.
    """
    if seen is None:
        return True
    if seen.object_key == new.object_key:
        return False
    return not stored or seen.offered_at < started_at or new.size_bytes > seen.size_bytes


def may_have_parts(job: Job) -> bool:
    """Whether earlier attempts may have left parts of what the job shares. With a checkpoint, they lie in that."""
    shares = job.spec.plan is not None and bool(job.spec.plan.shared)
    return shares and job.epoch > 1 and job.checkpoint_step is None


def part_of(job: Job, key: str) -> SharedPart | None:
    """What this artifact is to the present attempt; None if it is no part of an earlier attempt's."""
    number, _, path = key.removeprefix(artifacts_prefix(job.id)).partition("/")
    epoch = int(number)
    if job.spec.plan is None or epoch >= job.epoch:
        return None
    for shared in job.spec.plan.shared:
        parts = f"{shared.path}{SHARED_PARTS}/"
        if path.startswith(parts):
            return SharedPart(epoch, f"{parts}{epoch}/{path.removeprefix(parts)}")
    return None
