"""The stack that goes to AWS, deployed to the emulated cloud, and a job through it that loses its machine."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from baton.contract.admin.webhooks import DeliveryState, WebhookCreate
from baton.contract.fleets.fleet import FleetSpec
from baton.contract.jobs.job import AttemptEnd, JobState, JobSubmit
from functions.api.operations.service_probe import PROBED_PATH, probe_api
from functions.local.emulator import Emulator
from functions.storage.dynamodb.fleet import DynamoFleetStore
from functions.storage.tables import TABLES, create_tables
from tests.kits.stack.deployment import DEPLOYED_HERE, STAGE, Deployment, run_tool, tool
from tests.kits.stack.original_job import relay_to, run_whole_job
from tests.kits.stack.stack import chain
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]
STEPS = 60
NAME, PREFIX = f"baton-{STAGE}", f"baton-{STAGE}-"
KEPT = {"pk": {"S": "KEY#kept"}}


@pytest.fixture(scope="module")
def account(cdk_command_line: None) -> Iterator[Emulator]:
    """An emulated cloud of its own, because whatever is deployed to a cloud is there for all of its users."""
    with Emulator() as emulator:
        tool(emulator, "bootstrap", "aws://000000000000/us-east-1")
        yield emulator


@pytest.fixture(scope="module")
def failed(account: Emulator) -> subprocess.CompletedProcess[str]:
    """The first try to deploy, while a name is taken."""
    account.client("events").create_event_bus(Name=NAME)
    return run_tool(account, "deploy", *DEPLOYED_HERE)


@pytest.fixture(scope="module")
def deployment(account: Emulator, failed: subprocess.CompletedProcess[str]) -> Iterator[Deployment]:
    """The second try, with the tables of the first: tables outlive even a rollback.

    The emulator comes to the name that is taken before it comes to tables; AWS makes everything at once.
    """
    dynamodb = account.client("dynamodb")
    create_tables(dynamodb, PREFIX)
    dynamodb.put_item(TableName=f"{PREFIX}tokens", Item=KEPT)
    account.client("events").delete_event_bus(Name=NAME)
    with Deployment(account) as deployed:
        yield deployed


def test_a_deployment_that_fails_is_rolled_back_and_names_the_remedy(
    account: Emulator, failed: subprocess.CompletedProcess[str]
) -> None:
    assert failed.returncode == 1 and "already exists" in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith(f"baton: deploy of stage '{STAGE}' failed for the reason above.")
    assert state_of(account.client("cloudformation")) == "ROLLBACK_COMPLETE"
    assert not [one["Name"] for one in account.client("s3").list_buckets()["Buckets"] if PREFIX in one["Name"]]


def test_a_half_finished_deployment_is_finished_by_the_same_command(deployment: Deployment) -> None:
    cloud, dynamodb = deployment.emulator.client("cloudformation"), deployment.emulator.client("dynamodb")
    assert state_of(cloud) == "CREATE_COMPLETE"
    resources = cloud.describe_stack_resources(StackName=NAME)["StackResources"]
    owned = {one["PhysicalResourceId"] for one in resources if one["ResourceType"] == "AWS::DynamoDB::Table"}
    assert owned == {f"{PREFIX}{table.suffix}" for table in TABLES}
    assert dynamodb.get_item(TableName=f"{PREFIX}tokens", Key=KEPT)["Item"] == KEPT


def test_a_job_survives_its_machine(deployment: Deployment, tmp_path: Path) -> None:
    """Through API Gateway, authorizer, Lambda, DynamoDB and S3 as deployed; SIGKILL after the first commit.

    Whoever listens on the bus hears all of it, once each and in order.
    """
    ear = deployment.listen("everything", {"exists": True})
    shop = Workshop(deployment, tmp_path)
    try:
        gate, parameters = shop.gate(STEPS // 2), {"steps": STEPS, "every": 10, "step_s": 0.05}
        job_id = shop.submit("chain.py", parameters, environment=gate.environment, heartbeat_interval_s=2)
        first = shop.agent("w1")
        step = deployment.wait_for_commit(job_id)
        shop.lose(first, job_id)
        gate.open()
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
    history = [(event.seq, event.type) for event in deployment.events(job_id)]
    until(lambda: not ear.more() and len(ear.of_job(job_id)) >= len(history), PATIENCE_S, what="its whole history")
    assert [(event.seq, event.type) for event in ear.of_job(job_id)] == history
    assert {"job.started", "checkpoint.committed", "attempt.interrupted", "job.completed"} <= {
        kind for _, kind in history
    }


def test_an_original_worker_s_job_survives_its_machine(deployment: Deployment, tmp_path: Path) -> None:
    """The original's worker uses the relay in its container, because parts of 10 MiB do not fit Lambda."""
    with relay_to(deployment.url) as url:
        run_whole_job(deployment, url, tmp_path)


def test_what_happens_to_a_job_is_told_on_the_bus(deployment: Deployment) -> None:
    """Table, stream, filter, publisher, bus, and a rule as a user makes one: the job's history, in order, once each."""
    ear = deployment.listen("jobs", {"prefix": "job."})
    jobs = [deployment.submit("chain.py", {"steps": 1}, queue="told") for _ in range(3)]
    for job_id in jobs:
        deployment.client.pause(job_id, message="for a while")
        deployment.client.resume(job_id)
    deployment.client.stop(jobs[0])
    until(lambda: not ear.more() and len(ear.told) >= 10, PATIENCE_S, what="ten events on the bus")
    for job_id in jobs:
        mine = ear.of_job(job_id)
        assert [(event.seq, event.type, event.at, event.data) for event in mine] == [
            (event.seq, event.type, event.at, event.data) for event in deployment.events(job_id)
        ]
        assert {event.tenant for event in mine} == {"default"}
        assert [event.id for event in mine] == [f"{job_id}#{number}" for number in range(1, len(mine) + 1)]
    assert {event["source"] for event in ear.told} == {"baton"}
    assert [event["detail-type"] for event in ear.told] == [event["detail"]["type"] for event in ear.told]


def test_a_job_is_followed_by_a_tick_of_the_fleets_at_once(deployment: Deployment) -> None:
    """Table, stream, filter and controller. The emulated cloud has no clock that starts schedules."""
    store = DynamoFleetStore(deployment.tables, f"baton-{STAGE}-")

    def require_tick_after(cause: Callable[[], object]) -> None:
        before = store.last_tick() or 0
        until(lambda: time.time() >= before + 1, PATIENCE_S, what="the next second")
        cause()
        until(lambda: (store.last_tick() or 0) > before, PATIENCE_S, what="a tick")

    document = {"name": "nights", "providers": ["loopback"], "max_usd_per_hour": 1, "budget": {"total_usd": 1}}
    require_tick_after(lambda: deployment.client.put_fleet(FleetSpec.model_validate(document)))
    require_tick_after(lambda: deployment.submit("chain.py", {"steps": 1}, queue="default"))
    deployment.client.stop_fleet("nights")


def test_a_webhook_is_told_by_the_deployed_line(deployment: Deployment) -> None:
    """Publisher, FIFO queue, deliverer and log, each with its own rights and settings. Nobody answers at `.invalid`."""
    client = deployment.client
    webhook = client.create_webhook(WebhookCreate(url="https://hooks.invalid/baton", every_job=False)).id
    job_id = client.submit(JobSubmit(command=["train"], queue="hooked", webhook=webhook)).id
    client.pause(job_id)

    def tried_again() -> bool:
        return any(delivery.attempts >= 2 for delivery in client.deliveries(webhook).deliveries)

    until(tried_again, PATIENCE_S, what="a second try")
    (delivery,) = client.deliveries(webhook).deliveries
    assert (delivery.event_id, delivery.state) == (f"{job_id}#1", DeliveryState.WAITING), "the pause waits behind it"
    assert "cannot be resolved" in delivery.problem
    client.delete_webhook(webhook)


def test_an_event_of_the_folder_can_be_given_to_a_deployed_function(deployment: Deployment) -> None:
    """`aws lambda invoke` gives an event of the folder to a deployed function, as events/README.md says."""
    functions = deployment.emulator.client("lambda")
    payload = (Path(__file__).parents[2] / "events" / "admin" / "health.json").read_bytes()
    answer = functions.invoke(FunctionName=f"baton-{STAGE}-admin", Payload=payload)
    said = json.loads(answer["Payload"].read())
    assert (said["statusCode"], json.loads(said["body"])["status"]) == (200, "ok")


def test_what_happens_to_a_job_waits_in_line_for_its_webhooks(deployment: Deployment) -> None:
    """Publisher, line, deliverer and its log; the host is one that no resolver may know. The first event blocks."""
    submission = JobSubmit(command=["true"], queue="hooked", webhook=deployment.webhook_id)
    job_id = deployment.client.submit(submission).id
    deployment.client.stop(job_id)
    until(deployment.deliveries, PATIENCE_S, what="a try to deliver")
    (first,) = deployment.deliveries()
    assert (first.event_id, first.type, first.status) == (f"{job_id}#1", "job.submitted", None)
    assert first.state is DeliveryState.WAITING and first.attempts >= 1
    assert first.problem.startswith("the host name cannot be resolved")


def test_a_browser_signs_in_through_the_deployed_gateway(deployment: Deployment) -> None:
    """Cookies pass the gateway in both directions, with their attributes; HEAD is a method of its own there."""
    made = requests.post(f"{deployment.url}/sessions", json={"key": deployment.keys["admin"]}, timeout=60)
    assert made.status_code == 201, made.text
    cookie, *attributes = made.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict", "Path=/sessions"} <= set(attributes) and ", " not in cookie
    # The emulated gateway has a path below its host, which the cookie's path leaves out: the test is the browser.
    sent = {"cookie": f"other=1; {cookie}"}
    answer = requests.post(f"{deployment.url}/sessions/token", headers=sent, timeout=60)
    assert answer.status_code == 201, answer.text
    token = {"x-api-key": answer.json()["token"]}
    assert requests.get(f"{deployment.url}/jobs?limit=1", headers=token, timeout=60).status_code == 200
    ended = requests.delete(f"{deployment.url}/sessions/current", headers=sent, timeout=60)
    assert ended.status_code == 204 and ended.headers["set-cookie"].startswith("baton_session=; HttpOnly")
    again = requests.post(f"{deployment.url}/sessions/token", headers=sent, timeout=60)
    assert again.json()["error"]["code"] == "session_over"


def test_the_deployed_console_answers_get_and_head_alike(deployment: Deployment) -> None:
    varying = {"date", "apigw-requestid", "x-amzn-requestid", "x-amz-request-id", "content-length"}
    for path, status in (("/", 307), ("/console", 200)):
        get, head = (
            requests.request(method, f"{deployment.url}{path}", allow_redirects=False, timeout=60)
            for method in ("GET", "HEAD")
        )
        assert (get.status_code, head.status_code, head.content) == (status, status, b"")
        kept = [
            {name: value for name, value in one.headers.items() if name.lower() not in varying} for one in (get, head)
        ]
        assert kept[0] == kept[1]
    assert "Baton" in requests.get(f"{deployment.url}/console", timeout=60).text


def test_who_has_no_key_or_another_scope_is_turned_away(deployment: Deployment) -> None:
    assert requests.get(f"{deployment.url}/health", timeout=30).json()["status"] == "ok"
    assert requests.get(f"{deployment.url}/jobs", timeout=30).status_code == 401
    refused = {
        key: requests.get(f"{deployment.url}/jobs", headers={"x-api-key": key}, timeout=30)
        for key in ("baton_0000000000_nonsense", deployment.keys["worker"])
    }
    assert [answer.status_code for answer in refused.values()] == [403, 403]
    assert [answer.json()["error"]["code"] for answer in refused.values()] == ["key_unknown", "wrong_scope"]
    # A function of the emulated cloud may need longer than the probe waits to start for the first time.
    until(
        lambda: probe_api(deployment.url + PROBED_PATH), 60, what="the refusal that the sweeper's probe takes for life"
    )


def test_deploying_again_changes_nothing_and_loses_nothing(deployment: Deployment) -> None:
    job_id = deployment.submit("chain.py", {"steps": 1}, queue="kept")
    assert "(no changes)" in deployment.deploy()
    assert deployment.job(job_id).state is JobState.PENDING


def state_of(cloud: Any) -> str:
    """Return the status of the stack."""
    state: str = cloud.describe_stacks(StackName=NAME)["Stacks"][0]["StackStatus"]
    return state
