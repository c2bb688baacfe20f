"""`baton watch`: one job until its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

import typer
from gpu_client.cli.errors import ExitCode
from gpu_client.cli.firings import Firings
from gpu_client.cli.formats import finite, plain
from gpu_client.cli.goodput import goodput_lines, total_of
from gpu_client.cli.pictures import Pictures
from gpu_client.cli.session import SHOWN_ID_CHARACTERS, AsJson, JobIdArgument, Session, full_id, session_of
from gpu_client.cli.summary import Summary, headline, summarize
from rich.console import RenderableType
from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from baton.contract.history import AttemptView
from baton.contract.jobs import JobState, JobView, Progress
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import Unreachable

DEFAULT_EVERY_S = 2.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("watch")(watch)


def watch(
    context: typer.Context,
    job_id: JobIdArgument,
    every_s: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between looks.")] = DEFAULT_EVERY_S,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Of one machine; default: the profile's. Shows the cost.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Follow a job to its end: progress, loss, cost, goodput, pictures.

    Exit code 1 unless it completes. Ctrl-C ends the watching, never the job.
    """
    session = session_of(context)
    pause_s = finite(every_s, "--every") or DEFAULT_EVERY_S
    price = finite(price_per_hour, "--price-per-hour")
    if price is None:
        price = session.profile().price_per_hour
    with session.client() as client:
        watcher = _Watcher(client, full_id(client, job_id), price)
        first = watcher.look()
        with display(session, as_json) as show:
            pictures = Pictures(session, client, as_json=as_json, look_every_s=pause_s)
            firings = Firings(session, client, as_json=as_json, look_every_s=pause_s)

            def show_all(now: Summary) -> None:
                # First: whoever reads JSON may stop at the line that says the end.
                pictures.look(now.id, now.state)
                firings.look(now.id, now.state)
                show(replace(now, fired=firings.last))

            last = _until_the_end(session, watcher, first, show=show_all, every_s=pause_s)
    if not as_json:
        session.screen.line(f"{last.id[:SHOWN_ID_CHARACTERS]} {headline(last)}")
        session.screen.fields(goodput_lines(last.goodput, price))
    if last.state is not JobState.COMPLETE:
        raise typer.Exit(ExitCode.FAILED)


class _Watcher:
    """Looks at a job; asks for its attempts only where one has begun or ended."""

    def __init__(self, client: BatonClient, job_id: str, price_per_hour: float | None) -> None:
        self._client = client
        self._job_id = job_id
        self._price_per_hour = price_per_hour
        self._attempts: list[AttemptView] = []

    def look(self) -> Summary:
        """The job as it is now."""
        job = self._client.get_job(self._job_id)
        newest = self._attempts[-1] if self._attempts else None
        if job.epoch and (newest is None or job.epoch != newest.epoch or _has_ended(job, newest)):
            listed = pages(lambda cursor: self._client.attempts(self._job_id, limit=1000, cursor=cursor))
            self._attempts = [attempt for page in listed for attempt in page.attempts]
        elif newest is not None and _is_of(job.progress, newest):
            self._attempts[-1] = newest.model_copy(update={"progress": job.progress})
        newest = self._attempts[-1] if self._attempts else None
        return summarize(job, newest, self._price_per_hour, total_of(self._attempts))


def _has_ended(job: JobView, attempt: AttemptView) -> bool:
    return job.state is not JobState.RUNNING and attempt.ended_at is None


def _is_of(progress: Progress | None, attempt: AttemptView) -> bool:
    """The job's own progress is that of its running attempt, once that has reported any; else an earlier one's."""
    if attempt.ended_at is not None or progress is None or progress.reported_at is None:
        return False
    return progress.reported_at > attempt.started_at


def _until_the_end(
    session: Session,
    watcher: _Watcher,
    first: Summary,
    *,
    show: Callable[[Summary], None],
    every_s: float,
) -> Summary:
    """The last look. Once it has been reached, the control plane may blink: that is said once, and waited for."""
    now, silent = first, False
    while True:
        show(now)
        if now.state.terminal:
            return now
        session.sleep(every_s)
        try:
            now, silent = watcher.look(), False
        except Unreachable as error:
            if not silent:
                session.screen.say(f"{error}. Still trying; Ctrl-C ends the watching, not the job.")
            silent = True


@contextmanager
def display(session: Session, as_json: bool) -> Iterator[Callable[[Summary], None]]:
    """What shows a summary: a line of JSON, a bar on a terminal, or a line of text; only when something changed."""
    if not as_json and session.screen.live:
        with _bar(session) as show:
            yield show
        return
    shown: Summary | str | None = None

    def show_change(summary: Summary) -> None:
        nonlocal shown
        # a line does not tell all that JSON does: the newest checkpoint, say
        now = summary if as_json else headline(summary)
        if now == shown:
            return
        shown = now
        if as_json:
            session.screen.json_line(summary.as_data())
        elif not summary.state.terminal:
            session.screen.say(headline(summary))

    yield show_change


class _Bar(Bars):
    """A bar, and below it what is known: one line could not hold both on a narrow terminal."""

    said = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        """What is drawn."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self.said)


@contextmanager
def _bar(session: Session) -> Iterator[Callable[[Summary], None]]:
    """A bar on the terminal. Where the job stood before it moved stays above it."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with _Bar(*columns, console=session.screen.err, transient=True) as bar:
        task = bar.add_task("", total=None)
        stood: list[tuple[JobState, int]] = []

        def show(summary: Summary) -> None:
            stands = (summary.state, summary.attempts)
            if stands not in stood[-1:] and not summary.state.terminal:
                stood.append(stands)
                session.screen.say(_move(summary))
            bar.said = plain(headline(summary))
            description = summary.id[:SHOWN_ID_CHARACTERS]
            bar.update(task, description=description, total=summary.total_steps, completed=summary.step or 0)

        yield show


def _move(summary: Summary) -> str:
    """Where the job stands now."""
    where = f"attempt {summary.attempts} on {summary.machine_id}: " if summary.machine_id else ""
    return f"{where}{headline(summary)}"
