"""A worker of the original in a process of its own, stopped while its job moves on, and woken up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.kits.waiting import until

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

WORKER = """
import json, sys, threading, time, requests

url, key = sys.argv[1:]
http = requests.Session()
http.headers["x-api-key"] = key
job = http.get(url + "/work").json()[0]
print(json.dumps(job), flush=True)

def beat():
    while True:
        http.post(url + "/heartbeat/" + job["id"], json={})
        time.sleep(0.1)

threading.Thread(target=beat, daemon=True).start()
sys.stdin.readline()
prefix, bucket = job["checkpoint_prefix"], job["checkpoint_bucket"]
keys = {"progress": prefix + "checkpoint-50.zip", "complete": prefix + "model.safetensors", "fail": prefix}
said = {"token": http.get(url + "/upload/token", params={"bucket": bucket, "key": keys["progress"]}).status_code}
for what, key in keys.items():
    body = {"job_id": job["id"], "bucket_name": bucket, "key": key}
    said[what] = http.post(url + "/" + what, json=body).status_code
print(json.dumps(said), flush=True)
"""
"""No machine id, as where SALAD_MACHINE_ID is missing."""


@pytest.fixture(scope="module")
def stack() -> Iterator[dict[str, Any]]:
    """URL and keys of a local stack in a process of its own."""
    command = [sys.executable, "-m", "functions.local", "--forget", "--port", "0", "--json", "--sweep-interval-s", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()
            process.wait(60)


def test_a_stopped_worker_that_wakes_up_behind_its_job_changes_nothing(stack: dict[str, Any]) -> None:
    """A worker that wakes up changes nothing, although its successor has the same key, address and no machine id."""
    url, key = stack["url"], stack["keys"]["admin"]

    def call(method: str, path: str, **sent: Any) -> Any:
        answer = requests.request(method, url + path, headers={"x-api-key": key}, timeout=30, **sent)
        answer.raise_for_status()
        return answer.json()

    job_id = call("POST", "/job", json={"instance_prompt": "dog", "instance_data_prefix": "dog/"})["id"]
    command = [sys.executable, "-c", WORKER, url, key]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as zombie:
        try:
            assert zombie.stdin is not None and zombie.stdout is not None
            assert json.loads(zombie.stdout.readline())["id"] == job_id
            os.kill(zombie.pid, signal.SIGSTOP)
            # The zombie's lease ends, here by a stop and a retry, and another attempt begins.
            call("POST", f"/job/{job_id}/stop")
            call("POST", f"/job/{job_id}/retry", json={})
            (successor,) = until(lambda: call("GET", "/work"), what="work")
            assert successor["id"] == job_id
            os.kill(zombie.pid, signal.SIGCONT)
            zombie.stdin.write("\n")
            zombie.stdin.flush()
            said = json.loads(zombie.stdout.readline())
        finally:
            zombie.kill()
    assert said == {"token": 409, "progress": 409, "complete": 409, "fail": 409}
    job = call("GET", f"/job/{job_id}")
    assert (job["state"], job["epoch"], job["checkpoint_step"], job["num_failures"]) == ("running", 2, None, 0)
    report = {"job_id": job_id, "bucket_name": successor["checkpoint_bucket"], "key": successor["checkpoint_prefix"]}
    call("POST", "/fail", json=report)
    assert call("GET", f"/job/{job_id}")["num_failures"] == 1
