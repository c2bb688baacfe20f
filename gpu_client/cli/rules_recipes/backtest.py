"""Command `baton rules backtest`: show the effects that rules would have had on recorded runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from baton.contract.jobs.history import AttemptView
from baton.contract.jobs.job import JobState, JobView
from baton.contract.jobs.rule_backtest import history_of_points, view_verdict
from baton.contract.rules.document.loader import load
from baton.contract.rules.document.rule import RuleSet
from baton.contract.rules.metrics import name_in_rules
from baton.contract.worker.control import MAX_RULES_BYTES
from gpu_client.cli.core.documents import format_fault, read_text, require_no_faults
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import count, duration, number, plain, require_finite
from gpu_client.cli.core.output import FOLDED, TableColumn
from gpu_client.cli.core.session import SHOWN_ID_CHARACTERS, AsJson, CliSession, find_job, session_of
from gpu_client.cli.insight.metric_history import load_history
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient

if TYPE_CHECKING:
    from baton.contract.rules.backtest.history import History
    from baton.contract.rules.backtest.judging import After, Aim, Finding, Run, RunVerdict

_COLUMNS = (
    "rule",
    TableColumn("fires", right=True),
    TableColumn("first at step", right=True),
    TableColumn("after", right=True),
    TableColumn("values then", FOLDED),
    "it would",
    TableColumn("GPU hours", right=True),
    TableColumn("why", FOLDED),
)


def backtest(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="RULES", help="Rules: YAML or JSON.", show_default=False)],
    *,
    jobs: Annotated[
        list[str] | None, typer.Option("--job", metavar="ID", help="Job whose reports are replayed; repeatable.")
    ] = None,
    tables: Annotated[
        list[Path] | None,
        typer.Option("--csv", metavar="FILE", help="CSV file: columns step, time (optional), metrics; repeatable."),
    ] = None,
    documents: Annotated[
        list[Path] | None,
        typer.Option(
            "--jsonl", metavar="FILE", help="JSON Lines file, a report a line; or a trainer_state.json; repeatable."
        ),
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(metavar="METRIC[:min|max]", help="Goal of the verdicts; default: the job's goal, or the loss."),
    ] = None,
    gpus: Annotated[
        float | None, typer.Option(min=0, help="GPUs per run; default: the GPUs that the job requires, or 1.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show when each rule would have fired, and the GPU hours it would have saved or wrongly cut off.

    The command changes nothing. The replay evaluates each rule separately on the recorded reports and performs no
    actions.
    """
    session = session_of(context)
    if not (jobs or tables or documents):
        raise CliError("there is nothing to try the rules on", "Give --job ID, --csv FILE or --jsonl FILE.")
    require_finite(gpus, "--gpus")
    rules = _rules(session, file)
    from baton.contract.rules.backtest.judging import judged

    options = _Options(rules, goal, gpus)
    runs = chain(_runs_of_files(options, tables or [], documents or []), _runs_of_jobs(session, options, jobs or []))
    verdicts: list[RunVerdict] = []
    for run in runs:
        with _rows_bar(session, run.history) as advance:
            verdicts.append(judged(rules, run, advance))
    if as_json:
        data = {"rules": str(file), "runs": [_as_data(one) for one in verdicts], "total": _total(verdicts)}
        session.output.json(data)
        return
    for place, verdict in enumerate(verdicts):
        if place:
            session.output.line("")
        _show(session, verdict)
    if len(verdicts) > 1:
        session.output.line("")
        session.output.line(_total_sentence(_total(verdicts)))


@contextmanager
def _rows_bar(session: CliSession, history: History) -> Iterator[Callable[[int], None]]:
    """Show a bar if standard error is a terminal; yield the function that adds a number of finished rows."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=session.output.err, transient=True, disable=not session.output.live) as bar:
        task = bar.add_task(plain(history.name), total=history.rows)
        yield lambda rows: bar.update(task, advance=rows)


def _rules(session: CliSession, file: Path) -> RuleSet:
    loaded = load(read_text(file, "a rule document", MAX_RULES_BYTES))
    require_no_faults(file, loaded.faults)
    for warning in loaded.warnings:
        session.output.note(f"{format_fault(file, warning)} (warning)")
    if loaded.rules is None or not loaded.rules.rules:
        raise CliError(f"{file} has no rules", "Write one: docs/rules.md.")
    return loaded.rules


class _Options(NamedTuple):
    """Options shared by all runs."""

    rules: RuleSet
    goal: str | None
    gpus: float | None


def _runs_of_files(options: _Options, tables: Sequence[Path], documents: Sequence[Path]) -> Iterator[Run]:
    """Read the files one by one, and yield the runs."""
    from baton.contract.rules.backtest.history import HistoryError
    from baton.contract.rules.backtest.judging import Run
    from gpu_client.backtest.reading import read_csv, read_jsonl

    for read, files in ((read_csv, tables), (read_jsonl, documents)):
        for one in files:
            try:
                history = read(one)
            except HistoryError as error:
                line = f":{error.line}" if error.line is not None else ""
                raise CliError(f"{one}{line}: {error.reason}", error.remedy) from error
            yield Run(history, 1.0 if options.gpus is None else options.gpus, aim=_aim(history, options, None))


def _runs_of_jobs(session: CliSession, options: _Options, jobs: Sequence[str]) -> Iterator[Run]:
    if not jobs:
        return
    with session.client() as client:
        for given in jobs:
            yield _run_of(client, find_job(client, given), options)


def _run_of(client: BatonClient, job: JobView, options: _Options) -> Run:
    from baton.contract.rules.backtest.judging import Aim, Run

    attempts = [
        one for page in pages(lambda at: client.attempts(job.id, limit=1000, cursor=at)) for one in page.attempts
    ]
    history = _history_of(client, job, attempts)
    retention = job.policy.retention
    keep_best: Aim | None = None
    if retention.keep_best_metric is not None:
        keep_best = Aim(name_in_rules(retention.keep_best_metric), retention.keep_best_mode)
    end = float(history.clock[-1])
    return Run(
        history,
        options.gpus if options.gpus is not None else float(job.requirements.min_gpus or 1),
        failed=job.state is JobState.FAILED,
        aim=_aim(history, options, keep_best),
        held=[(float(one.started_at), float(one.ended_at) if one.ended_at is not None else end) for one in attempts],
    )


def _history_of(client: BatonClient, job: JobView, attempts: Sequence[AttemptView]) -> History:
    from baton.contract.rules.backtest.history import HistoryError

    points = load_history(client, job.id, attempts).kept
    name = job.name or job.id[:SHOWN_ID_CHARACTERS]
    try:
        return history_of_points(points, name)
    except HistoryError as error:
        raise CliError(
            f"{job.id[:SHOWN_ID_CHARACTERS]} has no history of metrics: {error.reason}",
            "Scripts report with session.report; see: baton metrics ID",
        ) from error


def _aim(history: History, options: _Options, keep_best: Aim | None) -> Aim | None:
    from baton.contract.rules.backtest.judging import aim_of

    try:
        return aim_of(history, options.rules.metrics(), options.goal, keep_best)
    except ValueError as error:
        raise CliError(f"{history.name}: {error}") from error


def _show(session: CliSession, verdict: RunVerdict) -> None:
    run, history = verdict.run, verdict.run.history
    steps = f"steps {history.steps[0]:,} to {history.steps[-1]:,}"
    time_span = "no times" if history.times is None else _duration_text(run.seconds_after(0))
    aim = f"goal: {run.aim.goal} {run.aim.metric}" if run.aim is not None else "no goal known"
    gpus = f"{run.gpus:g} {'GPU' if run.gpus == 1 else 'GPUs'}"
    session.output.line(f"{history.name}: {count(history.rows, 'row')}, {steps}, {time_span}, {gpus}, {aim}")
    for note in history.notes:
        session.output.note(f"{history.name}: {note}")
    session.output.table(_COLUMNS, [_row(finding, run) for finding in verdict.findings])
    session.output.line(_end_sentence(verdict))


def _row(finding: Finding, run: Run) -> list[str]:
    row, trial = finding.first, finding.trial
    name = finding.rule.name + (" (dry run)" if finding.rule.mode == "dry_run" else "")
    if trial is None:
        return [name, "-", "", "", "", "", "", finding.reason]
    if row is None:
        return [name, "0", "", "", "", "", "", finding.reason]
    values = ", ".join(f"{text} = {_value_text(value)}" for text, value in trial.operands)
    after, would = finding.after, ", ".join(finding.action_names())
    hours, why = "", finding.reason
    if after is not None:
        hours = "" if after.gpu_hours is None else f"{after.gpu_hours:.2f} {after.use}"
        why = "; ".join(filter(None, (_reason(after, finding, run), finding.reason)))
    first = f"{run.history.steps[row]:,}", _duration_text(run.seconds_until(row))
    return [name, f"{len(trial.fired):,}", *first, values, would, hours, why]


def _reason(after: After, finding: Finding, run: Run) -> str:
    """Explain a verdict: `the best eval.loss, 0.31, came 1 h 6 min later`."""
    better = after.better
    if better is None or finding.first is None or run.aim is None or after.use != "wrongly":
        return after.why
    when = f"at step {run.history.steps[better.row]:,}"
    if run.history.times is not None:
        when = f"{_duration_text(float(run.history.clock[better.row] - run.history.clock[finding.first]))} later"
    return f"the best {run.aim.metric}, {_value_text(better.value)}, came {when}"


def _end_sentence(verdict: RunVerdict) -> str:
    end, run = verdict.end, verdict.run
    if end is None or end.first is None:
        return "The run would have gone its way to the end."
    step = f"{run.history.steps[end.first]:,}"
    if end.after is None:
        return (
            f"At step {step} {end.rule.name} would have given it another way ({end.action}): what then, nobody knows."
        )
    earlier = "" if end.after.seconds is None else f", {_duration_text(end.after.seconds)} earlier"
    hours = "The rest" if end.after.gpu_hours is None else f"{end.after.gpu_hours:.2f} GPU hours"
    use = {"saved": "saved", "wrongly": "wrongly cut off", "unknown": "of unknown use"}[end.after.use]
    why = _reason(end.after, end, run)
    return f"It would have ended at step {step} by {end.rule.name}{earlier}. {hours} {use}: {why}."


def _total(found: Sequence[RunVerdict]) -> dict[str, Any]:
    """Sum up the GPU hours after the first end of each run."""
    ends = [one.end.after for one in found if one.end is not None and one.end.after is not None]
    hours = {
        use: sum(one.gpu_hours or 0.0 for one in ends if one.use == use) for use in ("saved", "wrongly", "unknown")
    }
    return {
        "runs": len(found),
        "ended_earlier": len(ends),
        "wrongly_ended": sum(one.use == "wrongly" for one in ends),
        "gpu_hours": hours,
    }


def _total_sentence(total: dict[str, Any]) -> str:
    hours = total["gpu_hours"]
    unknown = f", {hours['unknown']:.2f} of unknown use" if hours["unknown"] else ""
    return (
        f"{count(total['runs'], 'run')}, {total['ended_earlier']} ended earlier, "
        f"{total['wrongly_ended']} of them wrongly: "
        f"{hours['saved']:.2f} GPU hours saved, {hours['wrongly']:.2f} wrongly cut off{unknown}"
    )


def _as_data(verdict: RunVerdict) -> dict[str, Any]:
    history = verdict.run.history
    return {"name": history.name, "notes": list(history.notes), **view_verdict(verdict).model_dump(mode="json")}


def _value_text(value: float | bool | None) -> str:
    if value is None:
        return "unknown"
    return str(value).lower() if isinstance(value, bool) else number(value)


def _duration_text(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)
