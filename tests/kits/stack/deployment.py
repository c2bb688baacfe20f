"""Stack as deployed to AWS, deployed to the emulated cloud by the same command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import requests

from baton.contract.admin.webhooks import DeliveryPage, DeliveryView
from baton.contract.jobs.events import JobEvent
from baton.contract.names import BUCKETS, Scope
from functions.local.emulator import Emulator
from tests.kits.stack.control_plane import ControlPlane

ROOT = Path(__file__).resolve().parents[3]
STAGE = "e2e"
DEPLOY_TIMEOUT_S = 480
DEPLOYED_HERE = ("-c", "target=host", "--require-approval=never")
"""Options of a CDK deployment whose functions run on this machine."""


class Deployment(ControlPlane):
    """Deployment to a bootstrapped account, with keys for an admin and a worker made as an operator makes them."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self.deploy()
        self.outputs = outputs = json.loads((ROOT / ".cdk" / f"{STAGE}.json").read_text())[f"baton-{STAGE}"]
        # The emulator's own name for the API's host needs a resolver that knows *.localhost; this one needs none.
        api_id = str(urlsplit(outputs["Url"]).hostname).split(".")[0]
        url = f"{emulator.endpoint_url}/_aws/execute-api/{api_id}"
        first = tool(emulator, "admin-key").stdout.strip()
        keys = {
            "admin": issue(url, first, Scope.ADMIN, Scope.SUBMIT, Scope.WORKER),
            "worker": issue(url, first, Scope.WORKER),
        }
        # Before any event: a publisher that has looked for webhooks looks again after a minute.
        self.webhook_id = webhook(url, keys["admin"])
        objects, tables = emulator.client("s3"), emulator.client("dynamodb")
        names = {name: outputs["".join(word.capitalize() for word in name.split("-"))] for name in BUCKETS}
        super().__init__(url, keys, objects, tables, prefix=f"baton-{STAGE}-", buckets=names)

    def deploy(self) -> str:
        """Deploy or redeploy; returns the output."""
        done = tool(self.emulator, "deploy", *DEPLOYED_HERE)
        return done.stdout + done.stderr

    def expire_lease(self, job_id: str) -> None:
        """Expire the lease, and do what the schedule does within a minute: call its target with its input."""
        super().expire_lease(job_id)
        scheduler, functions = self.emulator.client("scheduler"), self.emulator.client("lambda")
        names = [found["Name"] for found in scheduler.list_schedules()["Schedules"]]
        targets = [scheduler.get_schedule(Name=name)["Target"] for name in names]
        (target,) = [found for found in targets if found["Arn"].endswith(f":baton-{STAGE}-sweeper")]
        swept = functions.invoke(FunctionName=target["Arn"], Payload=target.get("Input", "{}").encode())
        assert "FunctionError" not in swept, swept["Payload"].read()

    def listen(self, name: str, event_type: object) -> EventTarget:
        """Make an event rule as a user does, and receive events at its target."""
        events, sqs = self.emulator.client("events"), self.emulator.client("sqs")
        queue = sqs.create_queue(QueueName=name)["QueueUrl"]
        target = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        bus = self.outputs["EventBus"]
        pattern = json.dumps({"source": ["baton"], "detail-type": [event_type]})
        events.put_rule(Name=name, EventBusName=bus, EventPattern=pattern)
        events.put_targets(Rule=name, EventBusName=bus, Targets=[{"Id": name, "Arn": target}])
        return EventTarget(sqs, queue)

    def deliveries(self) -> list[DeliveryView]:
        """Read the webhook's log, newest event first."""
        answer = requests.get(
            f"{self.url}/webhooks/{self.webhook_id}/deliveries", headers={"x-api-key": self.keys["admin"]}, timeout=30
        )
        answer.raise_for_status()
        return DeliveryPage.model_validate(answer.json()).deliveries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.client.close()


class EventTarget:
    """Queue behind an event rule; `told` lists the received events in order."""

    def __init__(self, sqs: Any, queue: str) -> None:
        self._sqs = sqs
        self._queue = queue
        self.told: list[dict[str, Any]] = []

    def more(self) -> bool:
        """Receive new events; returns True if there were any."""
        answer = self._sqs.receive_message(QueueUrl=self._queue, MaxNumberOfMessages=10, WaitTimeSeconds=1)
        messages = answer.get("Messages", [])
        for message in messages:
            self._sqs.delete_message(QueueUrl=self._queue, ReceiptHandle=message["ReceiptHandle"])
            self.told.append(json.loads(message["Body"]))
        return bool(messages)

    def of_job(self, job_id: str) -> list[JobEvent]:
        """List the received events of a job."""
        return [JobEvent.model_validate(event["detail"]) for event in self.told if event["detail"]["job_id"] == job_id]


def issue(url: str, admin_key: str, *scopes: Scope) -> str:
    """Make a key through the API."""
    body = {"name": "e2e", "scopes": list(scopes)}
    answer = requests.post(f"{url}/keys", json=body, headers={"x-api-key": admin_key}, timeout=30)
    answer.raise_for_status()
    key: str = answer.json()["key"]
    return key


def webhook(url: str, admin_key: str) -> str:
    """Make a webhook for jobs that name it, at an unresolvable host; returns its id."""
    body = {"url": "https://hooks.invalid/baton", "every_job": False}
    answer = requests.post(f"{url}/webhooks", json=body, headers={"x-api-key": admin_key}, timeout=30)
    answer.raise_for_status()
    made: str = answer.json()["id"]
    return made


def tool(emulator: Emulator, command: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the tool on our stage; a failure fails the test."""
    done = run_tool(emulator, command, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_tool(emulator: Emulator, command: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m cdk` on our stage with the emulator as its cloud."""
    return subprocess.run(
        [sys.executable, "-m", "cdk", command, "--stage", STAGE, *more],
        cwd=ROOT,
        env={
            **os.environ,
            "AWS_ENDPOINT_URL": emulator.endpoint_url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        },
        capture_output=True,
        text=True,
        timeout=DEPLOY_TIMEOUT_S,
        check=False,
    )
