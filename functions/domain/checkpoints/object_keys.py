"""Name the objects of a job in the checkpoints bucket, and read step and attempt from such names.

Every key begins with the job or with the digest of the object. The epoch in a key keeps a machine whose lease is lost
away from the files of a later attempt.
"""

from __future__ import annotations

import re

from functions.domain.records import Job

_MANIFEST_NAME = re.compile(r"([0-9]+)-([0-9]+)(?:-[0-9]+)?-[0-9a-f]{64}\.json")
_ZIP_STEP = re.compile(r"(?:^|/)checkpoint-([0-9]{1,12})(?:\.zip)?\Z")


def job_prefix(job_id: str) -> str:
    """Everything of a job in the checkpoints bucket lies below this."""
    return f"jobs/{job_id}/"


PACKS = "packs/"


def pack_key(blake3: str) -> str:
    """Where the pack with this digest lies, for all jobs of a tenant; create-only."""
    return f"{PACKS}{blake3}"


def manifests_prefix(job_id: str) -> str:
    """All manifests of a job lie below this."""
    return f"{job_prefix(job_id)}manifests/"


def manifest_key(job: Job, step: int, blake3: str) -> str:
    """Where the manifest of a checkpoint lies; create-only.

    An attempt that goes back behind what it had committed (that was damaged) may write the same manifest again, while
    a retention is still deleting it. So it gets another name.
    """
    again = job.lapsed_step is not None and step <= job.lapsed_step
    return f"{manifests_prefix(job.id)}{step}-{job.epoch}-{f'{job.rev}-' if again else ''}{blake3}.json"


def parse_manifest_key(job_id: str, manifest_key: str) -> tuple[int, int] | None:
    """What the key of one of the job's manifests says; None for a key of another kind."""
    named = _MANIFEST_NAME.fullmatch(manifest_key.removeprefix(manifests_prefix(job_id)))
    return None if named is None else (int(named[1]), int(named[2]))


def artifacts_prefix(job_id: str) -> str:
    """What all attempts at a job store of outputs lies below this, by epoch."""
    return f"{job_prefix(job_id)}artifacts/"


def artifact_key(job_id: str, epoch: int, path: str) -> str:
    """Where an attempt stores an output. The epoch keeps a paused machine away from a later attempt's files."""
    return f"{artifacts_prefix(job_id)}{epoch}/{path}"


def attempts_prefix(job_id: str) -> str:
    """Return what all keys of objects that original clients stored for the job begin with."""
    return f"jobs/{job_id}/attempt-"


def attempt_prefix(job_id: str, epoch: int) -> str:
    """Return the prefix in the checkpoints bucket under which attempt `epoch` of an original client stores objects."""
    return f"{attempts_prefix(job_id)}{epoch}/"


def attempt_of(job_id: str, key: str | None) -> int | None:
    """Return the epoch that an object key names; None for a key outside the attempts of the job."""
    found = re.match(rf"jobs/{re.escape(job_id)}/attempt-([0-9]{{1,9}})/", key or "")
    return int(found[1]) if found else None


def zip_step(key: str) -> int | None:
    """Return the step in the name of an original client's zipped checkpoint, `.../checkpoint-<step>.zip`."""
    found = _ZIP_STEP.search(key)
    return int(found.group(1)) if found else None
