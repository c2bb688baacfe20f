"""Test the start and the end of the agent's process: exit codes and standard error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_client.agent.app import program
from gpu_client.agent.app.shutdown import ShutdownRequest


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
    assert capsys.readouterr().err.startswith(f"BATON_WORKSPACE={tmp_path / 'file'}: ")


def test_what_hangs_after_a_second_signal_is_left_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(program, "HURRY_S", 0.0)
    monkeypatch.setattr(os, "_exit", codes.append)
    stop = ShutdownRequest(same_request_s=0)
    stop.request("SIGTERM")
    stop.request("SIGTERM")
    program._exit_at_once(stop)
    assert codes == [program.EXIT_HURRIED]
