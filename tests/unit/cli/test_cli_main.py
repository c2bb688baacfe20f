"""The program without a control plane: help, usage, unknown profiles, interruptions, defects."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from gpu_client.cli import main as main_module
from gpu_client.cli.__main__ import run
from gpu_client.cli.admin import local as local_module
from gpu_client.cli.core.session import CliSession
from gpu_client.cli.jobs import show as show_module
from gpu_client.cli.main import app, main

GROUPS = {
    "data": ["push", "ls", "prefetch"],
    "fleet": ["apply", "plan", "ls", "show", "watch", "stop", "receipts", "events"],
    "keys": ["create", "list", "revoke", "rotate"],
    "recipes": ["lint", "push", "list", "show", "docs", "run"],
    "rules": ["check", "import", "test", "set", "show", "history", "backtest", "presets"],
    "ring": ["make", "status", "watch", "verify", "publish", "record"],
    "webhooks": ["create", "list", "delete", "deliveries", "replay"],
    "world": ["show", "plan"],
}
NEEDS_ID = [
    "show",
    "watch",
    "logs",
    "events",
    "explain",
    "metrics",
    "report",
    "stop",
    "pause",
    "resume",
    "retry",
    "tell",
    "share",
]
COMMANDS = [
    *([name] for name in ["login", "console", "submit", "jobs", "fetch", "local", "doctor", "offers", *NEEDS_ID]),
    *([group, name] for group, names in GROUPS.items() for name in names),
]


@pytest.fixture
def session(tmp_path: Path) -> CliSession:
    return CliSession(environ={"XDG_CONFIG_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)})


def test_every_command_is_there() -> None:
    command = typer.main.get_command(app)
    assert sorted(command.commands) == sorted({words[0] for words in COMMANDS})  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_json(
    words: list[str], session: CliSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--help"], session) == 0
    said = capsys.readouterr().out
    assert "Usage: baton" in said
    assert "--json" in said


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["jobs", "--nonsense"],
        ["show"],
        ["jobs", "--limit", "0"],
        ["jobs", "--limit", "many"],
        ["jobs", "--status", "asleep"],
        ["console"],
        ["keys", "create", "x"],
        ["submit"],
        ["data", "push", "/", "a", "b"],
        ["keys", "rotate", "abcd", "--overlap", "soon"],
        ["watch", "146683a1", "--every", "nan"],
        ["watch", "146683a1", "--price-per-hour", "inf"],
        ["login", "https://host", "--price-per-hour", "nan"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    words: list[str], session: CliSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words, session) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("baton: ")
    assert seen.err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["data"], ["keys"]], ids=" ".join)
def test_no_command_shows_which_there_are_and_no_more(
    words: list[str], session: CliSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words, session) == 2
    seen = capsys.readouterr()
    assert "Usage: baton" in seen.out
    assert seen.err == ""


def test_the_help_has_one_line_for_each_command(
    session: CliSession, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    assert main(["--help"], session) == 0
    shown = capsys.readouterr().out.splitlines()
    for command in sorted({words[0] for words in COMMANDS}):
        (line,) = [number for number, line in enumerate(shown) if line.startswith(f"\u2502 {command} ")]
        assert not shown[line + 1].startswith("\u2502  "), f"the help of {command} goes on in a second line"


@pytest.mark.parametrize("words", [["jobs"], ["show", "146683a1"], ["keys", "list"], ["data", "ls"]], ids=" ".join)
def test_without_a_profile(words: list[str], session: CliSession, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--json"], session) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "baton login" in seen.err


@pytest.mark.parametrize(
    ("url", "key"), [("ftp://host", "key"), ("https://", "key"), ("https://me:pw@host", "key"), ("https://h", "a b")]
)
def test_addresses_and_keys_that_are_none(
    url: str, key: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    environ = {"BATON_API_URL": url, "BATON_API_KEY": key, "XDG_CONFIG_HOME": str(tmp_path)}
    assert main(["jobs"], CliSession(environ=environ)) == 2
    assert "baton login --help" in capsys.readouterr().err


def test_the_version(session: CliSession, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"], session) == 0
    assert capsys.readouterr().out.startswith("baton ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_it_in_good_order(
    number: signal.Signals, session: CliSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr(show_module, "session_of", lambda _: signal.raise_signal(number))
    assert main(["jobs"], session) == 130
    assert session.cancel.is_set()
    assert capsys.readouterr().err == "baton: interrupted\n"
    assert signal.getsignal(number) == before


def test_a_defect_is_one_line_without_a_traceback(
    session: CliSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(show_module, "session_of", broken)
    assert main(["jobs"], session) == 1
    said = capsys.readouterr().err
    assert said == "baton: a defect of this program (KeyError: 'x'). Set BATON_DEBUG=1 for a traceback.\n"
    session.environ = {"BATON_DEBUG": "1"}
    assert main(["jobs"], session) == 1
    assert "Traceback" in capsys.readouterr().err


def test_local_says_what_is_missing(
    session: CliSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local_module, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert main(["local"], session) == 1
    assert (
        "not installed (uvicorn missing). In a checkout of the repository, run: make local" in capsys.readouterr().err
    )


def test_local_becomes_the_local_stack(session: CliSession, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.append([program, *command]))
    words = ["--port", "0", "--state-dir", "kept here", "--forget", "--json"]
    assert main(["local", *words], session) == 0
    assert started == [[sys.executable, sys.executable, "-m", "functions.local", *words]]


@pytest.mark.parametrize("words", [["submit", "-"], ["login", "https://host"]], ids=" ".join)
def test_standard_input_may_be_closed(
    words: list[str], session: CliSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(words, session) == 2
    assert "defect" not in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_stream_is_no_defect(
    closed: str, session: CliSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, closed, None)
    assert main(["--version"], session) == 0
    assert main(["jobs"], session) == 2
    seen = capsys.readouterr()
    assert "defect" not in seen.err
    assert "Traceback" not in seen.err + seen.out


def test_where_only_the_agent_is_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "gpu_client.cli.main")
    monkeypatch.setitem(sys.modules, "typer", None)
    assert run() == 1
    said = capsys.readouterr().err
    assert said == "baton: typer is not installed. Run in a checkout of Baton: pip install '.[cli]'\n", (
        "the name baton at the package index belongs to another program"
    )


def test_what_is_missing_of_our_own_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpu_client.cli.main", None)
    with pytest.raises(ImportError):
        run()


def test_nothing_of_the_control_plane_is_imported() -> None:
    program = (
        "import sys; from gpu_client.cli.main import main; main(['--help']);"
        "print([name for name in sys.modules if name.partition('.')[0] in ('functions', 'boto3', 'botocore', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_command_takes_a_key_as_an_argument() -> None:
    """Arguments are seen by every user of the machine (`ps`) and kept in the shell's history."""
    cli = Path(main_module.__file__).parent
    options = [
        node.value
        for path in cli.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--")
    ]
    assert not {option for option in options if option in ("--key", "--api-key", "--token", "--secret")}
