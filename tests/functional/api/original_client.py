"""Client that makes the calls of an original Dreambooth orchestrator's worker.

One key for everything; no lease, no manifest. The client follows redirects with all of its headers, uploads parts of
exactly 10 MiB by 25 threads, and believes the JSON that a part is answered with. A refused upload ends in a KeyError.
The Salad ids are sent where they are known.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

PART_BYTES = 10 * 1024 * 1024
PART_THREADS = 25
RETRIED = (400, 401, 500, 502, 503, 504)

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
    """`machine_id` as Salad sets it; "" where it does not, and then no other id of Salad's is known either."""

    def __init__(self, url: str, key: str, machine_id: str = "") -> None:
        self.url = url
        self.key = key
        self.salad = {
            "organization_name": "acme",
            "project_name": "dreams",
            "container_group_name": "trainers",
            "machine_id": machine_id,
            "container_group_id": "0f3e",
        }
        if not machine_id:
            self.salad = {}
        self.http = self._session()

    def close(self) -> None:
        self.http.close()

    def submit(self, body: dict[str, Any]) -> dict[str, Any]:
        job: dict[str, Any] = self._json("POST", "/job", json=body)
        return job

    def job(self, job_id: str) -> dict[str, Any]:
        job: dict[str, Any] = self._json("GET", f"/job/{job_id}")
        return job

    def jobs(self) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = self._json("GET", "/jobs")
        return jobs

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
        return self.http.post(f"{self.url}/heartbeat/{job_id}", json=self.salad).status_code

    def report(self, what: str, job: dict[str, Any], key: str = "") -> dict[str, Any]:
        """`progress`, `complete` or `fail`."""
        body = {"job_id": job["id"], "bucket_name": job["checkpoint_bucket"], "key": key, **self.salad}
        said: dict[str, Any] = self._json("POST", f"/{what}", json=body)
        return said

    def download(self, bucket: str, key: str) -> bytes:
        token = self._json("GET", "/download/token", params={"bucket": bucket, "key": key})["token"]
        # The key goes into the URL as it is: what to escape is left to `requests`.
        answer = self.http.get(f"{self.url}/download/{bucket}/{key}", headers={"x-download-token": token})
        answer.raise_for_status()
        return answer.content

    def upload(self, bucket: str, key: str, data: bytes) -> int:
        """The status of the last call, which the worker only prints. Raises KeyError if an earlier one is refused."""
        query = {"bucket": bucket, "key": key}
        token: str = self.http.get(f"{self.url}/upload/token", params=query).json()["token"]
        target, headers = f"{self.url}/upload/{bucket}/{key}", {"x-upload-token": token}
        created = self.http.post(target, params={"action": "mpu-create"}, headers=headers)
        upload_id = created.json()["uploadId"]

        def part(start: int) -> Any:
            query = {"action": "mpu-uploadpart", "uploadId": upload_id, "partNumber": str(start // PART_BYTES + 1)}
            with self._session() as http:
                return http.put(target, params=query, data=data[start : start + PART_BYTES], headers=headers).json()

        with ThreadPoolExecutor(PART_THREADS) as pool:
            parts = list(pool.map(part, range(0, len(data), PART_BYTES)))
        query = {"action": "mpu-complete", "uploadId": upload_id}
        return self.http.post(target, params=query, headers=headers, json={"parts": parts}).status_code

    def _session(self) -> requests.Session:
        http = requests.Session()
        http.headers["x-api-key"] = self.key
        retry = Retry(total=3, status=3, status_forcelist=RETRIED, backoff_factor=1, raise_on_status=False)
        http.mount("http://", HTTPAdapter(max_retries=retry))
        return http

    def _json(self, method: str, path: str, **sent: Any) -> Any:
        """The body of an answer that must be good."""
        answer = self.http.request(method, f"{self.url}{path}", **sent)
        answer.raise_for_status()
        return answer.json()
