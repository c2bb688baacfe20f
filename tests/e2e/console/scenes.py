"""Jobs in all states, made by the calls of users and workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.contract.jobs.job import FailureClass, JobSubmit
from baton.contract.jobs.policy import Policy
from baton.contract.worker.calls import CompleteRequest, FailRequest, HeartbeatRequest, WorkItem, WorkQuery
from gpu_client.transport.api.client import BatonClient
from tests.kits.stack.control_plane import ControlPlane

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
GPU = "NVIDIA GeForce RTX 4090"


@dataclass(frozen=True)
class HeldJob:
    """Job that a scripted worker holds."""

    worker: BatonClient
    work: WorkItem

    def report(self, step: int, total_steps: int, loss: float, **metrics: float) -> None:
        """Report a step."""
        request = HeartbeatRequest(step=step, total_steps=total_steps, metrics={"loss": loss, **metrics})
        self.worker.heartbeat(self.work.id, self.work.lease_token, request)

    def fail(self, message: str) -> None:
        """End the attempt as failed."""
        request = FailRequest(
            job_id=self.work.id, failure_class=FailureClass.SCRIPT_ERROR, exit_code=1, message=message
        )
        self.worker.fail(self.work.lease_token, request)

    def complete(self, step: int) -> None:
        """Complete the job, which has no outputs."""
        self.worker.complete(self.work.lease_token, CompleteRequest(job_id=self.work.id, step=step))


class Scene:
    """Jobs of one queue."""

    def __init__(self, stack: ControlPlane, queue: str) -> None:
        self.stack = stack
        self.queue = queue
        self.worker = BatonClient(stack.url, stack.keys["worker"])

    def submit(self, name: str, *, tags: Mapping[str, str] | None = None, **more: Any) -> str:
        """Submit a job that no agent runs; returns its id."""
        policy = Policy(backoff_s=more.pop("backoff_s", 0), avoid_machine_s=0, max_failures=more.pop("max_failures", 3))
        job = JobSubmit(
            command=["python", "train.py"],
            name=name,
            queue=self.queue,
            outputs=[],
            tags=dict(tags or {}),
            policy=policy,
            **more,
        )
        return self.stack.client.submit(job).id

    def claim(self, machine: str, price_usd_per_hour: float | None = 0.34) -> HeldJob:
        """Claim the next job of the queue."""
        query = WorkQuery(
            queue=self.queue,
            machine_id=machine,
            provider="vast",
            gpu_model=GPU,
            vram_gib=24,
            disk_gib=100,
            gpus=1,
            price_usd_per_hour=price_usd_per_hour,
            runs_nodes=True,
        )
        work = self.worker.claim(query)
        assert work is not None, "no job waits in the queue"
        return HeldJob(self.worker, work)

    def lose(self, held: HeldJob) -> None:
        """Let the machine of a job die, until the control plane has noticed."""
        self.stack.expire_lease(held.work.id)
        self.stack.wait_for(held.work.id, "pending")

    def all_states(self) -> dict[str, str]:
        """Make a job in each state; returns the ids by name."""
        ids: dict[str, str] = {}

        def submit(name: str, **more: Any) -> str:
            ids[name] = self.submit(name, **more)
            return ids[name]

        submit("unet-baseline", tags={"project": "faces"})
        done = self.claim("m-4ac1")
        done.report(2000, 2000, 0.0412)
        done.complete(2000)

        submit("lr-too-high", max_failures=1)
        self.claim("m-4ac1").fail("loss became NaN at step 310")

        submit("stopped-by-hand")
        self.claim("m-90aa").report(80, 1000, 1.204)
        self.stack.client.stop(ids["stopped-by-hand"], message="wrong data set")

        submit(HOSTILE, tags={"<b>": "<i>"})
        self.claim("<i>machine</i>").report(12, 400, 2.31)

        submit("vit-large-finetune", tags={"project": "faces", "seed": "7"})
        for machine, step in (("m-71f0", 410), ("m-08be", 1220)):
            lost = self.claim(machine)
            lost.report(step, 5000, 0.9)
            self.lose(lost)
        self.claim("vast-29471123").report(3184, 5000, 0.2871)

        submit("sweep-03", tags={"sweep": "lr"})
        self.claim("m-5512").report(640, 1000, 0.5113)

        submit("pause-me")
        self.stack.client.pause(ids["pause-me"])

        submit("retry-soon", backoff_s=600)
        self.claim("m-5512").fail("CUDA error: device-side assert triggered")
        submit("needs-much-memory", requirements={"min_vram_gib": 80})
        return ids
