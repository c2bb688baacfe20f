"""The local control plane and its workers: keys, data, jobs' models. Every step goes through the API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.contract.admin.keys import KeyCreate
from baton.contract.jobs.job import InputRef, JobState
from baton.contract.names import DATA_BUCKET, Scope
from demo import digits
from demo.failure import DemoError
from demo.processes import Child
from demo.runner import Stage
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.net.digests import FileDigest, hash_file
from gpu_client.transport.retry import RetryPolicy

UPLINK_MBIT_S = 10
"""Speed of a home line. At the speed of a transfer within one machine no codec would pay."""
HIDDEN = 20
"""Channels of the network of every training on the digits."""
MODEL = "model.safetensors"
DIGITS = InputRef(prefix="digits/", into="digits")
RETRY_BRIEFLY = RetryPolicy(budget_s=15.0)
"""The control plane is on this machine: if it does not answer for long, it has ended."""
COMMAND_S = 30.0
"""Deadline of one command."""


@dataclass(frozen=True)
class Traffic:
    """Traffic of one client: requests by kind, and payload bytes of objects."""

    calls: Mapping[str, int]
    uploaded_bytes: int
    downloaded_bytes: int


def traffic_of(requests: Mapping[str, int], transfer: Mapping[str, int]) -> Traffic:
    """Make the traffic of the counts of a client and of its transfers."""
    return Traffic(dict(requests), transfer["uploaded_bytes"], transfer["downloaded_bytes"])


def worker_traffic(path: Path) -> Traffic:
    """Read the statistics file that a worker writes with each heartbeat; zeros if the worker never sent one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Traffic({}, 0, 0)
    return traffic_of(found["calls"]["requests"], found["transfer"])


class LocalCluster:
    """A control plane on this machine, a key for the user and one for the workers, and workers."""

    def __init__(self, stage: Stage, *options: str) -> None:
        """Start the control plane and make the keys: each key may do only what its holder needs.

        options: further options of the control plane.
        """
        self.stage = stage
        self.screen = stage.screen
        self._stats_files: dict[str, Path] = {}
        with self.screen.phase("start", "Start the control plane") as phase:
            self._url, self._admin_key = stage.processes.start_stack(*options)
            phase.ends_with(self._url)
        with self.screen.phase("keys", "Make API keys") as phase, BatonClient(self._url, self._admin_key) as admin:
            self._submit_key = admin.create_key(KeyCreate(name="demo user", scopes=[Scope.SUBMIT])).key
            self._worker_key = admin.create_key(KeyCreate(name="demo workers", scopes=[Scope.WORKER])).key
            self._admin_traffic = traffic_of(admin.stats.requests, admin.transfer.stats.as_dict())
            phase.ends_with("one to submit, one to work")
        with self.user() as user:
            link = user.make_session_link().url
        self.screen.print_line(
            f"\n[bold]Watch the demo in a browser.[/] This link signs in once, within a minute:\n{link}\n"
        )

    def user(self) -> BatonClient:
        """Make a client with the user's key."""
        return BatonClient(self._url, self._submit_key, policy=RETRY_BRIEFLY)

    def admin(self) -> BatonClient:
        """Make a client with the admin key."""
        return BatonClient(self._url, self._admin_key, policy=RETRY_BRIEFLY)

    def run_command(self, *arguments: str) -> str:
        """Run the command `baton` with the user's key; returns its output. Raises DemoError if the command fails."""
        name = f"baton-{arguments[0]}"
        output = self.stage.scratch / f"{name}.txt"
        settings = {
            "BATON_API_URL": self._url,
            "BATON_API_KEY": self._submit_key,
            "XDG_STATE_HOME": str(self.stage.scratch),
        }
        child = self.stage.processes.start(name, "-m", "gpu_client.cli", *arguments, settings=settings, output=output)
        if exit_code := child.wait(COMMAND_S):
            raise DemoError(f"the command baton {' '.join(arguments)} failed with exit code {exit_code}", child.log)
        return output.read_text(encoding="utf-8").strip()

    def push_digits(self, client: BatonClient) -> digits.Digits:
        """Upload all digits as PNG files; jobs read them by the input `DIGITS`."""
        with self.screen.phase("write", "Write the digits as PNG") as phase:
            data = digits.load()
            files = digits.write_pngs(data, self.stage.scratch / "digits")
            size_bytes = sum(path.stat().st_size for path in files.values())
            phase.ends_with(f"{len(files):,} files, {size_text(size_bytes)}")
        with self.screen.phase("push", "Push them through the API", size_bytes) as phase:
            uploads = {f"{DIGITS.prefix}{name}": path for name, path in files.items()}
            client.upload_files(DATA_BUCKET, uploads, progress=phase.add)
            seconds = max(self.screen.elapsed_s - phase.began_s, 0.01)
            phase.ends_with(f"{len(files) / seconds:.0f} files a second")
        return data

    def start_worker(self, number: int, *, max_jobs: int | None = 1) -> Child:
        """Start a worker with its own name, machine id, disk and slow uplink, as on a machine at somebody's home.

        The worker leaves after `max_jobs` jobs; None: never.
        """
        name = f"worker-{number}"
        self._stats_files[name] = self.stage.scratch / f"{name}.json"
        settings = {
            "BATON_API_URL": self._url,
            "BATON_API_KEY": self._worker_key,
            "BATON_WORKSPACE": str(self.stage.scratch / name),
            # The demo deletes this directory, therefore also what a killed worker leaves in it.
            "BATON_ARENA_DIR": str(self.stage.memory),
            "BATON_WORKER_ID": name,
            "BATON_MACHINE_ID": f"machine-{number}",
            **({} if max_jobs is None else {"BATON_MAX_JOBS": str(max_jobs)}),
            "BATON_MAX_UPLOAD_MBIT_S": str(UPLINK_MBIT_S),
            "BATON_POLL_MIN_S": "0.5",
            "BATON_POLL_MAX_S": "1",
            "BATON_EXIT_WHEN_IDLE_S": "60",
            "BATON_STATS_FILE": str(self._stats_files[name]),
        }
        return self.stage.processes.start(name, "-m", "gpu_client.agent", settings=settings)

    def fetch_model(self, client: BatonClient, job_id: str, name: str) -> tuple[Path, FileDigest]:
        """Download the weights of a complete job. Raises DemoError unless their digests are the recorded ones."""
        with self.screen.phase(f"fetch_{name}", "Fetch the model") as phase:
            job = client.get_job(job_id)
            artifact = next((one for one in job.artifacts if one.path == MODEL), None)
            if job.state is not JobState.COMPLETE or artifact is None:
                raise DemoError(f"the job is {job.state} with the artifacts {job.artifacts}, not complete with {MODEL}")
            path = self.stage.scratch / f"{name}.safetensors"
            client.download(artifact.bucket, artifact.key, path)
            found = hash_file(path)
            recorded = (artifact.size_bytes, artifact.blake3, artifact.crc64nvme)
            if recorded != (found.size_bytes, found.blake3, found.crc64nvme):
                raise DemoError(f"the fetched {MODEL} is {found}, but the control plane recorded {artifact}")
            phase.ends_with(f"{size_text(found.size_bytes)}, digest verified")
        return path, found

    def traffic(self, user: BatonClient) -> dict[str, Traffic]:
        """Return what each client sent so far; for a killed worker, until its last heartbeat."""
        of_user = traffic_of(user.stats.requests, user.transfer.stats.as_dict())
        workers = {name: worker_traffic(path) for name, path in self._stats_files.items()}
        return {"admin": self._admin_traffic, "user": of_user, **workers}


def size_text(size_bytes: float) -> str:
    """Format a size for people: `1.2 MB`, `340 kB`."""
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.0f} kB"
