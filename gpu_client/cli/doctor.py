"""`baton doctor`: what is wrong between this machine and the control plane."""

from __future__ import annotations

import typer

from gpu_client.cli.checkup import Check, Verdict, examine
from gpu_client.cli.errors import ExitCode
from gpu_client.cli.session import AsJson, session_of

_COLOURS = {Verdict.OK: "\x1b[32m", Verdict.WARN: "\x1b[33m", Verdict.FAIL: "\x1b[31m"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(context: typer.Context, as_json: AsJson = False) -> None:
    """Check address, key, clock, versions, latency and bandwidth.

    Exit code 1 if anything fails.
    """
    session = session_of(context)
    found: list[Check] = []
    for check in examine(session):
        found.append(check)
        if not as_json:
            session.screen.line(f"{_COLOURS[check.verdict]}{check.verdict.value:5}\x1b[0m{check.name:12} {check.said}")
            if check.remedy:
                session.screen.line(f"{'':17} {check.remedy}")
    failed = any(check.verdict is Verdict.FAIL for check in found)
    if as_json:
        session.screen.json({"ok": not failed, "checks": [check.as_data() for check in found]})
    if failed:
        raise typer.Exit(ExitCode.FAILED)
