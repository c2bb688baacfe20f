"""A training by the calls of a worker: points, output, checkpoints, decisions of rules."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import requests
from PIL import Image

from baton.contract.checkpoints.manifest import Manifest
from baton.contract.jobs.goodput import Goodput
from baton.contract.names import CHECKPOINTS_BUCKET
from baton.contract.worker.calls import DeclaredArtifact, HeartbeatRequest
from baton.contract.worker.control import ControlReport, Decision, RuleStatus
from baton.contract.worker.output import LogChunk, ReportedPoint
from gpu_client.checkpoints.save.checkpoint_commit import commit_checkpoint
from tests.e2e.console.scenes import HeldJob
from tests.kits.files.declared_files import described, in_packs
from tests.kits.stack.control_plane import ControlPlane

RULES = """rules:
  - name: spike
    when: loss > 3 * mean(loss, 20)
    do: {set: {knob: lr, factor: 0.5}}
"""


class Training:
    """Attempt at a job: what its worker would send."""

    def __init__(self, held: HeldJob, *, seed: int = 1) -> None:
        self._worker, self._work = held.worker, held.work
        self._random = random.Random(seed)
        self._lines = 0
        self._points = 0
        self._decisions = 0

    def train(self, first: int, last: int, total_steps: int, *, every: int = 1) -> None:
        """Report the steps with points and output, and the last one with a heartbeat."""
        steps = range(first, last + 1, every)
        points = [self._point(step) for step in steps]
        lines = [f"step {point.step:5d}  loss {point.metrics['loss']:.4f}" for point in points]
        at = 0
        while at < len(points):
            self.send(lines[at : at + 400], points[at : at + 400])
            at += 400
        goodput = Goodput(
            productive_s=0.4 * len(points), repeated_s=31, stalled_s=6, transferring_s=12, idle_s=22,
            checkpoints_committed=4, raw_bytes=1_184_000_000, uploaded_bytes=610_000_000,
        )  # fmt: skip
        self._beat(last, total_steps, metrics=dict(points[-1].metrics), goodput=goodput)

    def send(self, lines: Sequence[str], points: Sequence[ReportedPoint] = ()) -> None:
        """Store a chunk of output."""
        chunk = LogChunk(first_line=self._lines, lines=list(lines), first_point=self._points, points=list(points))
        self._worker.send_logs(self._work.id, self._work.lease_token, chunk)
        self._lines += len(lines)
        self._points += len(points)

    def commit(self, step: int, total_bytes: int = 4096, **metrics: float) -> None:
        """Commit a checkpoint."""
        data = self._random.randbytes(total_bytes)
        manifest = Manifest.model_validate(
            {
                "version": 2,
                "job_id": self._work.id,
                "epoch": self._work.epoch,
                "step": step,
                "metrics": metrics,
                **in_packs({"model.bin": data}),
            }
        )
        answer = self._worker.commit(self._work.lease_token, manifest)
        for upload in answer.missing:
            requests.put(upload.url, headers=upload.headers, data=data, timeout=30).raise_for_status()
        assert self._worker.commit(self._work.lease_token, manifest).committed

    def fire(self, rule: str, step: int, operands: Mapping[str, float], actions: Sequence[str]) -> None:
        """Report that a rule fired and acted."""
        decisions = []
        for type_ in ("rule.fired", "action.applied"):
            self._decisions += 1
            decisions.append(
                Decision.model_validate(
                    {
                        "number": self._decisions, "type": type_, "rule": rule, "revision": 1, "step": step,
                        "at": 1_790_000_000, "operands": dict(operands) if type_ == "rule.fired" else {},
                        "actions": list(actions),
                    }
                )
            )  # fmt: skip
        status = RuleStatus(rule=rule, state="cooldown", said="fired at step 620; next check step 720", fires=1)
        report = ControlReport(rules_revision=1, commands_seq=0, step=1, decisions=decisions, statuses=[status])
        self._beat(step, None, control=report)

    def store_picture(self, step: int, index: int) -> None:
        """Store a validation picture."""
        image = Image.new("RGB", (96, 96), (40 + step // 8 % 200, 90, 60 + 50 * index))
        image.save(file := io.BytesIO(), "PNG")
        data = file.getvalue()
        declared = DeclaredArtifact(**described(f"validation/step-{step:06d}-{index}.png", data))
        answer = self._worker.declare_artifacts(self._work.id, self._work.lease_token, [declared])
        for upload in answer.missing:
            requests.put(upload.url, headers=upload.headers, data=data, timeout=30).raise_for_status()

    def _point(self, step: int) -> ReportedPoint:
        loss = 2.2 * math.exp(-step / 500) + 0.25 + self._random.gauss(0, 0.05)
        if 612 <= step <= 624:
            loss *= 3.5
        metrics: dict[str, Any] = {"loss": round(max(loss, 0.01), 5), "lr": 1e-3 * (0.5 if step > 620 else 1)}
        if step % 50 == 0:
            metrics["eval.loss"] = round(loss * 1.1, 5)
        return ReportedPoint(step=step, at=1_790_000_000 + step, metrics=metrics)

    def _beat(self, step: int, total_steps: int | None, **more: Any) -> None:
        request = HeartbeatRequest(step=step, total_steps=total_steps, **more)
        self._worker.heartbeat(self._work.id, self._work.lease_token, request)


def commit_files(held: HeldJob, directory: Path, files: Mapping[str, bytes | int], step: int) -> Manifest:
    """Commit files as an agent on a slow line does, where codecs pay. A number is the size of a file of zeros."""
    for path, content in files.items():
        place = directory / "checkpoint" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("wb") as file:
            if isinstance(content, int):
                file.truncate(content)
            else:
                file.write(content)
    return commit_checkpoint(
        held.worker, held.worker.transfer, held.work, directory / "checkpoint", step,
        metrics={"loss": 0.5}, upload_bytes_per_s=1e6, spool=directory / "spool",
    ).manifest  # fmt: skip


def store_long_curve(stack: ControlPlane, job_id: str, points: int, *, per_chunk: int = 1000) -> None:
    """Store the chunks of a long training past the API, which would take a thousand calls."""

    def loss(step: int) -> float:
        return round(2 * math.exp(-step / (points / 4)) + (step * 7919 % 997) / 5000, 5)

    for first in range(0, points, per_chunk):
        steps = range(first, first + per_chunk)
        reported = [{"step": step, "at": step, "metrics": {"loss": loss(step)}} for step in steps]
        chunk = {"epoch": 1, "first_line": 0, "at": 1_790_000_000, "lines": [], "points": reported}
        key = f"default/jobs/{job_id}/logs/{1:010d}-{0:013d}-{first:013d}p"
        stack.objects.put_object(Bucket=CHECKPOINTS_BUCKET, Key=key, Body=json.dumps(chunk).encode())
