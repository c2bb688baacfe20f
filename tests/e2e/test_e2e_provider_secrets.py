"""Keys of providers and logins at registries appear nowhere but in their file: a rental with refusals, and a search."""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.jobs.job import JobSubmit
from fakes.server import FakeAnswer, FakeCall
from fakes.vast.provider import PERMISSIONS, FakeVast
from gpu_client.cli.core.session import CliSession
from gpu_client.cli.main import main
from tests.e2e.test_e2e_secrets import ProcessList
from tests.kits.clouds.emulator import CREDENTIALS
from tests.kits.stack.stack import ROOT, Stack, clean_environment
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

SPEED = 60
"""A tick each second."""


class TalkativeVast(FakeVast):
    """Vast.ai, which repeats in its answers a refused key, and the login of the first create."""

    repeated = 0

    def answer(self, call: FakeCall) -> FakeAnswer:
        if b"image_login" in call.raw and not self.repeated:
            self.repeated += 1
            return FakeAnswer(400, {"error": "invalid_args", "msg": f"cannot pull: {call.json()['image_login']}"})
        found = super().answer(call)
        if found.status == 401:
            return FakeAnswer(401, {"error": "auth_error", "msg": f"Invalid user key {call.headers['authorization']}"})
        return found


class ProviderRun:
    """Outputs and stored data of a run in which a machine was rented and its provider's key was revoked."""

    def __init__(self, folder: Path) -> None:
        self.key = f"canary{secrets.token_hex(24)}"
        self.password = f"canary{secrets.token_hex(24)}"
        self.places: dict[str, str] = {}
        self._folder = folder
        log_path = folder / "control-plane.log"
        vast = TalkativeVast(time.time)
        vast.keys = {self.key: PERMISSIONS}
        vast.intervals_s.clear()
        vast.visible_after_s = vast.boot_s = 0
        settings = {"TMPDIR": str(folder), "BATON_LOG_LEVEL": "DEBUG"}
        with (
            vast,
            log_path.open("wb") as log,
            ProcessList() as processes,
            Stack(fleet_clock_speed=SPEED, settings=settings, log=log) as stack,
        ):
            self._rent(stack, vast)
            self._keep(stack)
            vast.keys = {self.key: PERMISSIONS}
            stack.client.stop_fleet("nights")
            until(lambda: not stack.client.fleet("nights").machines, what="the end of the machine")
            assert vast.meter.billing() == []
        self.places["machines' environments"] = json.dumps([one.environment for one in vast.instances])
        self.pulled_with = [one.body["image_login"] for one in vast.instances]
        self.places["control plane's log"] = log_path.read_text()
        self.places["ps"] = "\n".join(processes.seen)

    def _rent(self, stack: Stack, vast: FakeVast) -> None:
        document = f"vast: {{api_key: {self.key}, address: '{vast.url}'}}"
        self._log_in(stack, "vast", document)
        login = f"registries: {{ghcr.io: {{username: acme, password: {self.password}}}}}"
        self._log_in(stack, "ghcr.io", login)
        (file,) = self._folder.glob("baton-fleets-*/providers.json")
        self.file, self.mode = file.read_text(), file.stat().st_mode & 0o777
        fleet = {"name": "nights", "providers": ["vast"], "image": "ghcr.io/acme/worker:1", "queues": ["nights"]}
        money = {"max_usd_per_hour": 5, "budget": {"total_usd": 50}, "max": 2}
        stack.client.put_fleet(FleetSpec.model_validate({**fleet, **money}))
        job = stack.client.submit(JobSubmit(command=["train"], queue="nights")).id
        until(lambda: vast.instances, what="a rented machine")
        vast.keys = {secrets.token_hex(9): PERMISSIONS}
        stack.client.submit(JobSubmit(command=["train"], queue="nights"))
        until(lambda: "401" in stack.client.fleet("nights").waits, what="a refused quote")
        self._log_in(stack, "vast", document, code=3)
        self._baton(stack, "fleet", "doctor", code=1)
        for command in (
            ("fleet", "show", "nights"),
            ("fleet", "events", "nights"),
            ("fleet", "providers"),
            ("fleet", "registries"),
        ):
            self._baton(stack, *command)
        self._baton(stack, "explain", job)
        self._baton(stack, "fleet", "providers", "--json")
        self._baton(stack, "fleet", "registries", "--json")

    def _keep(self, stack: Stack) -> None:
        dynamodb = boto3.client("dynamodb", endpoint_url=stack.cloud_url, **CREDENTIALS)
        rows = {table: dynamodb.scan(TableName=table)["Items"] for table in dynamodb.list_tables()["TableNames"]}
        assert rows["baton-fleet"] and rows["baton-jobs"]
        self.places["tables"] = json.dumps(rows)

    def _baton(self, stack: Stack, *arguments: str, code: int = 0) -> None:
        """Run a command in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            ended = main(list(arguments), CliSession(environ=self._environ(stack)))
        self._heard(arguments, out.getvalue() + err.getvalue(), (ended, code))

    def _log_in(self, stack: Stack, place: str, document: str, code: int = 0) -> None:
        """Run the command that gets the secret as a process, which `ps` shows."""
        arguments = ("fleet", "login", place)
        done = subprocess.run(
            [sys.executable, "-m", "gpu_client.cli", *arguments],
            cwd=ROOT,
            env={**clean_environment(), **self._environ(stack)},
            input=document,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self._heard(arguments, done.stdout + done.stderr, (done.returncode, code))

    def _environ(self, stack: Stack) -> dict[str, str]:
        return {"BATON_API_URL": stack.url, "BATON_API_KEY": stack.keys["admin"], "HOME": str(self._folder)}

    def _heard(self, arguments: tuple[str, ...], said: str, codes: tuple[int, int]) -> None:
        assert codes[0] == codes[1] and said, (arguments, codes, said)
        self.places[f"{len(self.places)}: {' '.join(arguments)}"] = said


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProviderRun]:
    yield ProviderRun(tmp_path_factory.mktemp("secrets"))


def test_the_key_of_a_provider_is_in_its_file_alone(run: ProviderRun) -> None:
    assert (run.key in run.file, run.mode) == (True, 0o600), "the search finds what is there"
    assert [place for place, text in run.places.items() if run.key in text] == []


def test_the_login_at_a_registry_is_in_its_file_and_with_the_provider_alone(run: ProviderRun) -> None:
    assert run.password in run.file and set(run.pulled_with) == {f"-u acme -p {run.password} ghcr.io"}
    assert [place for place, text in run.places.items() if run.password in text] == []


def test_the_search_for_the_key_was_worth_something(run: ProviderRun) -> None:
    told = "\n".join(text for place, text in run.places.items() if "fleet" in place)
    assert "Invalid user key Bearer [key]" in told and "account_refused" in told
    assert "Invalid user key" in run.places["control plane's log"] and "Invalid user key" in run.places["tables"]
    assert "BATON_ENROLMENT_TOKEN" in run.places["machines' environments"]
    assert "gpu_client.cli fleet login vast" in run.places["ps"]
    assert "gpu_client.cli fleet login ghcr.io" in run.places["ps"]
    assert "cannot pull: -u acme -p [password] ghcr.io" in told + run.places["tables"]
    assert any("ghcr.io" in text and "acme" in text for place, text in run.places.items() if "registries" in place)
