"""Command `baton report`: write an HTML page about a job.

The page has no script and loads no resources. The report escapes all text of the job.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from baton.contract.jobs.goodput import Goodput
from baton.contract.jobs.history import AttemptView, EventType, EventView
from baton.contract.jobs.job import JobState, JobView
from baton.contract.rules.metrics import canonical_name
from baton.contract.worker.metric_history import MetricHistory
from baton.contract.worker.output import MetricPoint
from gpu_client.cli.core.formats import count, duration, moment, number, size
from gpu_client.cli.core.session import (
    SHOWN_ID_CHARACTERS,
    AsJson,
    JobIdArgument,
    PricePerHour,
    find_job,
    list_attempts,
    session_of,
)
from gpu_client.cli.insight.charts import Curve, Frame, Mark, Point, draw_chart, to_html, uses_log_scale, value_at
from gpu_client.cli.insight.metric_history import load_history, summarize_metrics
from gpu_client.cli.insight.report_style import STYLE, TIP
from gpu_client.cli.jobs.goodput import losses, losses_text, percent, share_of, share_text, total_of, total_s
from gpu_client.cli.jobs.rule_events import line_of
from gpu_client.cli.jobs.summary import ended_by_text, reason_text
from gpu_client.transport.api.calls import pages
from gpu_client.transport.net.files import write_whole


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    context: typer.Context,
    job_id: JobIdArgument,
    *,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Output file; an existing file is replaced. Default: report-ID.html."),
    ] = None,
    price_per_hour: PricePerHour = None,
    as_json: AsJson = False,
) -> None:
    """Write an HTML report about a job.

    The report shows metric curves with attempts, checkpoints and rule events. The report is one self-contained file.
    The job may still run.
    """
    session = session_of(context)
    price = session.price_per_hour(price_per_hour)
    with session.client() as client:
        job = find_job(client, job_id)
        attempts = list_attempts(client, job.id)
        happened = pages(lambda cursor: client.events(job.id, limit=1000, cursor=cursor))
        events = [event for page in happened for event in page.events]
        history = load_history(client, job.id, attempts)
    page = render_report(ReportInput(job, attempts, events, history, price, int(time.time()))).encode()
    file = output or Path(f"report-{job.id[:SHOWN_ID_CHARACTERS]}.html")
    write_whole(file, page)
    points = len(history.kept) + len(history.void)
    if as_json:
        session.output.json({"file": str(file), "size_bytes": len(page), "points": points})
    else:
        session.output.line(f"{file}: {count(points, 'point')}, {size(len(page))}")


MAX_CHARTS = 60
"""Maximum number of charts beside the loss; the table contains all metrics."""
MAX_METRICS = 1000
"""Maximum rows of the metrics table, because a script can generate names without limit."""
MAX_DECISIONS = 500
"""Maximum rows of the decisions table, which shows the newest decisions."""
MAX_MARKS = 120
"""Maximum marks of a chart, which shows the newest marks."""
_DECISIONS = frozenset(
    {
        EventType.RULE_FIRED,
        EventType.RULE_ERROR,
        EventType.RULE_UNEVALUABLE,
        EventType.RULE_UPDATED,
        EventType.ACTION_APPLIED,
        EventType.ACTION_FAILED,
        EventType.ACTION_REJECTED,
        EventType.ROLLED_BACK,
    }
)
NODES = "world.nodes"
"""Metric of the chart of an elastic training's membership."""
_SHADES = ("productive_s", "repeated_s", "transferring_s", "idle_s", "stalled_s")


@dataclass(frozen=True)
class ReportInput:
    """Input of a report. `price_per_hour`: None omits costs."""

    job: JobView
    attempts: Sequence[AttemptView]
    events: Sequence[EventView]
    history: MetricHistory
    price_per_hour: float | None
    written_at: int


def render_report(found: ReportInput) -> str:
    """Render the HTML document."""
    job = found.job
    name = job.name or job.id[:8]
    body = [
        f'<header><h1>{to_html(name)}</h1><p class="state {to_html(job.state.value)}">{to_html(job.state.value)}</p>',
        f"</header>{_render_facts(found)}",
        _main_chart(found),
        _membership(found),
        _other_charts(found),
        _metrics_table(found),
        _decisions(found),
        _attempts(found),
        f"<footer>Job {to_html(job.id)}, as of {to_html(moment(found.written_at))}.</footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{to_html(name)}</title><style>{STYLE}</style></head><body>{TIP}<main>{''.join(body)}</main></body></html>\n"
    )


def _render_facts(found: ReportInput) -> str:
    job = found.job
    progress = job.progress
    goodput = total_of(found.attempts)
    total = f" of {progress.total_steps:,}" if progress and progress.total_steps else ""
    ended_at = job.completed_at or job.failed_at or job.canceled_at
    ended = ended_at if job.state.terminal else None
    facts = [
        ("ended by", ended_by_text(job)),
        ("reason", "" if job.state is JobState.COMPLETE else reason_text(job)),
        ("step", f"{progress.step:,}{total}" if progress else ""),
        ("command", job.recipe or " ".join(job.command)),
        ("submitted", moment(job.created_at)),
        ("ended", moment(ended) if ended else ""),
        ("attempts", f"{len(found.attempts)}, of which {job.counters.interruptions} interrupted"),
        ("goodput", share_text(goodput, found.price_per_hour) if goodput else ""),
        ("lost", losses_text(goodput, found.price_per_hour) if goodput else ""),
        ("tags", ", ".join(f"{name}: {value}" for name, value in job.tags.items())),
    ]
    rows = "".join(f"<dt>{name}</dt><dd>{to_html(value)}</dd>" for name, value in facts if value)
    return f"<dl>{rows}</dl>"


# Curves


def _series(points: Iterable[MetricPoint], name: str) -> list[Point]:
    return [(point.step, float(point.metrics[name])) for point in points if name in point.metrics]


def _void_curves(history: MetricHistory, name: str) -> list[Curve]:
    """Return a curve for each run of void points: one per repeated attempt and per rollback."""
    curves: list[Curve] = []
    run: list[Point] = []
    epoch = None
    for point in history.void:
        if name not in point.metrics:
            continue
        if run and (point.epoch != epoch or point.step <= run[-1][0]):
            curves.append(Curve("void", run, dots=False))
            run = []
        epoch = point.epoch
        run.append((point.step, float(point.metrics[name])))
    return [*curves, *([Curve("void", run, dots=False)] if run else [])]


def _main_chart(found: ReportInput) -> str:
    names = found.history.names()
    if not names:
        return '<section><h2>Loss</h2><p class="none">The training has reported no metrics.</p></section>'
    main = names[0]
    own = _series(found.history.kept, main)
    curves = [Curve("curve", own), *_void_curves(found.history, main)]
    beside = next((name for name in names[1:] if canonical_name(name) == "eval.loss"), None)
    if beside is not None and canonical_name(main) == "loss":
        curves.append(Curve("eval", _series(found.history.kept, beside)))
    steps = [point.step for point in (*found.history.kept, *found.history.void)]
    committed = [_step_of(event) for event in found.events if event.type is EventType.CHECKPOINT_COMMITTED]
    ticks = [step for step in committed if step is not None]
    # The attempts of nodes begin at any time; the membership shows their effect.
    starts = _starts(found.attempts) if found.job.nodes is None else []
    marks = [*starts, *_rule_marks(found.events, _MetricByAttempt(found.history, main))]
    frame = Frame(
        ticks=ticks, marks=marks, first_step=min(steps), last_step=max([*steps, *ticks]), title=f"{main} over steps"
    )
    values = [value for curve in curves for _, value in curve.points]
    scale = ", log scale" if uses_log_scale(values) else ""
    return (
        f"<section><h2>{to_html(main)} <small>over steps{scale}</small></h2>{draw_chart(curves, frame)}"
        f"{_legend(curves, beside, bool(ticks), marks)}</section>"
    )


def _legend(curves: Sequence[Curve], beside: str | None, checkpoints: bool, marks: Sequence[Mark]) -> str:
    kinds = {curve.name for curve in curves}
    keys = [("curve", "points that count")]
    keys += [("void", "repeated by a later attempt")] if "void" in kinds else []
    keys += [("eval", beside or "")] if "eval" in kinds else []
    keys += [("ckpt", "checkpoint")] if checkpoints else []
    odd = any(not math.isfinite(value) for curve in curves for _, value in curve.points)
    keys += [("odd", "NaN or infinite")] if odd else []
    seen = {mark.kind for mark in marks}
    keys += [(kind, text) for kind, text in (("resume", "attempt begins"), ("fire", "rule fired"),
                                             ("back", "rolled back"), ("act", "action"))
             if kind in seen]  # fmt: skip
    return (
        '<p class="legend">'
        + "".join(f'<span class="key {kind}">{to_html(text)}</span>' for kind, text in keys)
        + "</p>"
    )


def _starts(attempts: Sequence[AttemptView]) -> list[Mark]:
    """Mark the start of each attempt but the first, with the end of the previous attempt."""
    marks = []
    for before, attempt in pairwise(attempts):
        why = f"{before.end.value if before.end else 'not ended'}"
        if before.reason is not None:
            why += f", {before.reason.code}: {before.reason.message}".rstrip(": ")
        step = attempt.resumed_step or 0
        marks.append(
            Mark(
                "resume",
                step,
                f"attempt {attempt.epoch}" if len(attempts) <= 12 else "",
                f"attempt {attempt.epoch} resumes from step {step:,}; attempt {before.epoch}: {why}",
            )
        )
    return marks[-MAX_MARKS:]


class _MetricByAttempt:
    """Values of a metric by attempt, because a rule fired on the values of its own attempt, not of a later attempt."""

    def __init__(self, history: MetricHistory, name: str) -> None:
        self._by_epoch: dict[int, list[Point]] = {}
        for point in (*history.void, *history.kept):
            value = float(point.metrics.get(name, math.nan))
            if math.isfinite(value):
                self._by_epoch.setdefault(point.epoch, []).append((point.step, value))
        for seen in self._by_epoch.values():
            seen.sort()

    def at(self, epoch: int, step: int) -> float | None:
        """Return the value at or before a step in an attempt, else in the newest earlier attempt."""
        for one in (epoch, *sorted((known for known in self._by_epoch if known < epoch), reverse=True)):
            seen = self._by_epoch.get(one)
            if seen and seen[0][0] <= step:
                return value_at(seen, step)
        return None


def _rule_marks(events: Sequence[EventView], seen: _MetricByAttempt) -> list[Mark]:
    marks = []
    for event in events:
        step = _step_of(event)
        if step is None:
            continue
        data = event.data
        value = seen.at(event.epoch, step)
        if event.type is EventType.RULE_FIRED:
            dry = " (dry run)" if data.get("dry_run") else ""
            marks.append(Mark("fire", step, f"{data.get('rule')}{dry}", line_of(event), value=value))
        elif event.type is EventType.ROLLED_BACK:
            to_step = data.get("to_step")
            back = to_step if isinstance(to_step, int) else None
            marks.append(Mark("back", step, f"rolled back to {to_step}", line_of(event), to_step=back, value=value))
        elif event.type is EventType.ACTION_APPLIED:
            text = ", ".join(map(str, data.get("actions") or []))
            marks.append(Mark("act", step, text if data.get("command") else "", line_of(event), value=value))
    return marks[-MAX_MARKS:]


def _step_of(event: EventView) -> int | None:
    step = event.data.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _other_charts(found: ReportInput) -> str:
    names = [name for name in found.history.names()[1:] if name != NODES]
    fired = [(event, _step_of(event)) for event in found.events if event.type is EventType.RULE_FIRED]
    fires = [Mark("fire", step, "", line_of(event)) for event, step in fired[-MAX_MARKS:] if step is not None]
    steps = [point.step for point in found.history.kept] or [0]
    figures = []
    for name in names[:MAX_CHARTS]:
        own = _series(found.history.kept, name)
        frame = Frame(
            width=460, height=200, marks=fires, first_step=steps[0], last_step=steps[-1], title=f"{name} over steps"
        )
        log = " <small>log scale</small>" if uses_log_scale([value for _, value in own]) else ""
        curve = Curve("eval" if canonical_name(name).startswith("eval") else "curve", own)
        figures.append(f"<figure><figcaption>{to_html(name)}{log}</figcaption>{draw_chart([curve], frame)}</figure>")
    if not figures:
        return ""
    more = (
        f'<p class="none">{len(names) - MAX_CHARTS} more metrics are in the table.</p>'
        if len(names) > MAX_CHARTS
        else ""
    )
    return f'<section><h2>Other metrics</h2><div class="charts">{"".join(figures)}</div>{more}</section>'


def _membership(found: ReportInput) -> str:
    """Draw the nodes of an elastic training over its rounds, with the nodes that joined and that were lost."""
    own = _series(found.history.kept, NODES)
    if not own:
        return ""
    marks = [mark for event in found.events if (mark := _membership_mark(event)) is not None][-MAX_MARKS:]
    steps = [point.step for point in found.history.kept]
    frame = Frame(height=200, marks=marks, first_step=steps[0], last_step=steps[-1], title="nodes over steps")
    keys = (("curve", "members"), ("resume", "joined"), ("back", "lost"))
    legend = "".join(f'<span class="key {kind}">{text}</span>' for kind, text in keys)
    chart = draw_chart([Curve("curve", own)], frame)
    return f'<section><h2>nodes <small>over steps</small></h2>{chart}<p class="legend">{legend}</p></section>'


def _membership_mark(event: EventView) -> Mark | None:
    number, data = event.data.get("round"), event.data
    if not isinstance(number, int):
        return None
    if event.type is EventType.WORLD_JOINED:
        names = ", ".join(str(one) for one in data.get("joined") or [])
        return Mark("resume", number, "", f"round {number:,}: node {names} joined")
    if event.type is EventType.WORLD_LOST:
        lost = [one for one in data.get("lost") or [] if isinstance(one, dict)]
        causes = ", ".join(f"node {one.get('seat')} ({one.get('cause', 'lost')})" for one in lost)
        return Mark("back", number, "", f"round {number:,}: without {causes}")
    return None


# Tables


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Render a table. `rows`: HTML cells. `numbers`: right-aligned columns."""
    kinds = ["n" if place in numbers else "" for place in range(len(heads))]
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in zip(heads, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _metrics_table(found: ReportInput) -> str:
    overviews = summarize_metrics(found.history.names(), found.history.kept)
    if not overviews:
        return ""
    rows = [
        [
            to_html(one.name),
            f"{one.points:,}",
            *(to_html(number(value)) if value is not None else "" for value in (one.first, one.last)),
            "" if one.best is None else f"{number(one.best)} <small>at step {one.best_step:,}</small>",
            *("" if value is None else number(value) for value in (one.lowest, one.highest)),
            f"{one.not_finite:,}" if one.not_finite else "",
        ]
        for one in overviews[:MAX_METRICS]
    ]
    left_out = len(overviews) - len(rows)
    more = f'<p class="none">{left_out:,} more metrics: see baton metrics.</p>' if left_out else ""
    heads = ("metric", "points", "first", "last", "best", "lowest", "highest", "not finite")
    return f"<section><h2>Metrics</h2>{_table(heads, rows, range(1, 8))}{more}</section>"


def _decisions(found: ReportInput) -> str:
    events = [event for event in found.events if event.type in _DECISIONS]
    if not events:
        return ""
    rows = []
    for event in events[-MAX_DECISIONS:]:
        data = event.data
        source = str(data.get("rule") or "") or (f"command {data['command']}" if data.get("command") else "")
        operands = dict(data.get("operands") or {}) if isinstance(data.get("operands"), dict) else {}
        values = "".join(
            f"<div><code>{to_html(str(text))}</code> = {to_html(_value(value))}</div>"
            for text, value in operands.items()
        )
        step = _step_of(event)
        keys = str(data.get("message") or "")
        if event.type is EventType.ROLLED_BACK:
            keys = f"to step {data.get('to_step')}. {keys}"
        rows.append(
            [
                "" if step is None else f"{step:,}",
                str(event.epoch or ""),
                to_html(source),
                f'<span class="word {_kind_of(event)}">{to_html(event.type.value)}</span>'
                + (" <small>dry run</small>" if data.get("dry_run") else ""),
                values,
                to_html(", ".join(map(str, data.get("actions") or []))),
                to_html(keys),
            ]
        )
    left_out = len(events) - len(rows)
    more = f'<p class="none">{left_out:,} earlier decisions: see baton events.</p>' if left_out else ""
    heads = ("step", "attempt", "rule or command", "event", "values", "actions", "message")
    return f"<section><h2>Decisions</h2>{more}{_table(heads, rows, (0, 1))}</section>"


def _kind_of(event: EventView) -> str:
    if event.type in (EventType.RULE_FIRED, EventType.RULE_ERROR, EventType.ACTION_FAILED):
        return "fire"
    return "back" if event.type is EventType.ROLLED_BACK else "act"


def _value(value: object) -> str:
    if value is None:
        return "unknown"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _attempts(found: ReportInput) -> str:
    if not found.attempts:
        return ""
    rows = []
    for one in found.attempts:
        goodput = one.progress.goodput if one.progress else None
        end = one.end.value if one.end else "running"
        why = f"{one.reason.code}: {one.reason.message}".rstrip(": ") if one.reason else ""
        ended_at = one.ended_at or found.written_at
        rows.append(
            [
                str(one.epoch),
                to_html(one.machine_id or ""),
                to_html(moment(one.started_at)),
                to_html(duration(ended_at - one.started_at)),
                "" if one.resumed_step is None else f"{one.resumed_step:,}",
                "" if one.checkpoint_step is None else f"{one.checkpoint_step:,}",
                f'<span class="state {to_html(end)}">{to_html(end)}</span> <small>{to_html(why)}</small>',
                _bar(goodput),
                _money(goodput, found.price_per_hour),
            ]
        )
    heads = ("attempt", "machine", "started", "duration", "resumed at", "checkpoint", "end", "goodput", "cost")
    shown = heads if found.price_per_hour is not None else heads[:-1]
    rows = [row[: len(shown)] for row in rows]
    keys = "".join(
        f'<span class="key {shade}">{text}</span>'
        for shade, text in zip(
            _SHADES, ("new steps", "repeated steps", "transfers", "start and end", "stalls"), strict=True
        )
    )
    return f'<section><h2>Attempts</h2>{_table(shown, rows, (0, 3, 4, 5))}<p class="legend">{keys}</p></section>'


def _bar(goodput: Goodput | None) -> str:
    """Draw the use of an attempt's time as a bar."""
    if goodput is None or not (whole_s := total_s(goodput)):
        return ""
    pieces, at = [], 0.0
    lost = {loss.name: loss.seconds for loss in losses(goodput)}
    for shade in _SHADES:
        seconds = goodput.productive_s if shade == "productive_s" else lost.get(shade, 0.0)
        width = 120 * seconds / whole_s
        pieces.append(f'<rect class="{shade}" x="{at:.1f}" y="0" width="{width:.1f}" height="10"/>')
        at += width
    return (
        f'<svg class="bar" viewBox="0 0 120 10" role="img" aria-label="goodput">{"".join(pieces)}</svg> '
        f"{percent(share_of(goodput))}"
    )


def _money(goodput: Goodput | None, price_per_hour: float | None) -> str:
    if goodput is None or price_per_hour is None:
        return ""
    spent, useful = (seconds * price_per_hour / 3600 for seconds in (total_s(goodput), goodput.productive_s))
    return f"{spent:.2f} <small>{useful:.2f} for new steps</small>"
