"""Command `baton fleet doctor`: find what costs money without a use or has stopped working, and offer to fix it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from baton.contract.fleets.doctor import DoctorFinding, DoctorReport, FindingCode, FixOutcome
from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.formats import count
from gpu_client.cli.core.output import FOLDED, TableColumn
from gpu_client.cli.core.session import AsJson, CliSession, session_of
from gpu_client.cli.fleet.view import RECEIPTS, receipt_rows
from gpu_client.transport.api.client import BatonClient

FINDINGS = ("finding", TableColumn("detail", FOLDED), TableColumn("--fix", FOLDED))
ROUNDS = 60
PAUSE_S = 3.0
"""Most calls for the fixes, and the pause between two: a provider accepts one destroy every few seconds."""


def register(fleet: typer.Typer) -> None:
    """Add the command."""
    fleet.command("doctor")(doctor)


def doctor(
    context: typer.Context,
    fix: Annotated[bool, typer.Option("--fix", help="Fix what can be fixed, after a question.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before a fix.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find strays, leaked disks, stopped but billed machines, refused keys, low credit, a late controller.

    Exit code 1 while a finding is left that needs an action.
    """
    session = session_of(context)
    with session.client() as client:
        report = client.examine_fleets()
        fixable = [one for one in report.findings if one.fix]
        if not as_json:
            _show(session, report)
        outcomes: list[FixOutcome] = []
        if fix and fixable:
            _require_consent(fixable, yes=yes, as_json=as_json)
            outcomes = _fix(session, client, [one.id for one in fixable])
    if as_json:
        session.output.json({**report.model_dump(mode="json"), "outcomes": [one.model_dump() for one in outcomes]})
    for one in () if as_json else outcomes:
        session.output.line(f"{'fixed' if one.fixed else 'not fixed'}  {one.id}: {one.detail}")
    fixed = {one.id for one in outcomes if one.fixed}
    if any(one.id not in fixed and one.code is not FindingCode.FOREIGN_MACHINES for one in report.findings):
        raise typer.Exit(ExitCode.FAILED)


def _show(session: CliSession, report: DoctorReport) -> None:
    examined = ", ".join(report.providers) or "no provider"
    if not report.findings:
        session.output.line(f"Nothing was found; examined: {examined}.")
    else:
        session.output.table(FINDINGS, ([one.code.value, one.detail, one.fix] for one in report.findings))
        session.output.note(f"Examined: {examined}.")
    if report.strays:
        session.output.line("\nstrays that the deployment paid, because no fleet is known for them")
        session.output.table(RECEIPTS, receipt_rows(report.strays))


def _require_consent(fixable: Sequence[DoctorFinding], *, yes: bool, as_json: bool) -> None:
    if yes:
        return
    question = f"Fix {count(len(fixable), 'finding')} as described?"
    if as_json or not typer.confirm(question, err=True):
        raise CliError("nothing was fixed", "To fix without a question: --fix --yes", exit_code=ExitCode.FAILED)


def _fix(session: CliSession, client: BatonClient, ids: Sequence[str]) -> list[FixOutcome]:
    """Order the fixes until none waits for its provider's shortest interval between two calls."""
    outcomes = {one.id: one for one in client.fix_findings(ids)}
    for _ in range(ROUNDS):
        waiting = [one.id for one in outcomes.values() if one.later]
        if not waiting:
            break
        session.sleep(PAUSE_S)
        outcomes |= {one.id: one for one in client.fix_findings(waiting)}
    return list(outcomes.values())
