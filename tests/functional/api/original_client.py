"""A client of the original Dreambooth orchestrator: only what its documentation and its API said, none of our words.

One key for everything; tokens for transfers; multipart uploads; no lease, no manifest, empty heartbeats.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import requests

PART_BYTES = 5 * 1024 * 1024
TIMEOUT_S = 30

# The example of its documentation, which has no class_prompt: there its training script ended with an error.
JOB_BODY: dict[str, Any] = {
    "instance_prompt": "timberdog",
    "instance_data_prefix": "timber/",
    "class_prompt": "dog",
    "max_train_steps": 1400,
    "num_train_epochs": 1,
    "train_batch_size": 1,
    "learning_rate": 0.000001,
    "use_8bit_adam": False,
    "mixed_precision": "fp16",
    "resolution": 1024,
    "gradient_accumulation_steps": 4,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "train_text_encoder": True,
    "gradient_checkpointing": False,
    "with_prior_preservation": True,
    "prior_loss_weight": 1,
    "validation_prompt": "timberdog as an ace space pilot, detailed illustration",
    "validation_epochs": 10,
    "checkpointing_steps": 50,
}


class OriginalClient:
    """`machine_id` as Salad sets it; "" where it does not."""

    def __init__(self, url: str, key: str, machine_id: str = "") -> None:
        self.url = url
        self.salad = {
            "organization_name": "acme",
            "project_name": "dreams",
            "container_group_name": "trainers",
            "machine_id": machine_id,
            "container_group_id": "0f3e",
        }
        self.http = requests.Session()
        self.http.headers["x-api-key"] = key

    def close(self) -> None:
        self.http.close()

    def submit(self, body: dict[str, Any]) -> dict[str, Any]:
        job: dict[str, Any] = self._json("POST", "/job", json=body)
        return job

    def job(self, job_id: str) -> dict[str, Any]:
        job: dict[str, Any] = self._json("GET", f"/job/{job_id}")
        return job

    def events(self, job_id: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self._json("GET", f"/job/{job_id}/events")
        return events

    def stop(self, job_id: str) -> dict[str, Any]:
        said: dict[str, Any] = self._json("POST", f"/job/{job_id}/stop")
        return said

    def work(self) -> dict[str, Any] | None:
        jobs: list[dict[str, Any]] = self._json("GET", "/work", params=self.salad)
        return jobs[0] if jobs else None

    def heartbeat(self, job_id: str) -> int:
        """The status: 400 means stop."""
        return self.http.post(f"{self.url}/heartbeat/{job_id}", timeout=TIMEOUT_S).status_code

    def report(self, what: str, job: dict[str, Any], key: str = "") -> dict[str, Any]:
        """`progress`, `complete` or `fail`."""
        body = {"job_id": job["id"], "bucket_name": job["checkpoint_bucket"], "key": key, **self.salad}
        said: dict[str, Any] = self._json("POST", f"/{what}", json=body)
        return said

    def download(self, bucket: str, key: str) -> bytes:
        token = self._token("download", bucket, key)
        answer = self.http.get(
            f"{self.url}/download/{bucket}/{quote(key)}", headers={"x-download-token": token}, timeout=TIMEOUT_S
        )
        answer.raise_for_status()
        return answer.content

    def upload(self, bucket: str, key: str, data: bytes) -> None:
        headers = {"x-upload-token": self._token("upload", bucket, key)}
        target = f"{self.url}/upload/{bucket}/{quote(key)}"
        made = self.http.post(target, params={"action": "mpu-create"}, headers=headers, timeout=TIMEOUT_S)
        made.raise_for_status()
        upload_id = made.json()["uploadId"]
        parts = []
        for number, start in enumerate(range(0, max(len(data), 1), PART_BYTES), start=1):
            put = self.http.put(
                target,
                params={"uploadId": upload_id, "partNumber": str(number)},
                data=data[start : start + PART_BYTES],
                headers=headers,
                timeout=TIMEOUT_S,
            )
            put.raise_for_status()
            parts.append({"etag": put.headers["ETag"], "partNumber": number})
        query = {"action": "mpu-complete", "uploadId": upload_id}
        done = self.http.post(target, params=query, json={"parts": parts}, headers=headers, timeout=TIMEOUT_S)
        done.raise_for_status()
        assert done.headers["ETag"]

    def _token(self, kind: str, bucket: str, key: str) -> str:
        query = {"key": key, "bucket": bucket}
        return str(self._json("GET", f"/{kind}/token", params=query)["token"])

    def _json(self, method: str, path: str, **sent: Any) -> Any:
        """The body of an answer that must be good."""
        answer = self.http.request(method, f"{self.url}{path}", timeout=TIMEOUT_S, **sent)
        answer.raise_for_status()
        return answer.json()
