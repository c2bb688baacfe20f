"""Make the calls of an original orchestrator's worker against the API in this process."""

from __future__ import annotations

from typing import Any

from baton.contract.names import CHECKPOINTS_BUCKET, Scope
from tests.kits.api.harness import SOURCE_IP, TENANT, Answer, Api

JOB = {"instance_prompt": "dog", "instance_data_prefix": "dog/"}


class Original:
    """A worker on one machine. `machine_id` is None where the variable is not set: then no call names a machine.

    `key`: the single key that the original knows; another one of the tenant unless given. `holds` keeps the last claim
    of each job, with which the program goes on whatever the server thinks.
    """

    def __init__(self, api: Api, machine_id: str | None, *, key: str | None = None, source_ip: str = SOURCE_IP) -> None:
        self.api = api
        self.key = key or api.issue(TENANT, Scope.SUBMIT, Scope.WORKER)
        self.salad = {"machine_id": machine_id} if machine_id is not None else {}
        self.source_ip = source_ip
        self.holds: dict[str, dict[str, Any]] = {}

    def work(self) -> dict[str, Any] | None:
        found = self.call("GET", "/work", query=self.salad).ok()
        for job in found:
            self.holds[job["id"]] = job
        return found[0] if found else None

    def taken(self) -> dict[str, Any]:
        """A claim that must succeed."""
        job = self.work()
        assert job is not None, "no work"
        return job

    def heartbeat(self, job_id: str, body: Any = None) -> Answer:
        """Send the heartbeat of the original's worker, or `body`; the original's documentation prescribes {}."""
        return self.call("POST", f"/heartbeat/{job_id}", self.salad if body is None else body)

    def report(self, what: str, job_id: str, key: str | None = None) -> Answer:
        """`progress`, `complete` or `fail`; of the last the key is the prefix alone."""
        named = self.prefix(job_id) if key is None else key
        body = {"job_id": job_id, "bucket_name": CHECKPOINTS_BUCKET, "key": named, **self.salad}
        return self.call("POST", f"/{what}", body)

    def reports(self, job_id: str) -> list[Answer]:
        """Send progress, completion and failure, with the keys that the original's worker names."""
        return [
            self.report("progress", job_id, self.zip_key(job_id, 100)),
            self.report("complete", job_id, self.model_key(job_id)),
            self.report("fail", job_id),
        ]

    def prefix(self, job_id: str) -> str:
        return str(self.holds[job_id]["checkpoint_prefix"])

    def zip_key(self, job_id: str, step: int) -> str:
        return f"{self.prefix(job_id)}checkpoint-{step}.zip"

    def model_key(self, job_id: str) -> str:
        return f"{self.prefix(job_id)}pytorch_lora_weights.safetensors"

    def asked_token(self, key: str, kind: str = "upload") -> Answer:
        return self.call("GET", f"/{kind}/token", query={"bucket": CHECKPOINTS_BUCKET, "key": key})

    def token(self, key: str, kind: str = "upload") -> str:
        return str(self.asked_token(key, kind).ok()["token"])

    def begin(self, key: str, token: str) -> Answer:
        target = f"/upload/{CHECKPOINTS_BUCKET}/{key}?action=mpu-create"
        return self.call("POST", target, headers={"x-upload-token": token})

    def part(self, key: str, token: str, upload_id: str, data: bytes) -> dict[str, Any]:
        """Store the one part; return the answer, which finishing the upload names."""
        target = f"/upload/{CHECKPOINTS_BUCKET}/{key}?uploadId={upload_id}&partNumber=1"
        part: dict[str, Any] = self.call("PUT", target, data, headers={"x-upload-token": token}).ok()
        return part

    def finish(self, key: str, token: str, upload_id: str, part: dict[str, Any]) -> Answer:
        headers = {"x-upload-token": token}
        target = f"/upload/{CHECKPOINTS_BUCKET}/{key}?action=mpu-complete&uploadId={upload_id}"
        return self.call("POST", target, {"parts": [part]}, headers=headers)

    def upload(self, key: str, data: bytes) -> Answer:
        token = self.token(key)
        upload_id = self.begin(key, token).ok()["uploadId"]
        return self.finish(key, token, upload_id, self.part(key, token, upload_id, data))

    def checkpoint(self, job_id: str, step: int, data: bytes = b"") -> Answer:
        key = self.zip_key(job_id, step)
        self.upload(key, data or b"zip %d" % step).ok()
        return self.report("progress", job_id, key)

    def call(self, method: str, target: str, body: Any = None, **more: Any) -> Answer:
        return self.api.call(method, target, body, key=self.key, source_ip=self.source_ip, **more)
