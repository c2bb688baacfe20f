"""Command `baton metrics`: print or save the metrics of a training."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from baton.contract.rules.metrics import canonical_name
from baton.contract.worker.output import MetricPoint
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import count, number
from gpu_client.cli.core.output import TableColumn
from gpu_client.cli.core.session import (
    SHOWN_ID_CHARACTERS,
    AsJson,
    JobIdArgument,
    NodeOption,
    resolve_job_id,
    session_of,
)
from gpu_client.cli.insight.metric_history import MetricOverview, load_history, summarize_metrics
from gpu_client.transport.net.files import write_whole


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("metrics")(metrics)


def metrics(
    context: typer.Context,
    job_id: JobIdArgument,
    *,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all points as CSV, one column per metric.")] = False,
    as_jsonl: Annotated[bool, typer.Option("--jsonl", help="Print all points as JSON, one document per line.")] = False,
    names: Annotated[
        list[str] | None, typer.Option("--metric", metavar="NAME", help="Print only this metric; repeatable.")
    ] = None,
    all_attempts: Annotated[
        bool, typer.Option("--all-attempts", help="Include steps that a later attempt repeated.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the output of --csv or --jsonl to this file.")
    ] = None,
    node: NodeOption = None,
    as_json: AsJson = False,
) -> None:
    """Print the metrics of a job: first, last and best values.

    --csv and --jsonl print all points. Steps after the checkpoint from which the next attempt resumed are omitted, so
    that each step appears once. Of an elastic job, the metrics of the whole training or of --node.
    """
    if as_csv + as_jsonl + as_json > 1:
        raise CliError("--csv, --jsonl and --json exclude each other")
    if output is not None and not (as_csv or as_jsonl):
        raise CliError("--output requires --csv or --jsonl", "Add one of the two.")
    session = session_of(context)
    with session.client() as client:
        job = resolve_job_id(client, job_id)
        if all_attempts:
            points = list(client.metric_points(job, seat=node))
        else:
            points = load_history(client, job, node=node).kept
    chosen = _select_metrics(names, points)
    if as_csv or as_jsonl:
        lines = _csv(points, chosen) if as_csv else _jsonl(points, chosen if names else None)
        if output is not None:
            write_whole(output, "".join(f"{line}\n" for line in lines).encode())
            session.output.note(f"{output}: {count(len(points), 'point')}")
        else:
            for line in lines:
                session.output.raw(line)
        return
    overviews = summarize_metrics(chosen, points)
    if as_json:
        session.output.json([_as_data(one) for one in overviews])
        return
    if not overviews:
        session.output.note(f"{job[:SHOWN_ID_CHARACTERS]} has reported no metrics yet.")
    columns: tuple[TableColumn | str, ...] = (
        "metric",
        *(TableColumn(name, right=True) for name in ("points", "first", "last", "best", "at step")),
    )
    session.output.table((*columns, TableColumn("not finite", right=True)), map(_row, overviews))


def _select_metrics(wanted: Sequence[str] | None, points: Iterable[MetricPoint]) -> list[str]:
    """Select metrics by their own names or their names in rules; all metrics if `wanted` is empty."""
    known = list(dict.fromkeys(name for point in points for name in point.metrics))
    if not wanted:
        return known
    chosen: list[str] = []
    for name in wanted:
        found = [one for one in known if one == name] or [one for one in known if canonical_name(one) == name]
        if not found:
            raise CliError(f"there is no metric {name!r}", f"Known metrics: {', '.join(known) or 'none'}")
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


def _as_data(one: MetricOverview) -> dict[str, object]:
    """Return an overview as JSON values; NaN and infinities become strings, because JSON lacks them."""
    return {**one._asdict(), "first": _json_number(one.first), "last": _json_number(one.last)}


def _json_number(value: float) -> float | str:
    return value if abs(value) < float("inf") else str(value)


def _row(one: MetricOverview) -> list[str]:
    best = "" if one.best is None else number(one.best)
    at_step = "" if one.best_step is None else f"{one.best_step:,}"
    odd = f"{one.not_finite:,}" if one.not_finite else ""
    return [one.name, f"{one.points:,}", number(one.first), number(one.last), best, at_step, odd]
