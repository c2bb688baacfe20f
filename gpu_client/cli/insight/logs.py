"""`baton logs` and `baton events`: what a job printed, and what happened to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from baton.contract.history import AttemptView, EventView
from baton.contract.jobs import JobState, JobView
from baton.contract.output import LogLine, log_wait_s
from gpu_client.cli.core.formats import duration, moment
from gpu_client.cli.core.output import FOLDED, Column
from gpu_client.cli.core.session import SHOWN_ID_CHARACTERS, AsJson, JobIdArgument, Session, full_id, session_of
from gpu_client.cli.jobs.summary import running_s
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import Unreachable

FOLLOW_S = 2.0
WORTH_TELLING_S = 15.0
_LINES_PER_PAGE = 1000


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("logs")(logs)
    app.command("events")(events)


def logs(
    context: typer.Context,
    job_id: JobIdArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends, or Ctrl-C.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", min=1, help="Of what is there, only the last so many.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print a job's output, over all its attempts.

    With --json one object a line.
    """
    session = session_of(context)
    with session.client() as client:
        job_id = full_id(client, job_id)
        printer = _Printer(session, as_json)
        kept: deque[LogLine] = deque(maxlen=tail)
        reader = _Reader(client, job_id)
        for line in reader.rest():
            if tail is None:
                printer.show(line)
            else:
                kept.append(line)
        for line in kept:
            printer.show(line)
        if follow:
            _follow(session, client, job_id, reader, printer)
        if not printer.shown and not as_json:
            session.screen.say(_nothing(client.get_job(job_id)))


def _nothing(job: JobView) -> str:
    """What to say of a job without a line of output."""
    short = job.id[:SHOWN_ID_CHARACTERS]
    if job.state.terminal:
        return f"The job is {job.state.value} and printed nothing."
    if job.counters.attempts:
        return f"No output yet: the job is {job.state.value}."
    return f"No output yet: no worker has begun the job. Why: baton explain {short}"


class _Reader:
    """Reads a job's lines on from where it stopped."""

    def __init__(self, client: BatonClient, job_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._cursor: str | None = None

    def rest(self) -> Iterator[LogLine]:
        """Every line that came since."""
        while True:
            page = self._client.logs(self._job_id, limit=_LINES_PER_PAGE, cursor=self._cursor)
            yield from page.lines
            self._cursor = page.next_cursor or self._cursor
            if not page.lines:
                return


class _Printer:
    """Shows lines; says where another attempt begins."""

    def __init__(self, session: Session, as_json: bool) -> None:
        self._screen = session.screen
        self._as_json = as_json
        self._epoch: int | None = None
        self.shown = False
        """Whether there was a line."""

    def show(self, line: LogLine) -> None:
        """One line of output."""
        self.shown = True
        if self._as_json:
            self._screen.json_line(line)
            return
        if line.epoch != self._epoch:
            if self._epoch is not None or line.epoch > 1:
                self._screen.say(f"--- attempt {line.epoch}, {moment(line.at)} ---")
            self._epoch = line.epoch
        self._screen.line(line.text)


class _Patience:
    """Tells who waits for lines how long the worker holds them back by now: once an attempt."""

    def __init__(self, session: Session, client: BatonClient) -> None:
        self._session = session
        self._client = client
        self._attempt: AttemptView | None = None
        self._told_epoch = 0

    def ask_for(self, job: JobView) -> None:
        """Say it, if it is worth saying. Raises what a call raises."""
        if job.state is not JobState.RUNNING or job.epoch == self._told_epoch:
            return
        if self._attempt is None or self._attempt.epoch != job.epoch:
            for page in pages(lambda cursor: self._client.attempts(job.id, limit=1000, cursor=cursor)):
                self._attempt = page.attempts[-1] if page.attempts else self._attempt
        wait_s = log_wait_s(running_s(job, self._attempt))
        if wait_s >= WORTH_TELLING_S:
            self._told_epoch = job.epoch
            self._session.screen.say(
                f"--- attempt {job.epoch} sends its output about every {duration(wait_s)} by now ---"
            )


def _follow(session: Session, client: BatonClient, job_id: str, reader: _Reader, printer: _Printer) -> None:
    """Until the job has ended and all its lines are read. The control plane may blink meanwhile."""
    silent = False
    patience = _Patience(session, client)
    while True:
        try:
            # asked first: what was printed before the end is there once the job has ended
            job = client.get_job(job_id)
            ended = job.state.terminal
            nothing_new = True
            for line in reader.rest():
                nothing_new = False
                printer.show(line)
            if nothing_new:
                patience.ask_for(job)
            silent = False
        except Unreachable as error:
            if not silent:
                session.screen.say(f"{error}. Still trying; Ctrl-C ends this.")
            silent, ended = True, False
        if ended:
            return
        session.sleep(FOLLOW_S)


def events(context: typer.Context, job_id: JobIdArgument, as_json: AsJson = False) -> None:
    """Print a job's history."""
    session = session_of(context)
    with session.client() as client:
        job_id = full_id(client, job_id)
        found = [event for page in pages(lambda c: client.events(job_id, cursor=c)) for event in page.events]
    if as_json:
        session.screen.json(found)
    else:
        columns = (Column("#", right=True), "when", Column("attempt", right=True), "what", Column("details", FOLDED))
        session.screen.table(columns, map(_event_row, found))


def _event_row(event: EventView) -> list[str]:
    details = ", ".join(
        f"{name} {_value(value)}" for name, value in event.data.items() if value not in (None, "", [], {})
    )
    return [str(event.seq), moment(event.at), str(event.epoch or ""), event.type.value, details]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(str(item) for item in value.values() if item not in (None, ""))
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
