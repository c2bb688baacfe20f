"""What the story is made of: keys, data, jobs, workers, the model that comes back. All of it through the API."""

from __future__ import annotations

from pathlib import Path

from demo.saving import size_text
from demo.summary import Caller, caller_of, worker_stats

from baton.contract.jobs import InputRef, JobState, JobSubmit, JobView, Policy, Retention
from baton.contract.keys import KeyCreate
from baton.contract.names import DATA_BUCKET, Scope
from demo import digits
from demo.failure import DemoError
from demo.processes import Child, Household, Stack
from demo.screen import Screen
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.net.digests import FileDigest, hash_file
from gpu_client.transport.retry import RetryPolicy

STEPS = 500
CHECKPOINT_EVERY = 80
"""At 40 % of the steps the last checkpoint is some way back, so that there is something to repeat."""
BATCH_SIZE = 1024
"""Most of the training set: the smaller the batch, the more the curve is noise."""
UPLINK_MBIT_S = 10
"""Of a home line. On one as fast as within this machine no codec would pay."""
HIDDEN = 20
LEARNING_RATE = 2e-3
MODEL = "model.safetensors"
PREFIX = "digits/"


IMPATIENT = RetryPolicy(budget_s=15.0)
"""The control plane is on this machine: when it is silent for long, it is gone."""


class Steps:
    """The steps and what they need of each other. `scratch` and `memory` are directories that nobody keeps."""

    def __init__(self, household: Household, screen: Screen, scratch: Path, memory: Path) -> None:
        self.household = household
        self._screen = screen
        self.scratch = scratch
        self._memory = memory
        self._stack = Stack("", "")
        self._worker_key = ""
        self._submit_key = ""
        self._callers: dict[str, Caller] = {}
        self._stats_files: dict[str, Path] = {}

    def start_control_plane(self) -> None:
        """The local stack, and a key each for the user and the workers: neither may do what the other may."""
        with self._screen.phase("start", "Start the control plane") as phase:
            self._stack = self.household.start_stack()
            phase.ends_with(self._stack.url)
        with (
            self._screen.phase("keys", "Make API keys") as phase,
            BatonClient(self._stack.url, self._stack.admin_key) as admin,
        ):
            self._submit_key = admin.create_key(KeyCreate(name="demo user", scopes=[Scope.SUBMIT])).key
            self._worker_key = admin.create_key(KeyCreate(name="demo workers", scopes=[Scope.WORKER])).key
            self._callers["admin"] = caller_of(admin.stats.requests, admin.transfer.stats.as_dict())
            phase.ends_with("one to submit, one to work")

    def user(self) -> BatonClient:
        """A client with the user's key."""
        return BatonClient(self._stack.url, self._submit_key, policy=IMPATIENT)

    def push_digits(self, client: BatonClient) -> digits.Digits:
        """All digits, as PNG files."""
        with self._screen.phase("write", "Write the digits as PNG") as phase:
            data = digits.load()
            files = digits.write_pngs(data, self.scratch / "digits")
            size_bytes = sum(path.stat().st_size for path in files.values())
            phase.ends_with(f"{len(files):,} files, {size_text(size_bytes)}")
        with self._screen.phase("push", "Push them through the API", size_bytes) as phase:
            client.upload_files(DATA_BUCKET, {PREFIX + name: path for name, path in files.items()}, progress=phase.add)
            seconds = max(self._screen.elapsed_s - phase.began_s, 0.01)
            phase.ends_with(f"{len(files) / seconds:.0f} files a second")
        return data

    def submit(self, client: BatonClient, name: str) -> JobView:
        """The job; each time the same one but for its name."""
        parameters = {
            "steps": STEPS,
            "batch_size": BATCH_SIZE,
            "hidden": HIDDEN,
            "learning_rate": LEARNING_RATE,
            "checkpoint_every": CHECKPOINT_EVERY,
        }
        return client.submit(
            JobSubmit(
                recipe="digits@1",
                name=name,
                parameters=parameters,
                inputs=[InputRef(prefix=PREFIX, into="digits")],
                # Every checkpoint is kept: each holds a point of the curve.
                policy=Policy(heartbeat_interval_s=1, retention=Retention(keep_last=100)),
            )
        )

    def start_worker(self, number: int, *, max_jobs: int | None = 1) -> Child:
        """As if on a machine of its own, at somebody's home: with its own name, machine id, disk and slow uplink.

        It leaves after `max_jobs`; None: it stays.
        """
        name = f"worker-{number}"
        self._stats_files[name] = self.scratch / f"{name}.json"
        return self.household.start_worker(
            name,
            {
                "BATON_API_URL": self._stack.url,
                "BATON_API_KEY": self._worker_key,
                "BATON_WORKSPACE": str(self.scratch / name),
                # what a killed worker leaves there goes when the demo does
                "BATON_ARENA_DIR": str(self._memory),
                "BATON_WORKER_ID": name,
                "BATON_MACHINE_ID": f"machine-{number}",
                **({} if max_jobs is None else {"BATON_MAX_JOBS": str(max_jobs)}),
                "BATON_MAX_UPLOAD_MBIT_S": str(UPLINK_MBIT_S),
                "BATON_POLL_MIN_S": "0.5",
                "BATON_POLL_MAX_S": "1",
                "BATON_EXIT_WHEN_IDLE_S": "60",
                "BATON_STATS_FILE": str(self._stats_files[name]),
            },
        )

    def fetch_model(self, client: BatonClient, job_id: str, name: str) -> tuple[Path, FileDigest]:
        """The trained weights of a complete job, checked against the digests that the control plane recorded."""
        with self._screen.phase(f"fetch_{name}", "Fetch the model") as phase:
            job = client.get_job(job_id)
            if job.state is not JobState.COMPLETE:
                raise DemoError(f"the job should be complete but is {job.state}")
            artifact = next((one for one in job.artifacts if one.path == MODEL), None)
            if artifact is None:
                raise DemoError(f"the complete job has no artifact {MODEL}")
            path = self.scratch / f"{name}.safetensors"
            client.download(artifact.bucket, artifact.key, path)
            found = hash_file(path)
            if (artifact.size_bytes, artifact.blake3, artifact.crc64nvme) != (
                found.size_bytes,
                found.blake3,
                found.crc64nvme,
            ):
                raise DemoError(f"the fetched {MODEL} is {found}, but the control plane recorded {artifact}")
            phase.ends_with(f"{size_text(found.size_bytes)}, digest verified")
        return path, found

    def callers(self, user: BatonClient) -> dict[str, Caller]:
        """Who sent what so far; of a killed worker, as of its last heartbeat."""
        submitter = caller_of(user.stats.requests, user.transfer.stats.as_dict())
        workers = {name: worker_stats(path) for name, path in self._stats_files.items()}
        return {**self._callers, "user": submitter, **workers}
