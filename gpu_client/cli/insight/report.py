"""Command `baton report`: write an HTML page about a job."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from baton.contract.goodput import Goodput
from baton.contract.history import AttemptView, EventType, EventView
from baton.contract.jobs import JobState, JobView
from baton.contract.output import MetricPoint
from baton.contract.rules.metrics import canonical_name
from gpu_client.cli.core.formats import count, duration, finite, moment, number, size
from gpu_client.cli.core.session import SHOWN_ID_CHARACTERS, AsJson, JobIdArgument, find_job, session_of
from gpu_client.cli.insight.charts import Curve, Frame, Mark, Point, drawn, is_log, text_of, value_at
from gpu_client.cli.insight.metric_history import History, history_of, outlines_of
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
        Path | None, typer.Option(metavar="FILE.html", help="Default: report-ID.html. One that is there is replaced.")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Of one machine; default: the profile's. Shows the cost.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page about a job: its curves, and on them what happened.

    Attempts, checkpoints and what rules did. One HTML file that needs nothing else, also of a job that still runs.
    """
    session = session_of(context)
    price = finite(price_per_hour, "--price-per-hour")
    if price is None:
        price = session.profile().price_per_hour
    with session.client() as client:
        job = find_job(client, job_id)
        listed = pages(lambda cursor: client.attempts(job.id, limit=1000, cursor=cursor))
        attempts = [attempt for page in listed for attempt in page.attempts]
        happened = pages(lambda cursor: client.events(job.id, limit=1000, cursor=cursor))
        events = [event for page in happened for event in page.events]
        history = history_of(client, job.id, attempts)
    page = page_of(Material(job, attempts, events, history, price, int(time.time()))).encode()
    file = output or Path(f"report-{job.id[:SHOWN_ID_CHARACTERS]}.html")
    write_whole(file, page)
    points = len(history.kept) + len(history.void)
    if as_json:
        session.screen.json({"file": str(file), "size_bytes": len(page), "points": points})
    else:
        session.screen.line(f"{file}: {count(points, 'point')}, {size(len(page))}")


MAX_CHARTS = 60
"""Metrics beside the loss that are drawn; the others are in the table alone."""
MAX_METRICS = 1000
"""Rows of the table of metrics: a loop may put the step into their names."""
MAX_DECISIONS = 500
"""Rows of the table of decisions: the newest."""
MAX_MARKS = 120
"""On the curve: the newest."""
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
_SHADES = ("productive_s", "repeated_s", "transferring_s", "idle_s", "stalled_s")


@dataclass(frozen=True)
class Material:
    """What the page is made of. Money is shown where a price is known, in its currency."""

    job: JobView
    attempts: Sequence[AttemptView]
    events: Sequence[EventView]
    history: History
    price_per_hour: float | None
    written_at: int


def page_of(found: Material) -> str:
    """The whole document."""
    job = found.job
    name = job.name or job.id[:8]
    body = [
        f'<header><h1>{text_of(name)}</h1><p class="state {text_of(job.state.value)}">{text_of(job.state.value)}</p>',
        f"</header>{_facts(found)}",
        _main_chart(found),
        _other_charts(found),
        _metrics_table(found),
        _decisions(found),
        _attempts(found),
        f"<footer>Job {text_of(job.id)}, as of {text_of(moment(found.written_at))}.</footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{text_of(name)}</title><style>{STYLE}</style></head><body>{TIP}<main>{''.join(body)}</main></body></html>\n"
    )


def _facts(found: Material) -> str:
    job = found.job
    progress = job.progress
    goodput = total_of(found.attempts)
    total = f" of {progress.total_steps:,}" if progress and progress.total_steps else ""
    ended_at = job.completed_at or job.failed_at or job.canceled_at
    ended = ended_at if job.state.terminal else None
    facts = [
        ("what ended it", ended_by_text(job)),
        ("why", "" if job.state is JobState.COMPLETE else reason_text(job)),
        ("step", f"{progress.step:,}{total}" if progress else ""),
        ("trains with", job.recipe or " ".join(job.command)),
        ("submitted", moment(job.created_at)),
        ("ended", moment(ended) if ended else ""),
        ("attempts", f"{len(found.attempts)}, of which {job.counters.interruptions} interrupted"),
        ("goodput", share_text(goodput, found.price_per_hour) if goodput else ""),
        ("lost", losses_text(goodput, found.price_per_hour) if goodput else ""),
        ("tags", ", ".join(f"{name}: {value}" for name, value in job.tags.items())),
    ]
    rows = "".join(f"<dt>{name}</dt><dd>{text_of(value)}</dd>" for name, value in facts if value)
    return f"<dl>{rows}</dl>"


# Curves


def _series(points: Iterable[MetricPoint], name: str) -> list[Point]:
    return [(point.step, float(point.metrics[name])) for point in points if name in point.metrics]


def _void_curves(history: History, name: str) -> list[Curve]:
    """One for each attempt whose work was done again, and each time that it went back."""
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


def _main_chart(found: Material) -> str:
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
    marks = [*_starts(found.attempts), *_rule_marks(found.events, _Seen(found.history, main))]
    frame = Frame(
        ticks=ticks, marks=marks, first_step=min(steps), last_step=max([*steps, *ticks]), title=f"{main} over steps"
    )
    values = [value for curve in curves for _, value in curve.points]
    scale = ", log scale" if is_log(values) else ""
    return (
        f"<section><h2>{text_of(main)} <small>over steps{scale}</small></h2>{drawn(curves, frame)}"
        f"{_legend(curves, beside, bool(ticks), marks)}</section>"
    )


def _legend(curves: Sequence[Curve], beside: str | None, checkpoints: bool, marks: Sequence[Mark]) -> str:
    kinds = {curve.name for curve in curves}
    said = [("curve", "what the training went on from")]
    said += [("void", "seen, and done again by a later attempt")] if "void" in kinds else []
    said += [("eval", beside or "")] if "eval" in kinds else []
    said += [("ckpt", "checkpoint")] if checkpoints else []
    odd = any(not math.isfinite(value) for curve in curves for _, value in curve.points)
    said += [("odd", "NaN or infinite")] if odd else []
    seen = {mark.kind for mark in marks}
    said += [(kind, text) for kind, text in (("resume", "attempt begins"), ("fire", "rule fired"),
                                             ("back", "rolled back"), ("act", "action"))
             if kind in seen]  # fmt: skip
    return (
        '<p class="legend">'
        + "".join(f'<span class="key {kind}">{text_of(text)}</span>' for kind, text in said)
        + "</p>"
    )


def _starts(attempts: Sequence[AttemptView]) -> list[Mark]:
    """Where attempts began but the first, and what had ended the one before."""
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
                f"attempt {attempt.epoch} goes on from step {step:,}; attempt {before.epoch}: {why}",
            )
        )
    return marks[-MAX_MARKS:]


class _Seen:
    """What each attempt saw of a metric: a rule fired on that, and not on what a later attempt saw at the same step."""

    def __init__(self, history: History, name: str) -> None:
        self._by_epoch: dict[int, list[Point]] = {}
        for point in (*history.void, *history.kept):
            value = float(point.metrics.get(name, math.nan))
            if math.isfinite(value):
                self._by_epoch.setdefault(point.epoch, []).append((point.step, value))
        for seen in self._by_epoch.values():
            seen.sort()

    def at(self, epoch: int, step: int) -> float | None:
        """At that step, or the last before it; in that attempt, or else in the last that came so far."""
        for one in (epoch, *sorted((known for known in self._by_epoch if known < epoch), reverse=True)):
            seen = self._by_epoch.get(one)
            if seen and seen[0][0] <= step:
                return value_at(seen, step)
        return None


def _rule_marks(events: Sequence[EventView], seen: _Seen) -> list[Mark]:
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
            what = ", ".join(map(str, data.get("actions") or []))
            marks.append(Mark("act", step, what if data.get("command") else "", line_of(event), value=value))
    return marks[-MAX_MARKS:]


def _step_of(event: EventView) -> int | None:
    step = event.data.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _other_charts(found: Material) -> str:
    names = found.history.names()[1:]
    fired = [(event, _step_of(event)) for event in found.events if event.type is EventType.RULE_FIRED]
    fires = [Mark("fire", step, "", line_of(event)) for event, step in fired[-MAX_MARKS:] if step is not None]
    steps = [point.step for point in found.history.kept] or [0]
    figures = []
    for name in names[:MAX_CHARTS]:
        own = _series(found.history.kept, name)
        frame = Frame(
            width=460, height=200, marks=fires, first_step=steps[0], last_step=steps[-1], title=f"{name} over steps"
        )
        log = " <small>log scale</small>" if is_log([value for _, value in own]) else ""
        curve = Curve("eval" if canonical_name(name).startswith("eval") else "curve", own)
        figures.append(f"<figure><figcaption>{text_of(name)}{log}</figcaption>{drawn([curve], frame)}</figure>")
    if not figures:
        return ""
    more = f'<p class="none">{len(names) - MAX_CHARTS} more are in the table.</p>' if len(names) > MAX_CHARTS else ""
    return f'<section><h2>Other metrics</h2><div class="charts">{"".join(figures)}</div>{more}</section>'


# Tables


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """`rows` are ready HTML; `numbers` are the columns that are aligned to the right."""
    kinds = ["n" if place in numbers else "" for place in range(len(heads))]
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in zip(heads, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _metrics_table(found: Material) -> str:
    outlines = outlines_of(found.history.names(), found.history.kept)
    if not outlines:
        return ""
    rows = [
        [
            text_of(one.name),
            f"{one.points:,}",
            *(text_of(number(value)) if value is not None else "" for value in (one.first, one.last)),
            "" if one.best is None else f"{number(one.best)} <small>at step {one.best_step:,}</small>",
            *("" if value is None else number(value) for value in (one.lowest, one.highest)),
            f"{one.not_finite:,}" if one.not_finite else "",
        ]
        for one in outlines[:MAX_METRICS]
    ]
    left_out = len(outlines) - len(rows)
    more = f'<p class="none">{left_out:,} more: baton metrics.</p>' if left_out else ""
    heads = ("metric", "points", "first", "last", "best", "lowest", "highest", "not finite")
    return f"<section><h2>Metrics</h2>{_table(heads, rows, range(1, 8))}{more}</section>"


def _decisions(found: Material) -> str:
    events = [event for event in found.events if event.type in _DECISIONS]
    if not events:
        return ""
    rows = []
    for event in events[-MAX_DECISIONS:]:
        data = event.data
        who = str(data.get("rule") or "") or (f"command {data['command']}" if data.get("command") else "")
        operands = dict(data.get("operands") or {}) if isinstance(data.get("operands"), dict) else {}
        values = "".join(
            f"<div><code>{text_of(str(text))}</code> = {text_of(_value(value))}</div>"
            for text, value in operands.items()
        )
        step = _step_of(event)
        said = str(data.get("message") or "")
        if event.type is EventType.ROLLED_BACK:
            said = f"to step {data.get('to_step')}. {said}"
        rows.append(
            [
                "" if step is None else f"{step:,}",
                str(event.epoch or ""),
                text_of(who),
                f'<span class="word {_kind_of(event)}">{text_of(event.type.value)}</span>'
                + (" <small>dry run</small>" if data.get("dry_run") else ""),
                values,
                text_of(", ".join(map(str, data.get("actions") or []))),
                text_of(said),
            ]
        )
    left_out = len(events) - len(rows)
    more = f'<p class="none">{left_out:,} earlier ones: baton events.</p>' if left_out else ""
    heads = ("step", "attempt", "rule or command", "what", "values", "actions", "message")
    return f"<section><h2>Decisions</h2>{more}{_table(heads, rows, (0, 1))}</section>"


def _kind_of(event: EventView) -> str:
    if event.type in (EventType.RULE_FIRED, EventType.RULE_ERROR, EventType.ACTION_FAILED):
        return "fire"
    return "back" if event.type is EventType.ROLLED_BACK else "act"


def _value(value: object) -> str:
    if value is None:
        return "unknown"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _attempts(found: Material) -> str:
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
                text_of(one.machine_id or ""),
                text_of(moment(one.started_at)),
                text_of(duration(ended_at - one.started_at)),
                "" if one.resumed_step is None else f"{one.resumed_step:,}",
                "" if one.checkpoint_step is None else f"{one.checkpoint_step:,}",
                f'<span class="state {text_of(end)}">{text_of(end)}</span> <small>{text_of(why)}</small>',
                _bar(goodput),
                _money(goodput, found.price_per_hour),
            ]
        )
    heads = ("attempt", "machine", "began", "took", "resumed at", "checkpoint", "end", "goodput", "cost")
    shown = heads if found.price_per_hour is not None else heads[:-1]
    rows = [row[: len(shown)] for row in rows]
    keys = "".join(
        f'<span class="key {shade}">{text}</span>'
        for shade, text in zip(
            _SHADES, ("new steps", "repeated steps", "transfers", "start and end", "standstill"), strict=True
        )
    )
    return f'<section><h2>Attempts</h2>{_table(shown, rows, (0, 3, 4, 5))}<p class="legend">{keys}</p></section>'


def _bar(goodput: Goodput | None) -> str:
    """Where the time went, as a bar."""
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
