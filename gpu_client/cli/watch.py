"""`baton watch`: one job until its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from contract.history import AttemptView
from contract.jobs import JobState
from gpu_client.cli.errors import ExitCode
from gpu_client.cli.formats import finite, plain
from gpu_client.cli.session import AsJson, JobIdArgument, Session, full_id, session_of
from gpu_client.cli.summary import Summary, headline, summarize
from gpu_client.transport.api import BatonClient
from gpu_client.transport.calls import pages
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
    """Follow a job until it ends: progress, time left, loss, attempts, cost. Exit code 1 unless it completes.

    Ctrl-C ends the watching, never the job.
    """
    session = session_of(context)
    pause_s = finite(every_s, "--every") or DEFAULT_EVERY_S
    price = finite(price_per_hour, "--price-per-hour")
    if price is None:
        price = session.profile().price_per_hour
    with session.client() as client:
        watcher = _Watcher(client, full_id(client, job_id), price)
        first = watcher.look()
        with _display(session, as_json) as show:
            last = _until_the_end(session, watcher, first, show, pause_s)
    if not as_json:
        session.screen.line(f"{last.id[:8]} {headline(last)}")
    if last.state is not JobState.COMPLETE:
        raise typer.Exit(ExitCode.FAILED)


class _Watcher:
    """Looks at a job; asks for its attempts only where there is a new one to be seen."""

    def __init__(self, client: BatonClient, job_id: str, price_per_hour: float | None) -> None:
        self._client = client
        self._job_id = job_id
        self._price_per_hour = price_per_hour
        self._attempt: AttemptView | None = None

    def look(self) -> Summary:
        """The job as it is now."""
        job = self._client.get_job(self._job_id)
        if job.epoch and job.epoch != (self._attempt.epoch if self._attempt else 0):
            for page in pages(lambda cursor: self._client.attempts(self._job_id, limit=1000, cursor=cursor)):
                self._attempt = page.attempts[-1] if page.attempts else self._attempt
        elif self._attempt is not None and job.progress is not None:
            # the job's own progress is that of its running attempt
            self._attempt = self._attempt.model_copy(update={"progress": job.progress})
        return summarize(job, self._attempt, self._price_per_hour)


def _until_the_end(
    session: Session, watcher: _Watcher, first: Summary, show: Callable[[Summary], None], every_s: float
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
def _display(session: Session, as_json: bool) -> Iterator[Callable[[Summary], None]]:
    """What shows a summary: a line of JSON, a bar on a terminal, or a line of text; only when something changed."""
    if not as_json and session.screen.live:
        with _bar(session) as show:
            yield show
        return
    seen: list[Summary] = []

    def show_change(summary: Summary) -> None:
        if summary not in seen[-1:]:
            seen.append(summary)
            if as_json:
                session.screen.json_line(summary.as_data())
            else:
                session.screen.say(headline(summary))

    yield show_change


@contextmanager
def _bar(session: Session) -> Iterator[Callable[[Summary], None]]:
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn())
    with Progress(
        *columns, TextColumn("{task.fields[said]}", markup=False), console=session.screen.err, transient=True
    ) as bar:
        task = bar.add_task("", total=None, said="")

        def show(summary: Summary) -> None:
            bar.update(
                task,
                description=summary.id[:8],
                total=summary.total_steps,
                completed=summary.step or 0,
                said=plain(headline(summary)),
            )

        yield show
