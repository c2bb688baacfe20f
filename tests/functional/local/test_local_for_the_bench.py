"""Test that the bench can parse the announcement of the local stack."""

from __future__ import annotations

from pathlib import Path

import boto3
import psutil
import pytest

from baton.contract.worker.calls import WorkQuery
from bench.harness.local_stack import running_stack

pytestmark = [pytest.mark.emulator, pytest.mark.processes]


def test_the_stack_of_the_bench_answers_and_ends(tmp_path: Path) -> None:
    with running_stack(tmp_path / "stack.log") as stack:
        assert stack.client("worker").claim(WorkQuery(machine_id="m", container_group_id="g")) is None
        client = boto3.client("s3", endpoint_url=stack.cloud_url)
        assert len(client.list_buckets()["Buckets"]) == 2
        client.close()
        assert psutil.pid_exists(stack.pid)
    assert not psutil.pid_exists(stack.pid)
