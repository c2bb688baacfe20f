"""Provide a claimed job, a clock, and a scripted control plane."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.contract.checkpoints.manifest import Chunk, ChunkedFile, Manifest, Pack
from baton.contract.fleets.fleet import MachineOrders, MachineState
from baton.contract.worker.calls import HeartbeatAnswer, HeartbeatRequest, WorkItem
from baton.contract.worker.control import Directive
from gpu_client.checkpoints.save.checkpoint_commit import Committed
from gpu_client.transport.api.http import parse_error
from gpu_client.transport.errors import ApiError, api_error_class
from gpu_client.transport.net.digests import digest_bytes

JOB_ID = "146683a1-cb76-4702-9fef-fcccd32594f1"
TOKEN = "the-lease-token-of-this-attempt"


def make_item(**fields: Any) -> WorkItem:
    """Make a claim's answer; a test names only the fields that it is about."""
    return WorkItem(
        **{
            "id": JOB_ID,
            "epoch": 3,
            "lease_token": TOKEN,
            "lease_duration_s": 90,
            "lease_expires_at": 1_790_000_090,
            "heartbeat_interval_s": 30,
            "server_time": 1_790_000_000,
            "command": ["train"],
            "parameters": {},
            "environment": {},
            "inputs": [],
            "outputs": [],
            "data_bucket": "training-data",
            "checkpoint_bucket": "training-checkpoints",
            "checkpoint_prefix": f"jobs/{JOB_ID}/",
            "resume": [],
            **fields,
        }
    )


def make_manifest(job_id: str, step: int, epoch: int, directory: Path) -> Manifest:
    """Make a manifest of the files in `directory`, each a chunk in a pack of its own."""
    packs, chunks, files = [], [], []
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        found = digest_bytes(path.read_bytes())
        if found.size_bytes and found.blake3 not in [chunk.blake3 for chunk in chunks]:
            packs.append(Pack(blake3=found.blake3, size_bytes=found.size_bytes, crc64nvme=found.crc64nvme))
            chunks.append(Chunk(blake3=found.blake3, size_bytes=found.size_bytes, pack=len(packs) - 1))
        indices = [number for number, chunk in enumerate(chunks) if chunk.blake3 == found.blake3]
        name = path.relative_to(directory).as_posix()
        files.append(ChunkedFile(path=name, size_bytes=found.size_bytes, chunks=indices))
    return Manifest(version=2, job_id=job_id, step=step, epoch=epoch, packs=packs, chunks=chunks, files=files)


def make_committed(step: int, manifest: Manifest, *, epoch: int = 3, seconds: float = 0.0) -> Committed:
    """Make an accepted commit: of 100 bytes 40 were stored already, and 30 had to be sent."""
    return Committed(
        step=step,
        epoch=epoch,
        manifest=manifest,
        api_calls=2,
        raw_bytes=100,
        reused_bytes=40,
        encoded_bytes=50,
        uploaded_bytes=30,
        uploaded_packs=1,
        hash_s=0.0,
        encode_s=0.0,
        upload_s=0.0,
        seconds=seconds,
    )


def make_answer(directive: Directive = Directive.CONTINUE, **fields: Any) -> HeartbeatAnswer:
    """Make a heartbeat's answer."""
    return HeartbeatAnswer(
        **{
            "directive": directive,
            "epoch": 3,
            "lease_expires_at": 1_790_000_090,
            "lease_duration_s": 90,
            "heartbeat_interval_s": 30,
            "server_time": 1_790_000_000,
            **fields,
        }
    )


def orders(**fields: Any) -> MachineOrders:
    """Make the answer to a machine's heartbeat."""
    values = {"state": MachineState.READY, "drain": False, "alone_s": 900, "heartbeat_interval_s": 60, **fields}
    return MachineOrders(**values)


def refusal(code: str, status: int = 409) -> ApiError:
    """Make the control plane's refusal with this code."""
    return api_error_class(code, status)(code=code, status=status, message=f"refused: {code}")


def foreign(status: int) -> ApiError:
    """Make a refusal by a proxy, a firewall or a gateway in deployment."""
    return parse_error(status, b"<html>no</html>")


class Heart:
    """Answers heartbeats with the next of `answers`, the last one forever; records the requests."""

    def __init__(self, *answers: HeartbeatAnswer | BaseException) -> None:
        self.answers: list[HeartbeatAnswer | BaseException] = list(answers) or [make_answer()]
        self.requests: list[HeartbeatRequest] = []
        self.before: Callable[[], object] = lambda: None

    def __call__(self, request: HeartbeatRequest) -> HeartbeatAnswer:
        self.requests.append(request)
        self.before()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer
