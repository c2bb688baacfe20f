"""Test the start and the end of the agent's process: exit codes and standard error."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineMeasurements
from gpu_client.agent.app import program
from gpu_client.agent.app.shutdown import ShutdownRequest
from tests.kits.network.http_server import HttpServer, QuietHandler
from tests.kits.network.instance_metadata import MetadataService


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_API_URL", "http://127.0.0.1:9/stage")
    monkeypatch.setenv("BATON_API_KEY", "baton_id_verysecret")
    monkeypatch.setenv("BATON_WORKSPACE", str(tmp_path / "workspace"))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("BATON_API_URL", "api.example", "BATON_API_URL: "),
        ("BATON_API_URL", "http://user@host", "BATON_API_URL, BATON_API_KEY: the API's URL must look like"),
        ("BATON_API_KEY", "has a blank", "BATON_API_URL, BATON_API_KEY: the API key"),
        ("BATON_GPUS", "many", "BATON_GPUS: "),
        ("BATON_API_URL", "http://host:port", "BATON_API_URL, BATON_API_KEY: the API's URL must look like"),
        ("BATON_WORKSPACE", "~nosuchuser/baton", "BATON_WORKSPACE: "),
    ],
)
def test_bad_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    assert program.main() == program.EXIT_BAD_SETTINGS
    said = capsys.readouterr().err
    assert said.startswith(says)
    assert "Traceback" not in said
    assert "verysecret" not in said


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Containers run as numbers that have no entry in /etc/passwd: the default workspace was a traceback."""

    def nowhere(_path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("BATON_WORKSPACE")
    monkeypatch.setattr(Path, "expanduser", nowhere)
    assert program.main() == program.EXIT_BAD_SETTINGS
    assert capsys.readouterr().err.startswith("BATON_WORKSPACE: ")


def test_a_workspace_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATON_WORKSPACE", str(tmp_path / "file"))
    assert program.main() == program.EXIT_WORKSPACE
    assert capsys.readouterr().err == (
        f"BATON_WORKSPACE={tmp_path / 'file'}: File exists. Name a directory that the agent may write.\n"
    )


def test_what_hangs_after_a_second_signal_is_left_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(program, "HURRY_S", 0.0)
    monkeypatch.setattr(os, "_exit", codes.append)
    stop = ShutdownRequest(same_request_s=0)
    stop.request("SIGTERM")
    stop.request("SIGTERM")
    program._exit_at_once(stop)
    assert codes == [program.EXIT_HURRIED]


TOKEN, KEY = "baton_enrolid_verysecret", "baton_workerid_alsosecret"


class Fleet(QuietHandler):
    """Control plane of one rented machine, which the first heartbeat takes back if the fleet `drains`.

    refusal: answer to an enrolment.
    """

    calls: list[tuple[str, str]] = []
    bodies: list[Any] = []
    refusal: str = ""
    drains: bool = True

    def do_GET(self) -> None:
        self._take()
        self._answer(200, [])

    def do_POST(self) -> None:
        self._take()
        if self.path == "/machines/heartbeat":
            orders = {
                "state": "draining",
                "drain": self.drains,
                "reason": "enough",
                "alone_s": 900,
                "heartbeat_interval_s": 60,
            }
            self._answer(200, orders)
        elif self.refusal:
            error = {"code": self.refusal, "message": "no", "remedy": "none", "request_id": "r"}
            self._answer(409, {"error": error})
        else:
            machine = {"machine_id": "dep-nights-1", "queues": ["a", "b"], "usd_per_hour": 0.2}
            self._answer(200, {**machine, "api_key": KEY, "heartbeat_interval_s": 60})

    def _take(self) -> None:
        self.calls.append((self.path.partition("?")[0], self.headers["x-api-key"]))
        self.bodies.append(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null"))

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Fleet]]:
    """The machine's environment: the address, the token, and the name of the container."""
    made = type("FleetOfTest", (Fleet,), {"calls": [], "bodies": []})
    with HttpServer(made) as server:
        monkeypatch.delenv("BATON_API_KEY")
        monkeypatch.setenv("BATON_API_URL", server.url)
        monkeypatch.setenv("BATON_ENROLMENT_TOKEN", TOKEN)
        monkeypatch.setenv("CONTAINER_ID", "4711")
        # test_preflight.py measures; here a measurement would only take time.
        monkeypatch.setattr(
            program, "measure_machine", lambda *_: MachineMeasurements(disk_write_mb_s=850, download_mbit_s=412)
        )
        yield made


def test_a_rented_machine_enrols_works_with_its_key_and_leaves_when_told(
    fleet: type[Fleet], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert program.main() == 0
    assert fleet.calls[0] == ("/machines/enroll", TOKEN)
    assert set(fleet.bodies[0]) == {"gpu_model", "gpus", "vram_gib", "disk_gib", "nonce", "measured", "instance"}
    assert fleet.bodies[0]["instance"] == "4711"
    assert ("/machines/heartbeat", KEY) in fleet.calls
    assert {path for path, key in fleet.calls if key == TOKEN} == {"/machines/enroll"}
    assert "the fleet takes this machine back: enough" in caplog.text
    assert "secret" not in caplog.text


def test_a_machine_that_is_refused_says_why(fleet: type[Fleet], capsys: pytest.CaptureFixture[str]) -> None:
    fleet.refusal = "preflight_failed"
    assert program.main() == program.EXIT_BAD_SETTINGS
    said = capsys.readouterr().err
    assert said.startswith("BATON_ENROLMENT_TOKEN: this machine cannot enrol at http://127.0.0.1:")
    assert "preflight_failed: no" in said
    assert "secret" not in said
    assert len(fleet.calls) == 1


def test_a_rented_machine_is_given_back_at_every_end_and_an_own_machine_never(
    fleet: type[Fleet], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(program, "give_back", lambda: given_back.append(True))
    assert program.main() == 0
    fleet.refusal = "enrolment_used"
    assert program.main() == program.EXIT_BAD_SETTINGS
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATON_WORKSPACE", str(tmp_path / "file"))
    fleet.refusal = ""
    assert program.main() == program.EXIT_WORKSPACE
    assert given_back == [True] * 3
    monkeypatch.setenv("BATON_API_KEY", KEY)
    monkeypatch.delenv("BATON_ENROLMENT_TOKEN")
    assert program.main() == program.EXIT_WORKSPACE
    assert given_back == [True] * 3


def test_a_spot_notice_stops_a_rented_machine_as_a_signal_does(
    fleet: type[Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint that follows a stop request is proved in e2e/test_e2e_preemption.py."""
    fleet.drains = False
    requests: list[tuple[str, float]] = []
    announce = ShutdownRequest.announce

    def record(self: ShutdownRequest, reason: str, within_s: float) -> None:
        requests.append((reason, within_s))
        announce(self, reason, within_s)

    monkeypatch.setattr(ShutdownRequest, "announce", record)
    began = time.monotonic()
    with MetadataService() as service:
        service.announce(within_s=100)
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
        monkeypatch.setenv("BATON_SPOT_NOTICES", "ec2")
        assert program.main() == 0
    ((reason, within_s),) = requests
    assert reason == "spot notice" and 98 - (time.monotonic() - began) < within_s <= 100
