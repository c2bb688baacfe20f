"""Command group `baton rules`: check, set, show, import and back-test rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from baton.contract.jobs.rule_calls import ControlPlaneRules, RulesRevision, RulesView
from baton.contract.rules.document import presets
from baton.contract.rules.document.loader import Loaded, load
from baton.contract.rules.metrics import BUILT_IN, SIGNALS
from baton.contract.worker.control import MAX_RULES_BYTES, RuleStatus
from gpu_client.cli.core.documents import format_fault, read_text, require_no_faults
from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.formats import count, moment
from gpu_client.cli.core.output import FOLDED, TableColumn
from gpu_client.cli.core.session import (
    SHOWN_ID_CHARACTERS,
    AsJson,
    CliSession,
    JobIdArgument,
    find_job,
    resolve_job_id,
    session_of,
)
from gpu_client.cli.rules_recipes.backtest import backtest
from gpu_client.importers.ibm.trainer_controller import import_ibm
from gpu_client.transport.api.calls import pages

rules = typer.Typer(help="Manage rules, which monitor and control a training.", no_args_is_help=True)
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Rule file, YAML or JSON.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    rules.command("backtest")(backtest)
    app.add_typer(rules, name="rules")


@rules.command("check")
def check(context: typer.Context, file: FileArgument, as_json: AsJson = False) -> None:
    """Check a rule file.

    Prints each fault and warning with line, column, reason and remedy. See docs/rules.md.
    """
    session = session_of(context)
    loaded = load(_read_file(file))
    _print_result(session, file, loaded, {} if as_json else None)


@rules.command("presets")
def show_presets(context: typer.Context, as_json: AsJson = False) -> None:
    """Print the preset rules.

    Presets watch every training unless a rule file contains `presets: off`.
    """
    output = session_of(context).output
    if as_json:
        output.json({"names": list(presets.NAMES), "text": presets.DOCUMENT})
        return
    for line in presets.DOCUMENT.removesuffix("\n").split("\n"):
        output.line(line)


@rules.command("import")
def import_file(context: typer.Context, file: FileArgument, as_json: AsJson = False) -> None:
    """Translate a file of IBM's trainer controller to rules.

    Prints the rules on standard output, and differences in behavior on standard error.
    """
    session = session_of(context)
    imported = import_ibm(_read_file(file))
    if as_json:
        faults, notes = ([one._asdict() for one in found] for found in (imported.faults, imported.notes))
        session.output.json({"file": str(file), "text": imported.text, "faults": faults, "notes": notes})
        if imported.faults:
            raise typer.Exit(ExitCode.FAILED)
        return
    require_no_faults(file, imported.faults)
    for note in imported.notes:
        session.output.note(format_fault(file, note))
    for line in imported.text.removesuffix("\n").split("\n"):
        session.output.line(line)


@rules.command("test")
def test(context: typer.Context, job_id: JobIdArgument, file: FileArgument, as_json: AsJson = False) -> None:
    """Check a rule file against the metrics of a job.

    The job does not change. A metric that the training does not report is a fault; the remedy names the most similar
    reported metric.
    """
    session = session_of(context)
    text = _read_file(file)
    with session.client() as client:
        job = find_job(client, job_id)
    if job.progress is None or not job.progress.metrics:
        raise CliError(
            f"{job.id[:SHOWN_ID_CHARACTERS]} has reported no metrics yet",
            f"Check the file without metrics: baton rules check {file}",
        )
    reported = sorted(job.progress.metrics)
    loaded = load(text, reported=reported, max_steps=job.progress.total_steps)
    _print_result(session, file, loaded, {"job": job.id, "reported": reported} if as_json else None)


@rules.command("set")
def set_rules(
    context: typer.Context,
    job_id: JobIdArgument,
    file: FileArgument,
    if_revision: Annotated[
        int | None, typer.Option(min=0, help="Fail unless the newest revision of the job has this number.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set the rules of a job.

    A running training applies the rules within a heartbeat. Unchanged rules keep their counters. An empty file removes
    all rules.
    """
    session = session_of(context)
    text = _read_file(file)
    if text.strip():
        require_no_faults(file, load(text).faults)
    with session.client() as client:
        view = client.put_rules(resolve_job_id(client, job_id), text, if_revision=if_revision)
    if as_json:
        session.output.json(view)
        return
    for warning in load(text).warnings if text.strip() else ():
        session.output.note(f"{format_fault(file, warning)} (warning)")
    revision = view.newest.revision if view.newest else 0
    session.output.line(f"revision {revision}. To see the state of the rules: baton rules show {job_id}")


@rules.command("show")
def show(
    context: typer.Context,
    job_id: JobIdArgument,
    text: Annotated[bool, typer.Option("--text", help="Print only the document.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of each rule of a job.

    For example: armed, 3 of 5, last value, next check.
    """
    session = session_of(context)
    with session.client() as client:
        view = client.rules(resolve_job_id(client, job_id))
    if as_json:
        session.output.json(view)
    elif view.newest is None:
        session.output.note(f"No rules. Set rules with: baton rules set {job_id} FILE")
    elif text:
        for line in view.newest.text.removesuffix("\n").split("\n"):
            session.output.line(line)
    else:
        session.output.line(
            f"revision {view.newest.revision} of {moment(view.newest.created_at)}: {_describe_acknowledgment(view)}"
        )
        here = view.control_plane
        if here is not None and here.statuses:
            session.output.line(_describe_control_plane(here))
        rows = [
            [one.rule, one.state, where, _strip_state(one.said, one.state), str(one.fires)]
            for where, one in _list_statuses(view)
        ]
        if rows:
            columns = ("rule", "state", "where", TableColumn("status", FOLDED), TableColumn("fired", right=True))
            session.output.table(columns, rows)


@rules.command("history")
def history(context: typer.Context, job_id: JobIdArgument, as_json: AsJson = False) -> None:
    """List all revisions of a job's rules, newest first."""
    session = session_of(context)
    with session.client() as client:
        job = resolve_job_id(client, job_id)
        listed = pages(lambda cursor: client.rules_history(job, limit=100, cursor=cursor))
        found: list[RulesRevision] = [one for page in listed for one in page.revisions]
    if as_json:
        session.output.json(found)
        return
    rows = [[str(one.revision), moment(one.created_at), one.created_by or "", _names_in(one.text)] for one in found]
    session.output.table((TableColumn("revision", right=True), "created", "by key", TableColumn("rules", FOLDED)), rows)


def _read_file(file: Path) -> str:
    return read_text(file, "a rule document", MAX_RULES_BYTES)


def _print_result(session: CliSession, file: Path, loaded: Loaded, more: dict[str, Any] | None) -> None:
    """Print faults and warnings of a document; as JSON with the fields `more` if given. Exits 1 for faults."""
    if more is not None:
        faults, warnings = ([one._asdict() for one in found] for found in (loaded.faults, loaded.warnings))
        session.output.json({"file": str(file), **more, "faults": faults, "warnings": warnings})
    else:
        for line in _format_result(file, loaded):
            session.output.line(line)
    if loaded.faults:
        raise typer.Exit(ExitCode.FAILED)


def _format_result(file: Path, loaded: Loaded) -> list[str]:
    lines = [format_fault(file, fault) for fault in loaded.faults]
    lines += [f"{format_fault(file, doubt)} (warning)" for doubt in loaded.warnings]
    if loaded.rules is not None:
        counted = {SIGNALS + signal.name for signal in loaded.rules.signals}
        own = sorted({name for rule in loaded.rules.rules for name in rule.metrics} - BUILT_IN.keys() - counted)
        lines.append(f"{file}: {count(len(loaded.rules.rules), 'rule')} without faults")
        if own:
            lines.append(f"The rules read metrics that your training must report: {', '.join(own)}")
    return lines


def _describe_acknowledgment(view: RulesView) -> str:
    acknowledged = view.acknowledged
    newest = view.newest.revision if view.newest else 0
    if acknowledged is None:
        return "not yet acknowledged by a worker"
    if acknowledged.rejected == newest:
        return f"rejected by the training: {acknowledged.reason}"
    if acknowledged.revision < newest or acknowledged.step is None:
        return f"in delivery; the last heartbeat acknowledged revision {acknowledged.revision}"
    return f"in force since step {acknowledged.step:,} of attempt {acknowledged.epoch}, as of {moment(acknowledged.at)}"


def _describe_control_plane(here: ControlPlaneRules) -> str:
    checked = f"checked at {moment(here.at)}" if here.at is not None else "not checked yet"
    ahead = f", next check by {moment(here.next_check_at)}" if here.next_check_at is not None else ", no further check"
    return f"in the control plane: {checked}{ahead}"


def _list_statuses(view: RulesView) -> list[tuple[str, RuleStatus]]:
    """List the rule statuses with the place of evaluation."""
    training = view.acknowledged.statuses if view.acknowledged is not None else []
    here = view.control_plane.statuses if view.control_plane is not None else []
    return [*(("training", one) for one in training), *(("control plane", one) for one in here)]


def _strip_state(text: str, state: str) -> str:
    """Remove the state, which has its own column, from a status text."""
    return text.removeprefix(state).removeprefix(", ")


def _names_in(text: str) -> str:
    loaded = load(text) if text.strip() else None
    if loaded is None:
        return "none"
    return (
        ", ".join(rule.name for rule in loaded.rules.rules)
        if loaded.rules is not None
        else "unreadable by this version"
    )
