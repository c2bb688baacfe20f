"""Name the objects of a job in the checkpoints bucket, and read step and attempt from such names.

Every key begins with the job or with the digest of the object. The epoch in a key keeps a machine whose lease is lost
away from the files of a later attempt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from functions.domain.records import Job

_MANIFEST_NAME = re.compile(r"([0-9]+)-([0-9]+)(?:-[0-9]+)?-[0-9a-f]{64}\.json")
_ZIP_STEP = re.compile(r"(?:^|/)checkpoint-([0-9]{1,12})(?:\.zip)?\Z")


def job_prefix(job_id: str) -> str:
    """Return the prefix of all objects of a job in the checkpoints bucket."""
    return f"jobs/{job_id}/"


PACKS = "packs/"


def pack_key(blake3: str) -> str:
    """Return the key of a pack, which all jobs of a tenant share; create-only."""
    return f"{PACKS}{blake3}"


def manifests_prefix(job_id: str) -> str:
    """Return the prefix of all manifests of a job."""
    return f"{job_prefix(job_id)}manifests/"


def manifest_key(job: Job, step: int, epoch: int, blake3: str) -> str:
    """Return the key of a checkpoint's manifest, which names `epoch`; create-only.

    After damage an attempt may write the same manifest again while retention still deletes the first one. Therefore
    the second manifest has another key.
    """
    again = job.lapsed_step is not None and step <= job.lapsed_step
    return f"{manifests_prefix(job.id)}{step}-{epoch}-{f'{job.rev}-' if again else ''}{blake3}.json"


def parse_manifest_key(job_id: str, manifest_key: str) -> tuple[int, int] | None:
    """Return step and epoch in the key of a manifest of the job; None for a key of another kind."""
    named = _MANIFEST_NAME.fullmatch(manifest_key.removeprefix(manifests_prefix(job_id)))
    return None if named is None else (int(named[1]), int(named[2]))


def artifacts_prefix(job_id: str) -> str:
    """Return the prefix of the outputs of all attempts of a job; the epoch follows."""
    return f"{job_prefix(job_id)}artifacts/"


def artifact_key(job_id: str, epoch: int, path: str) -> str:
    """Return the key of an attempt's output. The epoch keeps a paused machine away from files of a later attempt."""
    return f"{artifacts_prefix(job_id)}{epoch}/{path}"


def logs_prefix(job_id: str) -> str:
    """Return the prefix of the chunks of a job's output: lines and metric points; create-only."""
    return f"{job_prefix(job_id)}logs/"


def curves_prefix(job_id: str) -> str:
    """Return the prefix of the summaries of a job's metric points; create-only."""
    return f"{job_prefix(job_id)}curves/"


def relay_prefix(job_id: str) -> str:
    """Return the prefix of all objects that nodes of an elastic job send each other; deleted after the job's end."""
    return f"{job_prefix(job_id)}relay/"


def relay_calls_prefix(job_id: str, receiver: str) -> str:
    """Return the prefix of the first objects of all streams to a node."""
    return f"{relay_prefix(job_id)}{receiver}/calls/"


def parse_relay_call(prefix: str, key: str) -> tuple[str, str]:
    """Return sender and channel of a stream from the key of its first object, below `relay_calls_prefix`."""
    sender, _, channel = key.removeprefix(prefix).rpartition(".")
    return sender, channel


@dataclass(frozen=True)
class RelayStream:
    """Stream of objects from a node of an elastic job to another node; create-only."""

    job_id: str
    sender: str
    receiver: str
    channel: str

    def key(self, number: int) -> str:
        """Return the key of an object. The first objects of all streams to a node have one prefix."""
        name = f"{self.sender}.{self.channel}"
        if number == 0:
            return f"{relay_calls_prefix(self.job_id, self.receiver)}{name}"
        return f"{relay_prefix(self.job_id)}{self.receiver}/{name}/{number:09d}"


def attempts_prefix(job_id: str) -> str:
    """Return the prefix of all objects that original clients stored for the job."""
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
