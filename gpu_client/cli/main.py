"""Program `baton`: register all commands, convert errors into lines and exit codes."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Annotated, Any

import typer

from gpu_client.cli.admin import console, doctor, keys, local, login, webhooks
from gpu_client.cli.core.errors import ExitCode, describe, problems_of
from gpu_client.cli.core.formats import plain
from gpu_client.cli.core.session import CliSession
from gpu_client.cli.data import fetch, push
from gpu_client.cli.fleet import commands as fleet
from gpu_client.cli.insight import logs, metrics, report
from gpu_client.cli.jobs import control, explain, show, submit, watch
from gpu_client.cli.ring import commands as ring
from gpu_client.cli.rules_recipes import recipes, rules
from gpu_client.cli.world import commands as world
from gpu_client.transport.net.connections import user_agent

app = typer.Typer(
    name="baton",
    help="Train on preemptible GPUs. Start with: baton login URL",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_IN_ORDER = (
    login, push, submit, show, watch, logs, metrics, report, explain, control, rules, fetch, recipes, fleet, world,
    console, keys, webhooks, ring, local, doctor,
)  # fmt: skip
for commands in _IN_ORDER:
    commands.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(user_agent().partition(" ")[0].replace("/", " ") + "\n")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    profile: Annotated[
        str | None, typer.Option("--profile", help="Use this stored profile; overrides the environment.")
    ] = None,
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    session = context.find_object(CliSession)
    if session is not None:
        session.profile_name = profile


@cache
def _command() -> Any:
    """Build the command tree. The build inspects the signature of every command, which takes 50 ms."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None, session: CliSession | None = None) -> int:
    """Run one command and return its exit code.

    Writes each error to standard error: one line, then one line for each of several problems.
    """
    session = session or CliSession()
    # The shell can close a stream (`>&-`); Python then has None, and writes would raise.
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Foreign names can have characters outside the terminal's encoding, therefore writes replace such
            # characters and do not fail.
            stream.reconfigure(errors="replace")
    try:
        with _interruptible(session):
            found = _command().main(
                args=None if arguments is None else list(arguments),
                prog_name="baton",
                standalone_mode=False,
                obj=session,
            )
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes the buffer at exit and would fail again, therefore the buffer goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OUTPUT_CLOSED
    except SystemExit as left:
        # Shell completion raises SystemExit.
        return left.code if isinstance(left.code, int) else ExitCode.OK
    except BaseException as error:  # noqa: BLE001 - boundary: every error becomes a line and an exit code
        if session.environ.get("BATON_DEBUG"):
            traceback.print_exception(error)
        code, line = describe(error)
        if line:
            _print_error(line)
        for problem in problems_of(error):
            sys.stderr.write(f"{_on_one_line(problem)}\n")
        return int(code)
    if found == ExitCode.INTERRUPTED:
        _print_error("interrupted")
    return found if isinstance(found, int) else ExitCode.OK


def _print_error(line: str) -> None:
    """Write a message to standard error as one line."""
    sys.stderr.write(f"baton: {_on_one_line(line)}\n")


def _on_one_line(text: str) -> str:
    return plain(" ".join(text.split()))


@contextmanager
def _interruptible(session: CliSession) -> Iterator[None]:
    """Convert SIGINT, SIGTERM and SIGHUP to KeyboardInterrupt, after setting the cancel event for other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        session.cancel.set()
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
