"""Builders of valid values: a test names only the fields under test."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from baton.contract.checkpoints.manifest import Chunk, ChunkedFile, Manifest, Pack
from baton.contract.jobs.job import JobState
from baton.contract.jobs.policy import Policy
from baton.contract.worker.calls import WorkQuery
from functions.domain.access.api_keys import token_digest
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.lease_fence import Fence
from functions.domain.jobs.transaction import CloseLease, OpenLease, Transaction
from functions.domain.records import Attempt, CheckpointRecord, Claimant, Job, Lease, Spec

NOW = 1_790_000_000
TENANT = "default"
JOB_ID = "146683a1-cb76-4702-9fef-fcccd32594f1"
TOKEN = "lease-token-of-the-first-attempt"
CRC64 = "UvieJR3alJI="
CLAIMANT = Claimant(key_id="k", source_address="192.0.2.1", progress_by=NOW + 3600)


def digest(text: str) -> str:
    """Make 64 hex digits in the form of a BLAKE3 digest."""
    return hashlib.sha256(text.encode()).hexdigest()


def make_spec(**fields: Any) -> Spec:
    """Make a job's specification; policy fields may be given as `policy={...}`."""
    if isinstance(fields.get("policy"), dict):
        fields["policy"] = Policy(**fields["policy"])
    return Spec(**{"command": ["train"], **fields})


def make_job(*, policy: dict[str, Any] | None = None, spec: Spec | None = None, **fields: Any) -> Job:
    """Make a submitted job; other fields as given."""
    spec = spec or make_spec(policy=policy or {})
    return Job(
        **{"id": JOB_ID, "tenant": TENANT, "rev": 1, "event_seq": 1, "created_at": NOW, "updated_at": NOW, **fields},
        spec=spec,
    )


def make_worker(machine_id: str | None = "m-1", **fields: Any) -> WorkQuery:
    """Make the query of a worker."""
    return WorkQuery(machine_id=machine_id, **fields)


def make_attempt(epoch: int = 1, **fields: Any) -> Attempt:
    """Make a running attempt."""
    return Attempt(**{"epoch": epoch, "machine_id": "m-1", "started_at": NOW, **fields})


def make_lease(epoch: int = 1, *, token: str | None = TOKEN, **fields: Any) -> Lease:
    """Make a live lease of a lease-aware worker; `token=None`: of an original client, claimed with CLAIMANT."""
    return Lease(
        **{
            "job_id": JOB_ID,
            "tenant": TENANT,
            "epoch": epoch,
            "token_sha256": token_digest(token) if token else None,
            "machine_id": "m-1",
            "claimant": None if token else CLAIMANT,
            "expires_at": NOW + 90,
            "duration_s": 90,
            "heartbeat_interval_s": 30,
            **fields,
        }
    )


def make_fence(*, token: str | None = TOKEN, now: int = NOW, **fields: Any) -> Fence:
    """Make the fence of a worker's write."""
    proof = token_digest(token) if token else None
    return Fence(**{"job_id": JOB_ID, "tenant": TENANT, "now": now, "token_sha256": proof, **fields})


def make_record(step: int = 100, epoch: int = 1, **fields: Any) -> CheckpointRecord:
    """Make the record of a committed checkpoint."""
    return CheckpointRecord(
        **{
            "step": step,
            "epoch": epoch,
            "committed_at": NOW,
            "num_files": 1,
            "total_bytes": 1024,
            "manifest_key": f"jobs/{JOB_ID}/manifests/{step}-{epoch}-{digest(f'{step}-{epoch}')}.json",
            "manifest_blake3": digest(f"{step}-{epoch}"),
            **fields,
        }
    )


def make_pack(name: str = "pack", **fields: Any) -> Pack:
    """Make a pack; its digest follows from its name."""
    return Pack(**{"blake3": digest(name), "size_bytes": 1024, "crc64nvme": CRC64, **fields})


def make_chunk(name: str = "chunk", **fields: Any) -> Chunk:
    """Make a chunk that fills the first pack; its digest follows from its name."""
    return Chunk(**{"blake3": digest(name), "size_bytes": 1024, "pack": 0, **fields})


def make_chunked(path: str = "model.safetensors", chunks: tuple[int, ...] = (0,), **fields: Any) -> ChunkedFile:
    """Make a file of chunks of 1,024 bytes each."""
    return ChunkedFile(**{"path": path, "size_bytes": 1024 * len(chunks), "chunks": list(chunks), **fields})


def make_manifest(step: int = 100, epoch: int = 1, **fields: Any) -> Manifest:
    """Make a manifest: one file of one chunk that is one pack."""
    parts = {"packs": [make_pack()], "chunks": [make_chunk()], "files": [make_chunked()]}
    return Manifest(**{"version": 2, "job_id": JOB_ID, "step": step, "epoch": epoch, **parts, **fields})


@dataclass(frozen=True)
class Held:
    """Job that a worker holds."""

    job: Job
    attempt: Attempt
    lease: Lease
    fence: Fence


def make_held(job: Job | None = None, *, token: str | None = TOKEN, now: int = NOW, **worker: Any) -> Held:
    """Claim a job at `now`: the given pending job or a new one."""
    change = rules.claim(
        job or make_job(),
        make_worker(**worker),
        token_sha256=token_digest(token) if token else None,
        key_id="k3f9a1b2",
        now=now,
    )
    assert change.attempt is not None
    assert isinstance(change.lease, OpenLease)
    lease = change.lease.lease
    fence = make_fence(token=token, now=now, job_id=lease.job_id, tenant=lease.tenant, machine_id=lease.machine_id)
    return Held(change.job, change.attempt, lease, fence)


def closed_by(change: Transaction) -> CloseLease:
    """Find the end of the lease in a transaction."""
    assert isinstance(change.lease, CloseLease)
    return change.lease


def make_ended(state: JobState, **fields: Any) -> Job:
    """Make a job whose first attempt has ended in a terminal state."""
    stamp = {
        JobState.COMPLETE: {"completed_at": NOW},
        JobState.FAILED: {"failed_at": NOW},
        JobState.CANCELED: {"canceled_at": NOW},
    }[state]
    return make_job(**{"state": state, "epoch": 1, "rev": 5, "event_seq": 3, **stamp, **fields})
