"""Run a whole job of the original orchestrator's worker: images, multi-part checkpoints, SIGKILL, resume, model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from baton.contract.admin.keys import KeyCreate
from baton.contract.jobs.job import AttemptEnd, JobState
from baton.contract.names import Scope
from baton.contract.worker.calls import ReleaseRequest, WorkQuery
from baton.contract.worker.control import Directive
from gpu_client.transport.api.client import BatonClient
from tests.functional.api.original_client import PART_BYTES, OriginalClient
from tests.kits.stack.control_plane import ControlPlane
from tests.kits.stack.stack import ROOT, clean_environment, leashed
from tests.kits.stack.workshop import Gate
from tests.kits.waiting import until

KIT = Path(__file__).resolve().parents[2] / "e2e" / "trainers" / "original"
STEPS = 30
SCOPES = [Scope.SUBMIT, Scope.WORKER]
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
NAMES = (*("IMG 0001 (copy).jpg", "ü+é:1.jpg", "100% dog~2.jpg", "sub dir/a&b=c;d.jpg", "日本.jpg", "'quote'!@$,.jpg"),)


class OriginalWorker:
    """Process of the worker with an `accelerate` of its own."""

    def __init__(self, url: str, key: str, directory: Path, gate: Gate) -> None:
        directory.mkdir()
        self._log = directory / "log"
        environment = {
            **clean_environment(),
            **gate.environment,
            "PATH": f"{KIT}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "API_URL": url,
            "API_KEY": key,
            "INSTANCE_DIR": str(directory / "instance"),
            "OUTPUT_DIR": str(directory / "output"),
            "HEARTBEAT_INTERVAL": "2",
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*leashed(signal.SIGKILL), str(KIT / "worker.py")],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self) -> str:
        """Read the worker's output."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """Kill the worker and its training."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)


@contextmanager
def relay_to(url: str) -> Iterator[str]:
    """Run a relay as a process; returns its URL."""
    command = [*leashed(signal.SIGKILL), "gpu_client.original_relay", "--port", "0"]
    environment = {**clean_environment(), "BATON_API_URL": url}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield process.stderr.readline().rpartition("API_URL=")[2].strip()
        finally:
            process.kill()


def run_whole_job(plane: ControlPlane, url: str, tmp_path: Path) -> None:
    """Run the job by workers that call the API at `url`; the first dies after its second checkpoint.

    Both workers have the one key that the original knows, and the environment of neither has a machine id.
    """
    training = _training()
    key = plane.client.create_key(KeyCreate(name="dreambooth", scopes=SCOPES)).key
    client = OriginalClient(url, key)
    prefix = f"{tmp_path.name}/"
    images = {f"{prefix}{name}": f"image of {name}".encode() * 100 for name in NAMES}
    for name, data in images.items():
        assert client.upload("training-data", name, data) == 200
    job = client.submit(
        {
            "instance_prompt": "dog",
            "instance_data_prefix": prefix,
            "with_prior_preservation": True,  # without a class_prompt, as in its documentation
            "max_train_steps": STEPS,
            "checkpointing_steps": 10,
        }
    )
    gate = Gate(tmp_path / "gate", 10)
    first = second = OriginalWorker(url, key, tmp_path / "w1", gate)
    try:
        for step in (10, 20):
            gate.set(step)
            _until_committed(plane, job["id"], step, first)
        first.kill()
        plane.expire_lease(job["id"])
        _assert_ended_by_another_lease(plane, client, job["id"])
        # The worker stops to watch when the training ends, therefore the training waits for the commit of step 30.
        gate.set(STEPS)
        second = OriginalWorker(url, key, tmp_path / "w2", gate)
        _until_committed(plane, job["id"], STEPS, second)
        _assert_fenced(client, job["id"])
        gate.open()
        done = plane.wait_for(job["id"], JobState.COMPLETE, JobState.FAILED)
        assert done.state is JobState.COMPLETE, second.log()
    finally:
        first.kill()
        second.kill()
    lost, released, finished = plane.attempts(job["id"])
    ends = (AttemptEnd.INTERRUPTED, AttemptEnd.RELEASED, AttemptEnd.COMPLETE)
    assert (lost.end, released.end, finished.end) == ends
    assert finished.resumed_step == 20
    assert plane.steps(job["id"]) == [10, 20, 30]
    stored = client.job(job["id"])
    state, digest = "", training.images_digest({name.rpartition("/")[2]: data for name, data in images.items()})
    for step in range(1, STEPS + 1):
        state = training.next_state(state, step, digest)
    assert client.download(stored["model_bucket"], stored["model_key"]) == training.model(state)
    _assert_original_shapes(client, stored)
    zipped = client.download("training-checkpoints", f"jobs/{job['id']}/attempt-3/checkpoint-30.zip")
    assert len(zipped) > PART_BYTES and training.model(state) in zipped


def _assert_ended_by_another_lease(plane: ControlPlane, client: OriginalClient, job_id: str) -> None:
    """Check that a lease-aware worker takes the job, and that heartbeats of the first worker then are 400.

    The original ends its training on 400 alone; after another status the original calls again without a pause.
    """
    worker = BatonClient(plane.url, client.key)
    work = until(lambda: worker.claim(WorkQuery(machine_id="aware")), what="the claim of the lost job")
    assert (work.id, work.epoch) == (job_id, 2)
    assert client.heartbeat(job_id) == 400
    assert worker.heartbeat(job_id, work.lease_token).directive is Directive.CONTINUE
    worker.release(work.lease_token, ReleaseRequest(job_id=job_id, message="the original worker goes on"))


def _assert_fenced(client: OriginalClient, job_id: str) -> None:
    """Check that writes of the first attempt are refused, although key and address are the second one's."""
    running = client.job(job_id)
    prefix = f"jobs/{job_id}/attempt-1/"
    bodies = {"progress": f"{prefix}checkpoint-20.zip", "complete": f"{prefix}checkpoint-20.zip", "fail": prefix}
    for what, key in bodies.items():
        body = {"job_id": job_id, "bucket_name": running["checkpoint_bucket"], "key": key}
        refused = client.http.post(f"{client.url}/{what}", json=body)
        assert (refused.status_code, refused.json()["code"]) == (409, "lease_lost"), refused.text
        assert isinstance(refused.json()["error"], str)
    after = client.job(job_id)
    assert (after["status"], after["num_failures"]) == ("running", 0)


def _assert_original_shapes(client: OriginalClient, job: dict[str, Any]) -> None:
    """Check times, events and answers about an ended job and an unknown one."""
    (listed,) = [row for row in client.jobs() if row["id"] == job["id"]]
    for row in (job, listed):
        assert all(TIME.fullmatch(row[name]) for name in ("created_at", "started_at", "completed_at"))
    events = client.events(job["id"])
    assert all(event["job_id"] == job["id"] and TIME.fullmatch(event["timestamp"]) for event in events)
    assert len({event["id"] for event in events}) == len(events) and "event_data" in events[0]
    assert client.events("00000000-0000-4000-8000-000000000000") == []
    assert client.stop(job["id"])["status"] == "ok"
    assert client.heartbeat(job["id"]) == 400


def _until_committed(plane: ControlPlane, job_id: str, step: int, worker: OriginalWorker) -> None:
    until(lambda: plane.steps(job_id)[-1:] == [step], what=f"the commit of step {step}: {worker.log()}")


def _training() -> ModuleType:
    """Load the training that the workers run as a module."""
    loader = SourceFileLoader("accelerate_of_the_original", str(KIT / "accelerate"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
