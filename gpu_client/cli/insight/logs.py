"""Commands `baton logs` and `baton events`: print a job's output and history."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, NamedTuple

import typer

from baton.contract.jobs.history import AttemptView, EventView
from baton.contract.jobs.job import JobState, JobView
from baton.contract.worker.output import LogLine, log_wait_s
from gpu_client.cli.core.formats import duration, moment
from gpu_client.cli.core.output import FOLDED, TableColumn, as_data
from gpu_client.cli.core.session import (
    SHOWN_ID_CHARACTERS,
    AsJson,
    CliSession,
    JobIdArgument,
    NodeOption,
    find_job,
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
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the output until the job ends.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", min=1, help="Start with the last N lines.")] = None,
    node: NodeOption = None,
    as_json: AsJson = False,
) -> None:
    """Print the output of all attempts of a job.

    Of an elastic job, prints the output of all nodes in the order of time; the node's number comes first in each line.
    --json: one object per line.
    """
    session = session_of(context)
    with session.client() as client:
        job = find_job(client, job_id)
        job_id = job.id
        printer = _LogPrinter(session, as_json, named=job.nodes is not None and node is None)
        newest: deque[_NodeLine] = deque(maxlen=tail)
        nodes = range(job.nodes.max) if job.nodes is not None and node is None else [node]
        reader = _LogReader(client, job_id, nodes)
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


class _NodeLine(NamedTuple):
    """Line of output, and the node that printed the line; None for a job without nodes, and for a chosen node."""

    node: int | None
    line: LogLine


class _LogReader:
    """Reader of a job's log lines from a cursor for each of its nodes."""

    def __init__(self, client: BatonClient, job_id: str, nodes: Iterable[int | None]) -> None:
        """`nodes`: nodes of an elastic job; [None] for another job."""
        self._client = client
        self._job_id = job_id
        self._cursors: dict[int | None, str | None] = dict.fromkeys(nodes)
        self._read: dict[int | None, tuple[int, int]] = {}
        """By node, attempt and number of the last line that a caller has received."""

    def read_new(self) -> Iterator[_NodeLine]:
        """Yield the lines since the last call, those of several nodes in the order of time."""
        for one in heapq.merge(*map(self._read_node, self._cursors), key=lambda one: one.line.at):
            self._read[one.node] = (one.line.epoch, one.line.line)
            yield one

    def _read_node(self, node: int | None) -> Iterator[_NodeLine]:
        while True:
            page = self._client.logs(self._job_id, limit=_LINES_PER_PAGE, cursor=self._cursors[node], seat=node)
            # An outage at a call for another node can end the merge within this page, which is then read again.
            known = self._read.get(node, (0, -1))
            yield from (_NodeLine(node, line) for line in page.lines if (line.epoch, line.line) > known)
            self._cursors[node] = page.next_cursor or self._cursors[node]
            if not page.lines:
                return


class _LogPrinter:
    """Printer of log lines, with a separator between attempts. `named`: lines begin with the number of the node."""

    def __init__(self, session: CliSession, as_json: bool, *, named: bool) -> None:
        self._output = session.output
        self._as_json = as_json
        self._named = named
        self._epochs: dict[int | None, int] = {}
        self.shown = False
        """True after the first printed line."""

    def show(self, printed: _NodeLine) -> None:
        """Print one line."""
        node, line = printed
        self.shown = True
        if self._as_json:
            self._output.json_line({**as_data(line), "node": node} if self._named else line)
            return
        if line.epoch != self._epochs.get(node):
            if node in self._epochs or line.epoch > 1:
                where = f"node {node}, " if self._named else ""
                self._output.note(f"--- {where}attempt {line.epoch}, {moment(line.at)} ---")
            self._epochs[node] = line.epoch
        self._output.line(f"[{node}] {line.text}" if self._named else line.text)


class _DelayNotice:
    """Notice, once per attempt, of the interval at which the worker sends its output."""

    def __init__(self, session: CliSession, client: BatonClient) -> None:
        self._session = session
        self._client = client
        self._attempt: AttemptView | None = None
        self._announced_epoch = 0

    def announce(self, job: JobView) -> None:
        """Print a long interval. Raises ApiError, Unreachable, UnexpectedAnswer."""
        if job.state is not JobState.RUNNING or job.epoch == self._announced_epoch or job.nodes is not None:
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
