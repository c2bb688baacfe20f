"""Test the sentence that tells why a job waits."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cdk import NODE

WHY = Path(__file__).parents[3] / "console" / "src" / "jobs" / "why.js"
WAITING: dict[str, Any] = {
    "state": "pending",
    "queue": "default",
    "epoch": 2,
    "updated_at": 1000,
    "not_before": None,
    "checkpoint_step": 40,
    "requirements": {},
    "policy": {"avoid_machine_s": 600},
}
FAILED = [
    {"end": "failed", "machine_id": "m-1", "ended_at": 100},
    {"end": "interrupted", "machine_id": "m-2", "ended_at": 1000},
    {"end": "failed", "machine_id": "m-1", "ended_at": 1000},
]
WAITS = "Waits 1 min for a worker of queue default, then goes on from step 40"
AVOIDS = f"{WAITS}. These machines failed the job and cannot claim it yet: m-1 (for 9 min 00 s)"


@pytest.mark.parametrize(
    ("now", "attempts", "sentence"), [(1060, None, WAITS), (1060, FAILED, AVOIDS), (1060, FAILED[:2], WAITS)]
)
def test_a_waiting_job_names_the_machines_that_it_avoids(now: int, attempts: Any, sentence: str) -> None:
    call = f"why({json.dumps(WAITING)}, {now}, {json.dumps(attempts)})"
    script = f"import {{ why }} from {json.dumps(WHY.as_uri())}; console.log(JSON.stringify({call}))"
    command = [NODE, "--input-type=module", "-e", script]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(found.stdout) == sentence
