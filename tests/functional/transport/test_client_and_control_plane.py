"""The client against the real control plane in a process of its own: one job, two attempts, bytes that come back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.contract.admin.keys import KeyCreate
from baton.contract.jobs.job import FailureClass, InputRef, JobState, JobSubmit
from baton.contract.jobs.policy import Policy
from baton.contract.names import Scope
from baton.contract.worker.calls import CompleteRequest, FailRequest, HeartbeatRequest, ReleaseRequest, WorkQuery
from baton.contract.worker.control import Directive
from baton.contract.worker.output import LogChunk
from gpu_client.checkpoints.restore.checkpoint_restore import restore
from gpu_client.checkpoints.save.artifacts import collect_outputs, upload_artifacts
from gpu_client.checkpoints.save.checkpoint_commit import commit_checkpoint
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import InvalidRequest, LeaseLost, NotFound, StepNotNewer, Unauthorized
from gpu_client.transport.net.digests import hash_file
from gpu_client.transport.transfer.manager import Download
from tests.kits.clouds.emulator import unique
from tests.kits.files.directories import files_below, write_files

pytestmark = [pytest.mark.emulator, pytest.mark.processes]


@pytest.fixture(scope="module")
def stack() -> Iterator[dict[str, Any]]:
    """`python -m functions.local`: its URL and keys."""
    with subprocess.Popen(
        [sys.executable, "-m", "functions.local", "--json", "--forget", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
def user(stack: dict[str, Any]) -> Iterator[BatonClient]:
    with BatonClient(stack["url"], stack["keys"]["submit"]) as client:
        yield client


@pytest.fixture
def worker(stack: dict[str, Any]) -> Iterator[BatonClient]:
    with BatonClient(stack["url"], stack["keys"]["worker"]) as client:
        yield client


def test_a_job_from_submission_to_its_artifact(user: BatonClient, worker: BatonClient, tmp_path: Path) -> None:
    queue, prefix = unique("q"), unique("in")
    images = write_files(tmp_path / "images", {f"{digit}/{digit} ü.png": b"%d" % digit * 50 for digit in range(10)})
    user.upload_files("training-data", {f"{prefix}/{name}": images / name for name in files_below(images)})
    assert len(user.list_objects(prefix=prefix + "/").objects) == 10
    job = user.submit(
        JobSubmit(
            command=["train"], queue=queue, inputs=[InputRef(prefix=prefix + "/", into="digits")], outputs=["model.bin"]
        )
    )

    # the first attempt commits two checkpoints that share a file, and goes away
    first = worker.claim(WorkQuery(queue=queue, machine_id="m-1"))
    assert first is not None
    assert (first.id, first.epoch, first.resume) == (job.id, 1, [])
    for page in worker.inputs(job.id, first.lease_token):
        worker.transfer.download(
            [
                Download(name=found.key, url=found.url, root=tmp_path / "data", path=found.path, fsync=False)
                for found in page.inputs
            ]
        )
    assert files_below(tmp_path / "data") == {f"digits/{name}": data for name, data in files_below(images).items()}
    assert worker.heartbeat(job.id, first.lease_token, HeartbeatRequest(step=7)).directive is Directive.CONTINUE
    made = {}
    for step in (10, 20):
        made[step] = {"model.bin": b"%d" % step * 1000, "frozen/base.bin": b"base" * 1000, "empty": b""}
        place = write_files(tmp_path / f"made-{step}", made[step])
        done = commit_checkpoint(worker, worker.transfer, first, place, step, metrics={"loss": 1 / step})
        assert (done.api_calls, done.raw_bytes, done.uploaded_packs) == (2, 6000, 1)
    again = commit_checkpoint(worker, worker.transfer, first, tmp_path / "made-20", 20, metrics={"loss": 1 / 20})
    assert (again.api_calls, again.uploaded_bytes) == (1, 0)
    with pytest.raises(StepNotNewer):
        commit_checkpoint(worker, worker.transfer, first, tmp_path / "made-10", 15)
    worker.send_logs(job.id, first.lease_token, LogChunk(first_line=0, lines=["hello"]))
    worker.release(first.lease_token, ReleaseRequest(job_id=job.id))

    # the second one goes on from the newest, and the first can change nothing any more
    second = worker.claim(WorkQuery(queue=queue, machine_id="m-2"))
    assert second is not None
    restored = restore(worker, worker.transfer, second, tmp_path / "output")
    assert restored is not None
    assert (restored.step, restored.epoch, files_below(restored.path)) == (20, 1, made[20])
    with pytest.raises(LeaseLost):
        commit_checkpoint(worker, worker.transfer, first, tmp_path / "made-20", 30)
    worker.report_damaged(job.id, 20, second.lease_token, epoch=1, message="said for the test")
    commit_checkpoint(worker, worker.transfer, second, tmp_path / "made-10", 15)
    output = write_files(tmp_path / "output", {"model.bin": b"final"})
    artifacts = upload_artifacts(worker, worker.transfer, second, collect_outputs(output, second.outputs))
    ending = CompleteRequest(job_id=job.id, artifacts=artifacts, step=40)
    assert worker.complete(second.lease_token, ending).state == "complete"
    assert worker.complete(second.lease_token, ending).state == "complete"

    # the user fetches the result, verified
    job = user.get_job(job.id)
    assert (job.state, job.epoch, len(job.artifacts)) == (JobState.COMPLETE, 2, 1)
    artifact = job.artifacts[0]
    user.download(artifact.bucket, artifact.key, tmp_path / "fetched.bin", digest=hash_file(output / "model.bin"))
    assert (tmp_path / "fetched.bin").read_bytes() == b"final"
    assert {view.step: view.damaged for view in user.checkpoints(job.id).checkpoints} == {
        15: False,
        20: True,
        10: False,
    }
    assert [line.text for line in user.logs(job.id).lines] == ["hello"]
    assert [attempt.machine_id for attempt in user.attempts(job.id).attempts] == ["m-1", "m-2"]
    events = [
        event.type
        for page in pages(lambda cursor: user.events(job.id, limit=3, cursor=cursor))
        for event in page.events
    ]
    assert events[0] == "job.submitted"
    assert events[-1] == "job.completed"


def test_steering(user: BatonClient, worker: BatonClient) -> None:
    queue = unique("q")
    job = user.submit(JobSubmit(command=["train"], queue=queue, policy=Policy(max_failures=1)))
    assert [item["id"] for item in worker.peek(WorkQuery(queue=queue))] == [job.id]
    assert user.pause(job.id).state == "paused"
    assert worker.claim(WorkQuery(queue=queue)) is None
    assert user.resume(job.id).state == "pending"
    item = worker.claim(WorkQuery(queue=queue))
    assert item is not None
    failure = FailRequest(job_id=job.id, failure_class=FailureClass.SEGFAULT, signal=11, log_tail=["bye"])
    assert worker.fail(item.lease_token, failure).state == "failed"
    assert user.retry(job.id).state == "pending"
    assert user.stop(job.id).state == "canceled"
    assert [found.id for found in user.jobs(queue=queue, status=JobState.CANCELED).jobs] == [job.id]


def test_submitting_twice_with_one_key_is_one_job(user: BatonClient) -> None:
    wanted = JobSubmit(command=["train"], queue=unique("q"))
    key = unique("key")
    assert user.submit(wanted, idempotency_key=key).id == user.submit(wanted, idempotency_key=key).id
    batch = user.submit_batch([wanted, wanted], idempotency_key=unique("key"))
    assert len({job.id for job in batch}) == 2


def test_refusals(stack: dict[str, Any], user: BatonClient, worker: BatonClient, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        user.get_job("146683a1-cb76-4702-9fef-fcccd32594f1")
    with pytest.raises(Unauthorized, match="wrong_scope"):
        worker.jobs()
    with pytest.raises(InvalidRequest):
        user.jobs(limit=0)
    with pytest.raises(NotFound):
        user.download("training-data", "absent", tmp_path / "x")
    with BatonClient(stack["url"], "baton_nobody00_wrong") as stranger, pytest.raises(Unauthorized):
        stranger.jobs()


def test_keys(stack: dict[str, Any]) -> None:
    with BatonClient(stack["url"], stack["keys"]["admin"]) as admin:
        made = admin.create_key(KeyCreate(name="laptop", scopes=[Scope.SUBMIT]))
        assert made.id in [key.id for page in pages(lambda cursor: admin.list_keys(cursor=cursor)) for key in page.keys]
        admin.revoke_key(made.id)
        revoked = {key.id: key.revoked_at for key in admin.list_keys().keys}
        assert revoked[made.id] is not None
        assert admin.health().status == "ok"
