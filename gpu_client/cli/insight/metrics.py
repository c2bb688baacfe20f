"""`baton metrics`: what a job's training reported."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from baton.contract.output import MetricPoint
from baton.contract.rules.metrics import canonical_name
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import count, number
from gpu_client.cli.core.output import Column
from gpu_client.cli.core.session import SHOWN_ID_CHARACTERS, AsJson, JobIdArgument, full_id, session_of
from gpu_client.cli.insight.metric_history import Outline, history_of, outlines_of
from gpu_client.transport.net.files import write_whole


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("metrics")(metrics)


def metrics(
    context: typer.Context,
    job_id: JobIdArgument,
    *,
    as_csv: Annotated[bool, typer.Option("--csv", help="Every point: a row each, a column for each metric.")] = False,
    as_jsonl: Annotated[bool, typer.Option("--jsonl", help="Every point: a JSON document a line.")] = False,
    names: Annotated[
        list[str] | None, typer.Option("--metric", metavar="NAME", help="Only this one; may be repeated.")
    ] = None,
    all_attempts: Annotated[
        bool, typer.Option("--all-attempts", help="Also steps that a later attempt did again.")
    ] = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Of --csv or --jsonl, instead of here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a job's training reported, or save it.

    Of each metric the first, last and best value; --csv and --jsonl: every point. What attempts saw behind the
    checkpoint from which the next one resumed is left out: each step is there once.
    """
    if as_csv + as_jsonl + as_json > 1:
        raise CliError("--csv, --jsonl and --json exclude each other")
    if output is not None and not (as_csv or as_jsonl):
        raise CliError("--output is for --csv or --jsonl", "Say which of them.")
    session = session_of(context)
    with session.client() as client:
        job = full_id(client, job_id)
        points = list(client.metric_points(job)) if all_attempts else history_of(client, job).kept
    chosen = _chosen(names, points)
    if as_csv or as_jsonl:
        lines = _csv(points, chosen) if as_csv else _jsonl(points, chosen if names else None)
        if output is not None:
            write_whole(output, "".join(f"{line}\n" for line in lines).encode())
            session.screen.say(f"{output}: {count(len(points), 'point')}")
        else:
            for line in lines:
                session.screen.raw(line)
        return
    outlines = outlines_of(chosen, points)
    if as_json:
        session.screen.json([_as_data(one) for one in outlines])
        return
    if not outlines:
        session.screen.say(f"{job[:SHOWN_ID_CHARACTERS]} has reported no metrics yet.")
    columns: tuple[Column | str, ...] = (
        "metric",
        *(Column(name, right=True) for name in ("points", "first", "last", "best", "at step")),
    )
    session.screen.table((*columns, Column("not finite", right=True)), map(_row, outlines))


def _chosen(wanted: Sequence[str] | None, points: Iterable[MetricPoint]) -> list[str]:
    """Metrics to show, by their names or by what rules call them; all in their order if none is wanted."""
    known = list(dict.fromkeys(name for point in points for name in point.metrics))
    if not wanted:
        return known
    chosen: list[str] = []
    for name in wanted:
        found = [one for one in known if one == name] or [one for one in known if canonical_name(one) == name]
        if not found:
            raise CliError(f"there is no metric {name!r}", f"There is: {', '.join(known) or 'none'}")
        chosen += found
    return chosen


def _csv(points: Iterable[MetricPoint], names: Sequence[str]) -> Iterator[str]:
    yield _csv_line(["epoch", "step", "at", *names])
    for point in points:
        if any(name in point.metrics for name in names) or not names:
            yield _csv_line([point.epoch, point.step, point.at, *(point.metrics.get(name, "") for name in names)])


def _csv_line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _jsonl(points: Iterable[MetricPoint], names: Sequence[str] | None) -> Iterator[str]:
    for point in points:
        shown = {name: value for name, value in point.metrics.items() if names is None or name in names}
        if shown or names is None:
            yield json.dumps({"epoch": point.epoch, "step": point.step, "at": point.at, "metrics": shown})


def _as_data(one: Outline) -> dict[str, object]:
    """JSON has neither NaN nor infinity: they are words."""
    return {**one._asdict(), "first": _word(one.first), "last": _word(one.last)}


def _word(value: float) -> float | str:
    return value if abs(value) < float("inf") else str(value)


def _row(one: Outline) -> list[str]:
    best = "" if one.best is None else number(one.best)
    at_step = "" if one.best_step is None else f"{one.best_step:,}"
    odd = f"{one.not_finite:,}" if one.not_finite else ""
    return [one.name, f"{one.points:,}", number(one.first), number(one.last), best, at_step, odd]
