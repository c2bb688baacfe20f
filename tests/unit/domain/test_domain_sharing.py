"""Test the shared outputs of a complete job, and which record replaces which."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.jobs.job import Artifact, JobState
from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET
from baton.contract.recipes.plan import RunPlan, SharedFile, StepOrder
from functions.domain.checkpoints.object_keys import artifact_key
from functions.domain.checkpoints.shared_outputs import SharedRecord, shared_records, should_replace
from functions.domain.records import Job
from tests.kits.api.factories import CRC64, JOB_ID, NOW, TENANT, digest, make_ended, make_job, make_spec

KEY = digest("key")
PLAN = RunPlan(steps=[StepOrder(name="train", command=["train"])], shared=[SharedFile(path="set.zip", key=KEY)])


def artifact(path: str = "set.zip", epoch: int = 1, **more: Any) -> Artifact:
    facts = {"size_bytes": 7, "crc64nvme": CRC64, "blake3": digest(path), "bucket": CHECKPOINTS_BUCKET, **more}
    return Artifact(**{"path": path, "key": artifact_key(JOB_ID, epoch, path), **facts})


def job(state: JobState = JobState.COMPLETE, *artifacts: Artifact, plan: RunPlan | None = PLAN) -> Job:
    return make_ended(state, spec=make_spec(plan=plan), artifacts=[artifact("model"), *artifacts])


def record(object_key: str = "a", size_bytes: int = 7) -> SharedRecord:
    return SharedRecord(
        tenant=TENANT,
        key=KEY,
        object_key=object_key,
        size_bytes=size_bytes,
        crc64nvme=CRC64,
        blake3=digest(object_key),
        offered_at=NOW,
    )


def test_a_complete_job_offers_what_its_plan_shares() -> None:
    (found,) = shared_records(job(JobState.COMPLETE, artifact()), NOW + 5)
    assert found == record(artifact_key(JOB_ID, 1, "set.zip")).model_copy(
        update={"blake3": digest("set.zip"), "offered_at": NOW + 5}
    )


@pytest.mark.parametrize(
    "without",
    [
        job(),
        job(JobState.COMPLETE, artifact(), plan=None),
        job(JobState.COMPLETE, artifact(), plan=PLAN.model_copy(update={"shared": []})),
        job(JobState.FAILED, artifact()),
        job(JobState.CANCELED, artifact()),
        job(JobState.COMPLETE, artifact(epoch=2)),
        job(JobState.COMPLETE, artifact(bucket=DATA_BUCKET)),
        job(JobState.COMPLETE, artifact(blake3=None)),
        make_job(state=JobState.RUNNING, epoch=1, spec=make_spec(plan=PLAN), artifacts=[artifact()]),
    ],
    ids=["not made", "no plan", "nothing shared", "failed", "canceled", "not its own", "data", "blind", "running"],
)
def test_nothing_else_is_offered(without: Job) -> None:
    assert shared_records(without, NOW) == []


@pytest.mark.parametrize(
    ("seen", "stored", "started_at", "expected"),
    [
        (None, False, NOW, True),
        # of its own, told again
        (record("a", 7), True, NOW + 1, False),
        (record("a", 7), False, NOW + 1, False),
        # while it ran, another one has made the same
        (record("b", 6), True, NOW, True),
        (record("b", 7), True, NOW, False),
        (record("b", 8), True, NOW - 9, False),
        (record("b", 8), False, NOW, True),
        # it was given this, and did not do with it
        (record("b", 6), True, NOW + 1, True),
        (record("b", 8), True, NOW + 1, True),
    ],
)
def test_what_takes_the_place_of_what(seen: SharedRecord | None, stored: bool, started_at: int, expected: bool) -> None:
    assert should_replace(record("a", 7), seen, stored=stored, started_at=started_at) is expected
