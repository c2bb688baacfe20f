"""Test `make local` as a person uses the command: output, kept state, end, sweeper."""

from __future__ import annotations

import json
import re
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import boto3
import psutil
import pytest
import requests

from baton.contract.fleets.fleet import FleetSpec, MachineState
from baton.contract.jobs.job import JobState, JobSubmit
from baton.contract.jobs.policy import Policy
from baton.contract.worker.calls import HeartbeatRequest, WorkItem, WorkQuery
from baton.contract.worker.control import Directive
from functions.domain.webhooks import signature
from functions.local.stack import TICK_S
from gpu_client.transport.api.client import BatonClient
from tests.kits.network.http_server import HttpServer
from tests.kits.network.ports import free_port
from tests.kits.stack.stack import ROOT, Stack, clean_environment, leashed
from tests.kits.waiting import alive, until

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

KEY_NAMES = {"submit", "worker", "admin"}


class LocalRun:
    """A run of `python -m functions.local`, and its output."""

    def __init__(self, state_dir: Path, *options: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [*leashed(signal.SIGTERM), "functions.local", "--state-dir", str(state_dir), "--port", "0", *options],
            cwd=ROOT,
            env={**clean_environment(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.environment = environment
        self.said = ""
        while "Ctrl-C stops it." not in self.said:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            self.said += line
        found = re.search(r"http://127\.0\.0\.1:\d+", self.said)
        assert found, self.said
        self.url = found.group()
        self.keys = dict(re.findall(r"^ +(\w+) +key +(\S+)$", self.said, re.MULTILINE))
        self.family = [self.process, *psutil.Process(self.process.pid).children(recursive=True)]

    def client(self, key: str) -> BatonClient:
        return BatonClient(self.url, self.keys[key])

    def end(self, number: signal.Signals) -> tuple[int, str, str]:
        """Send the signal to the process; return exit code, last output and last errors."""
        self.process.send_signal(number)
        said, complaints = self.process.communicate(timeout=60)
        return self.process.returncode, said, complaints

    def kill_all(self) -> None:
        """SIGKILL to every process of it at once, as when a machine is switched off by its owner."""
        for process in self.family:
            process.kill()
        self.process.communicate(timeout=60)

    def left(self) -> list[Any]:
        """Return the children of the run that are still alive."""
        return [process for process in self.family[1:] if process.is_running()]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[LocalRun]]:
    """Yield the list of the test's runs; kill those that are left."""
    started: list[LocalRun] = []
    yield started
    for run in started:
        if run.process.poll() is None:
            run.kill_all()


class Listener(BaseHTTPRequestHandler):
    """Server of a webhook: records each request, and answers the first request of each path with 503."""

    received: ClassVar[list[tuple[str, dict[str, str], bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        first = self.path not in [path for path, _, _ in self.received]
        self.received.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(503 if first else 204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def listened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    """A run for the tests that end nothing.

    Its webhooks are tested first: a publisher that has looked for webhooks looks again after a minute.
    """
    with HttpServer(Listener) as server:
        settings = {"BATON_WEBHOOK_TEST_ORIGIN": server.url, "BATON_LOG_LEVEL": "ERROR"}
        run = LocalRun(tmp_path_factory.mktemp("listened") / "state", "--sweep-interval-s", "0.5", **settings)
        try:
            yield run
            assert run.end(signal.SIGINT)[2] == ""
        finally:
            if run.process.poll() is None:
                run.kill_all()


def test_webhooks_are_told_in_order_signed_and_again_when_they_did_not_answer(listened: LocalRun) -> None:
    run, origin = listened, listened.environment["BATON_WEBHOOK_TEST_ORIGIN"]
    admin = {"x-api-key": run.keys["admin"]}

    def make(path: str, **more: Any) -> dict[str, Any]:
        answer = requests.post(f"{run.url}/webhooks", json={"url": origin + path, **more}, headers=admin, timeout=30)
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    hook = make("/all")
    named = make("/named", every_job=False, types=["job.canceled"])
    with run.client("submit") as user:
        job = user.submit(JobSubmit(command=["train"], webhook=named["id"]))
        user.pause(job.id)
        user.resume(job.id)
        user.stop(job.id)
    until(lambda: len(Listener.received) >= 4 + 1 + 1 + 1, what="four events, one event, each again once")
    for path, secret, seqs in (("/all", hook["secret"], [1, 1, 2, 3, 4]), ("/named", named["secret"], [4, 4])):
        mine = [(headers, body) for target, headers, body in Listener.received if target == path]
        assert [json.loads(body)["seq"] for _, body in mine] == seqs
        for headers, body in mine:
            at = re.fullmatch(r"t=(\d+),v1=[0-9a-f]{64}", headers["baton-signature"])
            assert at and headers["baton-signature"] == signature(secret, int(at[1]), body)
            assert headers["baton-event-id"] == json.loads(body)["id"]
    until(
        lambda: (
            [
                (entry["state"], entry["attempts"])
                for entry in requests.get(
                    f"{run.url}/webhooks/{hook['id']}/deliveries", headers=admin, timeout=30
                ).json()["deliveries"]
            ]
            == [("delivered", 1)] * 3 + [("delivered", 2)]
        ),
        20,
        what="the log of deliveries",
    )
    again = f"{run.url}/webhooks/{named['id']}/replay"
    assert requests.post(again, json={"job_id": job.id}, headers=admin, timeout=30).json()["queued"] == 1
    until(lambda: len(Listener.received) == 8, what="the event once more")


def test_it_keeps_keys_jobs_leases_and_objects_and_ends_cleanly(tmp_path: Path, runs: list[LocalRun]) -> None:
    state_dir = tmp_path / "state"
    runs.append(first := LocalRun(state_dir))
    assert first.keys.keys() == KEY_NAMES
    assert str(state_dir) in first.said, "it says where the data is kept"
    assert stat.S_IMODE((state_dir / "keys.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o700
    with first.client("submit") as user:
        job = user.submit(JobSubmit(command=["train"], policy=Policy(heartbeat_interval_s=600)))
        file = tmp_path / "one.txt"
        file.write_bytes(b"input")
        user.upload_files("training-data", {"in/one.txt": file})
    code, said, complaints = first.end(signal.SIGINT)
    assert (code, complaints) == (0, "")
    assert said.strip().endswith("Stopping ..."), "Ctrl-C ends it without a traceback"
    until(lambda: not first.left(), what="the end of its children")

    runs.append(second := LocalRun(state_dir))
    assert second.keys == first.keys
    with second.client("worker") as worker:
        item = worker.claim(WorkQuery(machine_id="m-1"))
        assert isinstance(item, WorkItem)
        assert item.id == job.id
    second.kill_all()

    runs.append(third := LocalRun(state_dir))
    assert third.keys == first.keys
    with third.client("worker") as worker, third.client("submit") as user:
        answer = worker.heartbeat(item.id, item.lease_token, HeartbeatRequest(step=7))
        assert (answer.directive, answer.epoch) == (Directive.CONTINUE, 1), "a lease outlives the stack"
        view = user.get_job(job.id)
        assert (view.state, view.epoch, view.machine_id) == (JobState.RUNNING, 1, "m-1")
        assert [entry.key for entry in user.list_objects("training-data").objects] == ["in/one.txt"]
        assert worker.claim(WorkQuery(machine_id="m-2")) is None, "it is given to nobody else meanwhile"
    assert third.end(signal.SIGTERM)[0] == 0


def test_the_stack_ends_when_its_cloud_does_and_starts_again_at_once(tmp_path: Path, runs: list[LocalRun]) -> None:
    runs.append(first := LocalRun(tmp_path / "state"))
    first.family[1].kill()
    said, complaints = first.process.communicate(timeout=60)
    assert (first.process.returncode, said.strip()) == (1, "Stopping ...")
    assert "The local stack ends, the state is kept in" in complaints, complaints
    assert "the emulator has ended by itself" in complaints
    assert "Traceback" not in complaints
    runs.append(second := LocalRun(tmp_path / "state"))
    assert second.keys == first.keys
    # Without its parent, the emulator still holds the directory for a while.
    second.process.kill()
    second.process.communicate(timeout=60)
    runs.append(third := LocalRun(tmp_path / "state"))
    assert third.keys == first.keys
    assert third.end(signal.SIGTERM)[0] == 0


def test_the_sweeper_returns_a_lost_machine_s_job_though_nobody_asks_for_work(listened: LocalRun) -> None:
    with listened.client("admin") as client:
        job = client.submit(JobSubmit(command=["train"], policy=Policy(heartbeat_interval_s=1)))
        assert client.claim(WorkQuery(machine_id="m-1")) is not None
        until(lambda: client.get_job(job.id).state is JobState.PENDING, what="the sweeper's turn")
        view = client.get_job(job.id)
        assert (view.counters.interruptions, view.counters.failures) == (1, 0)
        (attempt,) = client.attempts(job.id).attempts
        assert attempt.reason
        assert attempt.reason.code == "lease_expired"
        client.stop(job.id)


def test_a_rented_machine_outlives_the_stack_and_the_next_stack_gives_it_back(
    tmp_path: Path, runs: list[LocalRun]
) -> None:
    options = ("--port", str(free_port()), "--fleet-clock-speed", "20")
    document = {"name": "nights", "providers": ["loopback"], "disk_gib": 1, "max_usd_per_hour": 1, "min": 1}
    # On a slow computer the machine has waited for longer than the default when the fleet is stopped.
    document["idle_timeout_s"] = 86_400
    runs.append(first := LocalRun(tmp_path / "state", *options))
    with first.client("submit") as user:
        user.put_fleet(FleetSpec.model_validate({**document, "budget": {"total_usd": 5}}))
        ready = [MachineState.READY]
        until(lambda: [one.state for one in user.fleet("nights").machines] == ready, what="a machine")
        (machine,) = user.fleet("nights").machines
    code, said, faults = first.end(signal.SIGINT)
    assert (code, faults) == (0, "")
    assert "1 machine is still rented" in said and machine.id in said
    (description,) = (tmp_path / "state" / "machines").glob("machines/*/machine.json")
    pid = json.loads(description.read_text())["pid"]
    assert alive(pid)

    runs.append(second := LocalRun(tmp_path / "state", *options))
    with second.client("submit") as user:
        assert [one.id for one in user.fleet("nights").machines] == [machine.id]
        user.stop_fleet("nights")
        (ended,) = until(lambda: user.ended_machines("nights"), what="the machine's end")
    assert (ended.id, ended.state, ended.reason) == (machine.id, MachineState.GONE, "the fleet is stopped")
    assert not alive(pid)
    assert second.end(signal.SIGTERM)[0] == 0


def test_what_happens_to_jobs_is_told_on_the_bus_that_it_names(listened: LocalRun) -> None:
    said = re.search(r"the bus (\S+) of the emulated EventBridge at (\S+)", listened.said)
    assert said, listened.said
    bus, cloud = said.groups()
    events, sqs = (boto3.client(name, endpoint_url=cloud, region_name="us-east-1") for name in ("events", "sqs"))
    seen = sqs.create_queue(QueueName="seen")["QueueUrl"]
    events.put_rule(Name="all", EventBusName=bus, EventPattern='{"source": ["baton"]}')
    target = {"Id": "seen", "Arn": "arn:aws:sqs:us-east-1:000000000000:seen"}
    events.put_targets(Rule="all", EventBusName=bus, Targets=[target])
    with listened.client("submit") as user:
        job = user.submit(JobSubmit(command=["train"]))
        user.stop(job.id)
    told: list[tuple[str, str]] = []

    def both() -> bool:
        for message in sqs.receive_message(QueueUrl=seen, MaxNumberOfMessages=10).get("Messages", []):
            sqs.delete_message(QueueUrl=seen, ReceiptHandle=message["ReceiptHandle"])
            event = json.loads(message["Body"])
            if event["detail"]["job_id"] == job.id:
                told.append((event["detail-type"], event["detail"]["id"]))
        return len(told) >= 2

    until(both, what="two events")
    assert told == [("job.submitted", f"{job.id}#1"), ("job.canceled", f"{job.id}#2")]


def test_a_port_that_is_taken_is_said_without_a_traceback(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [*leashed(signal.SIGTERM), "functions.local", "--state-dir", str(tmp_path), "--port", port]
        run = subprocess.run(
            command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False
        )
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.startswith("The local stack could not start: "), run.stderr
    assert port in run.stderr
    assert "--port" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_submitted_job_gets_its_machine_long_before_the_scheduled_tick() -> None:
    began = time.monotonic()
    with Stack() as stack:
        document = {"name": "soon", "providers": ["loopback"], "queues": ["soon"], "disk_gib": 1, "max_usd_per_hour": 5}
        stack.client.put_fleet(FleetSpec.model_validate({**document, "budget": {"total_usd": 5}}))
        stack.client.submit(JobSubmit(command=["true"], queue="soon"))
        until(lambda: stack.client.fleet("soon").machines, TICK_S, what="a machine")
        assert time.monotonic() - began < TICK_S, "the first scheduled tick follows after a minute"
