"""The stack that goes to AWS, deployed to the emulated cloud, and a job through it that loses its machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from contract.events import JobEvent
from contract.jobs import AttemptEnd, JobState
from functions.local.emulator import Emulator
from tests.deployment import DEPLOYED_HERE, Deployment, run_tool
from tests.stack import chain
from tests.waiting import PATIENCE_S, until
from tests.workshop import Workshop

pytestmark = [pytest.mark.processes, pytest.mark.emulator]
STEPS = 60


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    """An emulated cloud of its own: what is deployed to it is there for everybody who uses it."""
    with Emulator() as emulator, Deployment(emulator) as deployed:
        yield deployed


def test_a_job_survives_its_machine(deployment: Deployment, tmp_path: Path) -> None:
    """Through API Gateway, authorizer, Lambda, DynamoDB and S3 as deployed; SIGKILL after the first commit."""
    shop = Workshop(deployment, tmp_path)
    try:
        job_id = shop.submit("chain.py", {"steps": STEPS, "every": 10, "step_s": 0.2}, heartbeat_interval_s=2)
        first = shop.agent("w1")
        step = deployment.wait_for_commit(job_id)
        first.kill_group()
        second = shop.agent("w2")
        job = deployment.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=180)
        assert job.state is JobState.COMPLETE, second.log()
    finally:
        shop.close()
    assert deployment.artifact(job_id) == chain(STEPS)
    lost, finished = deployment.attempts(job_id)
    assert (lost.end, finished.end) == (AttemptEnd.INTERRUPTED, AttemptEnd.COMPLETE)
    assert finished.resumed_step is not None and finished.resumed_step >= step
    assert job.counters.interruptions == 1 and job.counters.failures == 0
    assert deployment.log_lines(job_id)


def test_what_happens_to_a_job_is_told_on_the_bus(deployment: Deployment) -> None:
    """Table, stream, filter, publisher, bus, and a rule as a user makes one: the job's history, in order, once each."""
    events, sqs = deployment.emulator.client("events"), deployment.emulator.client("sqs")
    seen = sqs.create_queue(QueueName="seen")["QueueUrl"]
    target = sqs.get_queue_attributes(QueueUrl=seen, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    rule = {"Name": "jobs", "EventBusName": deployment.outputs["EventBus"]}
    events.put_rule(**rule, EventPattern=json.dumps({"source": ["baton"], "detail-type": [{"prefix": "job."}]}))
    events.put_targets(Rule=rule["Name"], EventBusName=rule["EventBusName"], Targets=[{"Id": "seen", "Arn": target}])
    jobs = [deployment.submit("chain.py", {"steps": 1}, queue="told") for _ in range(3)]
    for job_id in jobs:
        deployment.client.pause(job_id, message="for a while")
        deployment.client.resume(job_id)
    deployment.client.stop(jobs[0])
    told: list[dict[str, Any]] = []

    def more() -> bool:
        messages = sqs.receive_message(QueueUrl=seen, MaxNumberOfMessages=10, WaitTimeSeconds=1).get("Messages", [])
        for message in messages:
            sqs.delete_message(QueueUrl=seen, ReceiptHandle=message["ReceiptHandle"])
            told.append(json.loads(message["Body"]))
        return bool(messages)

    until(lambda: not more() and len(told) >= 10, PATIENCE_S, what="ten events on the bus", every_s=0.1)
    for job_id in jobs:
        mine = [JobEvent.model_validate(event["detail"]) for event in told if event["detail"]["job_id"] == job_id]
        assert [(event.seq, event.type, event.at, event.data) for event in mine] == [
            (event.seq, event.type, event.at, event.data) for event in deployment.events(job_id)
        ]
        assert {event.tenant for event in mine} == {"default"}
        assert [event.id for event in mine] == [f"{job_id}#{number}" for number in range(1, len(mine) + 1)]
    assert {event["source"] for event in told} == {"baton"}
    assert [event["detail-type"] for event in told] == [event["detail"]["type"] for event in told]


def test_who_has_no_key_or_another_scope_is_turned_away(deployment: Deployment) -> None:
    assert requests.get(f"{deployment.url}/health", timeout=30).json()["status"] == "ok"
    assert requests.get(f"{deployment.url}/jobs", timeout=30).status_code == 401
    refused = {
        key: requests.get(f"{deployment.url}/jobs", headers={"x-api-key": key}, timeout=30)
        for key in ("baton_0000000000_nonsense", deployment.keys["worker"])
    }
    assert [answer.status_code for answer in refused.values()] == [403, 403]
    assert [answer.json()["error"]["code"] for answer in refused.values()] == ["key_unknown", "wrong_scope"]


def test_deploying_again_changes_nothing_and_loses_nothing(deployment: Deployment) -> None:
    job_id = deployment.submit("chain.py", {"steps": 1}, queue="kept")
    assert "(no changes)" in deployment.deploy()
    assert deployment.job(job_id).state is JobState.PENDING


def test_a_half_finished_deployment_is_finished_by_the_same_command(deployment: Deployment) -> None:
    """The first try was rolled back, as when a name was taken; nothing of it is in the way."""
    cloud = deployment.emulator.client("cloudformation")
    unsupported = {"Type": "AWS::CloudWatch::Alarm", "Properties": {"Metrics": [], "ComparisonOperator": "x"}}
    cloud.create_stack(StackName="baton-half", TemplateBody=json.dumps({"Resources": {"Alarm": unsupported}}))
    until(lambda: state_of(cloud) == "ROLLBACK_COMPLETE", what="the end of the first try")
    done = run_tool(deployment.emulator, "deploy", *DEPLOYED_HERE, stage="half")
    assert done.returncode == 0, done.stderr
    assert state_of(cloud) == "CREATE_COMPLETE"
    tables = deployment.emulator.client("dynamodb").list_tables()["TableNames"]
    assert {f"baton-half-{name}" for name in ("jobs", "heartbeats", "tokens")} <= set(tables)


def test_a_deployment_that_fails_says_how_to_go_on(deployment: Deployment) -> None:
    """Here the toolkit's stack, which a deployment's files go to, is not there."""
    more = [*DEPLOYED_HERE, "-c", "@aws-cdk/core:bootstrapQualifier=nobody"]
    failed = run_tool(deployment.emulator, "deploy", *more, stage="failing")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith("baton: deploy of stage 'failing' failed for the reason above;")
    stacks = deployment.emulator.client("cloudformation").list_stacks()["StackSummaries"]
    assert "baton-failing" not in {stack["StackName"] for stack in stacks}


def state_of(cloud: Any) -> str:
    """Of the stage `half`."""
    state: str = cloud.describe_stacks(StackName="baton-half")["Stacks"][0]["StackStatus"]
    return state
