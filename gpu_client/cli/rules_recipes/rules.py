"""`baton rules` and `baton tell`: what watches and steers a training, and commands for a running one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from baton.contract.rule_calls import ControlPlaneRules, RulesRevision, RulesView
from baton.contract.rules.document import presets
from baton.contract.rules.document.loader import Loaded, load
from baton.contract.rules.metrics import BUILT_IN, SIGNALS
from baton.contract.steering import MAX_RULES_BYTES, RuleStatus
from gpu_client.cli.core.documents import read_text, require_sound, told
from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.formats import count, moment
from gpu_client.cli.core.output import FOLDED, Column
from gpu_client.cli.core.session import (
    SHOWN_ID_CHARACTERS,
    AsJson,
    JobIdArgument,
    Session,
    find_job,
    full_id,
    session_of,
)
from gpu_client.cli.rules_recipes.backtest import backtest
from gpu_client.importers.ibm.trainer_controller import import_ibm
from gpu_client.transport.api.calls import pages

rules = typer.Typer(help="What watches and steers a training: docs/rules.md.", no_args_is_help=True)
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Rules: YAML or JSON.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the group, and the command for commands."""
    rules.command("backtest")(backtest)
    app.add_typer(rules, name="rules")


@rules.command("check")
def check(context: typer.Context, file: FileArgument, as_json: AsJson = False) -> None:
    """Find every fault of a rule file, and what looks doubtful: line, column, reason and remedy."""
    session = session_of(context)
    loaded = load(_text(file))
    _report(session, file, loaded, {} if as_json else None)


@rules.command("presets")
def show_presets(context: typer.Context, as_json: AsJson = False) -> None:
    """Print the rules that every training has unless they are switched off (`presets: off`), with their reasons."""
    screen = session_of(context).screen
    if as_json:
        screen.json({"names": list(presets.NAMES), "text": presets.DOCUMENT})
        return
    for line in presets.DOCUMENT.removesuffix("\n").split("\n"):
        screen.line(line)


@rules.command("import")
def import_file(context: typer.Context, file: FileArgument, as_json: AsJson = False) -> None:
    """Translate a file of IBM's trainer controller and print it; what differs is told on the other stream."""
    session = session_of(context)
    imported = import_ibm(_text(file))
    if as_json:
        faults, notes = ([one._asdict() for one in found] for found in (imported.faults, imported.notes))
        session.screen.json({"file": str(file), "text": imported.text, "faults": faults, "notes": notes})
        if imported.faults:
            raise typer.Exit(ExitCode.FAILED)
        return
    require_sound(file, imported.faults)
    for note in imported.notes:
        session.screen.say(told(file, note))
    for line in imported.text.removesuffix("\n").split("\n"):
        session.screen.line(line)


@rules.command("test")
def test(context: typer.Context, job_id: JobIdArgument, file: FileArgument, as_json: AsJson = False) -> None:
    """Check a rule file against what a job reports; nothing is changed.

    A metric that its training does not report is a fault here, with the nearest name that it does.
    """
    session = session_of(context)
    text = _text(file)
    with session.client() as client:
        job = find_job(client, job_id)
    if job.progress is None or not job.progress.metrics:
        raise CliError(f"{job.id[:SHOWN_ID_CHARACTERS]} has reported no metrics yet", f"Try: baton rules check {file}")
    reported = sorted(job.progress.metrics)
    loaded = load(text, reported=reported, max_steps=job.progress.total_steps)
    _report(session, file, loaded, {"job": job.id, "reported": reported} if as_json else None)


@rules.command("set")
def set_rules(
    context: typer.Context,
    job_id: JobIdArgument,
    file: FileArgument,
    if_revision: Annotated[
        int | None, typer.Option(min=0, help="Only if the job's newest revision is this one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Give a job these rules; a running training goes by them within a heartbeat.

    What is the same in them keeps its counters. An empty file takes all rules away.
    """
    session = session_of(context)
    text = _text(file)
    if text.strip():
        require_sound(file, load(text).faults)
    with session.client() as client:
        view = client.put_rules(full_id(client, job_id), text, if_revision=if_revision)
    if as_json:
        session.screen.json(view)
        return
    for warning in load(text).warnings if text.strip() else ():
        session.screen.say(f"{told(file, warning)} (warning)")
    revision = view.newest.revision if view.newest else 0
    session.screen.line(f"revision {revision}. How it stands: baton rules show {job_id}")


@rules.command("show")
def show(
    context: typer.Context,
    job_id: JobIdArgument,
    text: Annotated[bool, typer.Option("--text", help="The document, and nothing else.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say of each rule how it stands: armed, 3 of 5, last value, next check."""
    session = session_of(context)
    with session.client() as client:
        view = client.rules(full_id(client, job_id))
    if as_json:
        session.screen.json(view)
    elif view.newest is None:
        session.screen.say(f"No rules. Give it some: baton rules set {job_id} FILE")
    elif text:
        for line in view.newest.text.removesuffix("\n").split("\n"):
            session.screen.line(line)
    else:
        session.screen.line(f"revision {view.newest.revision} of {moment(view.newest.created_at)}: {_standing(view)}")
        here = view.control_plane
        if here is not None and here.statuses:
            session.screen.line(_looked_at(here))
        rows = [
            [one.rule, one.state, where, _without(one.said, one.state), str(one.fires)]
            for where, one in _statuses(view)
        ]
        if rows:
            columns = ("rule", "state", "where", Column("how it stands", FOLDED), Column("fired", right=True))
            session.screen.table(columns, rows)


@rules.command("history")
def history(context: typer.Context, job_id: JobIdArgument, as_json: AsJson = False) -> None:
    """List all revisions of a job's rules, the newest first."""
    session = session_of(context)
    with session.client() as client:
        job = full_id(client, job_id)
        listed = pages(lambda cursor: client.rules_history(job, limit=100, cursor=cursor))
        found: list[RulesRevision] = [one for page in listed for one in page.revisions]
    if as_json:
        session.screen.json(found)
        return
    rows = [[str(one.revision), moment(one.created_at), one.created_by or "", _names_in(one.text)] for one in found]
    session.screen.table((Column("revision", right=True), "given", "by key", Column("rules", FOLDED)), rows)


def _text(file: Path) -> str:
    return read_text(file, "a rule document", MAX_RULES_BYTES)


def _report(session: Session, file: Path, loaded: Loaded, more: dict[str, Any] | None) -> None:
    """Everything that is to be said of a document; as JSON where there is `more`. Faults end the program."""
    if more is not None:
        faults, warnings = ([one._asdict() for one in found] for found in (loaded.faults, loaded.warnings))
        session.screen.json({"file": str(file), **more, "faults": faults, "warnings": warnings})
    else:
        for line in _told(file, loaded):
            session.screen.line(line)
    if loaded.faults:
        raise typer.Exit(ExitCode.FAILED)


def _told(file: Path, loaded: Loaded) -> list[str]:
    lines = [told(file, fault) for fault in loaded.faults]
    lines += [f"{told(file, doubt)} (warning)" for doubt in loaded.warnings]
    if loaded.rules is not None:
        counted = {SIGNALS + signal.name for signal in loaded.rules.signals}
        own = sorted({name for rule in loaded.rules.rules for name in rule.metrics} - BUILT_IN.keys() - counted)
        lines.append(f"{file}: {count(len(loaded.rules.rules), 'rule')} without faults")
        if own:
            lines.append(f"They read what only your training reports: {', '.join(own)}")
    return lines


def _standing(view: RulesView) -> str:
    said = view.acknowledged
    newest = view.newest.revision if view.newest else 0
    if said is None:
        return "no worker has said anything of it yet"
    if said.rejected == newest:
        return f"rejected by the training: {said.reason}"
    if said.revision < newest or said.step is None:
        return f"on its way; revision {said.revision} was the newest at the last heartbeat"
    return f"in force since step {said.step:,} of attempt {said.epoch}, as of {moment(said.at)}"


def _looked_at(here: ControlPlaneRules) -> str:
    looked = f"checked at {moment(here.at)}" if here.at is not None else "not checked yet"
    ahead = f", again by {moment(here.next_check_at)}" if here.next_check_at is not None else ", and not again"
    return f"in the control plane: {looked}{ahead}"


def _statuses(view: RulesView) -> list[tuple[str, RuleStatus]]:
    """With where each rule is evaluated."""
    told = view.acknowledged.statuses if view.acknowledged is not None else []
    here = view.control_plane.statuses if view.control_plane is not None else []
    return [*(("training", one) for one in told), *(("control plane", one) for one in here)]


def _without(said: str, state: str) -> str:
    return said.removeprefix(state).removeprefix(", ")


def _names_in(text: str) -> str:
    loaded = load(text) if text.strip() else None
    if loaded is None:
        return "none"
    return ", ".join(rule.name for rule in loaded.rules.rules) if loaded.rules is not None else "unreadable here"
