"""Commands `baton logs` and `baton events`: print a job's output and history."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from baton.contract.jobs.history import AttemptView, EventView
from baton.contract.jobs.job import JobState, JobView
from baton.contract.worker.output import LogLine, log_wait_s
from gpu_client.cli.core.formats import duration, moment
from gpu_client.cli.core.output import FOLDED, TableColumn
from gpu_client.cli.core.session import (
    SHOWN_ID_CHARACTERS,
    AsJson,
    CliSession,
    JobIdArgument,
    list_attempts,
    resolve_job_id,
    session_of,
)
from gpu_client.cli.jobs.summary import running_s
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import Unreachable

FOLLOW_S = 2.0
MIN_ANNOUNCED_DELAY_S = 15.0
_LINES_PER_PAGE = 1000


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("logs")(logs)
    app.command("events")(events)


def logs(
    context: typer.Context,
    job_id: JobIdArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the output until the job ends.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", min=1, help="Start with the last N lines.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the output of all attempts of a job.

    --json: one object per line.
    """
    session = session_of(context)
    with session.client() as client:
        job_id = resolve_job_id(client, job_id)
        printer = _LogPrinter(session, as_json)
        newest: deque[LogLine] = deque(maxlen=tail)
        reader = _LogReader(client, job_id)
        for line in reader.read_new():
            if tail is None:
                printer.show(line)
            else:
                newest.append(line)
        for line in newest:
            printer.show(line)
        if follow:
            _follow(session, client, job_id, reader, printer)
        if not printer.shown and not as_json:
            session.output.note(_describe_no_output(client.get_job(job_id)))


def _describe_no_output(job: JobView) -> str:
    """Describe why a job has no output."""
    short = job.id[:SHOWN_ID_CHARACTERS]
    if job.state.terminal:
        return f"The job is {job.state.value} and produced no output."
    if job.counters.attempts:
        return f"No output yet: the job is {job.state.value}."
    return f"No output yet: no worker has claimed the job. To see the cause: baton explain {short}"


class _LogReader:
    """Reader of a job's log lines from a cursor."""

    def __init__(self, client: BatonClient, job_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._cursor: str | None = None

    def read_new(self) -> Iterator[LogLine]:
        """Yield the lines since the last call."""
        while True:
            page = self._client.logs(self._job_id, limit=_LINES_PER_PAGE, cursor=self._cursor)
            yield from page.lines
            self._cursor = page.next_cursor or self._cursor
            if not page.lines:
                return


class _LogPrinter:
    """Printer of log lines, with a separator between attempts."""

    def __init__(self, session: CliSession, as_json: bool) -> None:
        self._output = session.output
        self._as_json = as_json
        self._epoch: int | None = None
        self.shown = False
        """True after the first printed line."""

    def show(self, line: LogLine) -> None:
        """Print one line."""
        self.shown = True
        if self._as_json:
            self._output.json_line(line)
            return
        if line.epoch != self._epoch:
            if self._epoch is not None or line.epoch > 1:
                self._output.note(f"--- attempt {line.epoch}, {moment(line.at)} ---")
            self._epoch = line.epoch
        self._output.line(line.text)


class _DelayNotice:
    """Notice, once per attempt, of the interval at which the worker sends its output."""

    def __init__(self, session: CliSession, client: BatonClient) -> None:
        self._session = session
        self._client = client
        self._attempt: AttemptView | None = None
        self._announced_epoch = 0

    def announce(self, job: JobView) -> None:
        """Print a long interval. Raises ApiError, Unreachable, UnexpectedAnswer."""
        if job.state is not JobState.RUNNING or job.epoch == self._announced_epoch:
            return
        if self._attempt is None or self._attempt.epoch != job.epoch:
            attempts = list_attempts(self._client, job.id)
            self._attempt = attempts[-1] if attempts else None
        wait_s = log_wait_s(running_s(job, self._attempt))
        if wait_s >= MIN_ANNOUNCED_DELAY_S:
            self._announced_epoch = job.epoch
            self._session.output.note(
                f"--- attempt {job.epoch} now sends its output about every {duration(wait_s)} ---"
            )


def _follow(session: CliSession, client: BatonClient, job_id: str, reader: _LogReader, printer: _LogPrinter) -> None:
    """Print lines until the job has ended and all its lines are read; tolerate control-plane outages."""
    silent = False
    notice = _DelayNotice(session, client)
    while True:
        try:
            # The log of an ended job is complete, therefore the state is requested before the lines.
            job = client.get_job(job_id)
            ended = job.state.terminal
            nothing_new = True
            for line in reader.read_new():
                nothing_new = False
                printer.show(line)
            if nothing_new:
                notice.announce(job)
            silent = False
        except Unreachable as error:
            if not silent:
                session.output.note(f"{error}. Retrying; Ctrl-C ends this command.")
            silent, ended = True, False
        if ended:
            return
        session.sleep(FOLLOW_S)


def events(context: typer.Context, job_id: JobIdArgument, as_json: AsJson = False) -> None:
    """Print the events of a job."""
    session = session_of(context)
    with session.client() as client:
        job_id = resolve_job_id(client, job_id)
        found = [event for page in pages(lambda c: client.events(job_id, cursor=c)) for event in page.events]
    if as_json:
        session.output.json(found)
    else:
        columns = (
            TableColumn("#", right=True),
            "when",
            TableColumn("attempt", right=True),
            "event",
            TableColumn("details", FOLDED),
        )
        session.output.table(columns, map(_event_row, found))


def _event_row(event: EventView) -> list[str]:
    details = ", ".join(
        f"{name} {_value(value)}" for name, value in event.data.items() if value not in (None, "", [], {})
    )
    return [str(event.seq), moment(event.at), str(event.epoch or ""), event.type.value, details]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(str(item) for item in value.values() if item not in (None, ""))
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
