"""Command `baton watch`: follow a job to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from baton.contract.fleets.job_machines import JobMachines
from baton.contract.jobs.history import AttemptView, EventType, EventView
from baton.contract.jobs.job import JobState, JobView, Progress
from baton.contract.objects.artifacts import StoredArtifact
from gpu_client.cli.core.errors import ExitCode
from gpu_client.cli.core.formats import count, duration, plain, require_finite, size
from gpu_client.cli.core.session import (
    SHOWN_ID_CHARACTERS,
    AsJson,
    CliSession,
    JobIdArgument,
    PricePerHour,
    list_attempts,
    resolve_job_id,
    session_of,
)
from gpu_client.cli.data.fetch import StoredOutputs
from gpu_client.cli.jobs.goodput import goodput_lines, total_of
from gpu_client.cli.jobs.rented import cost_usd, watch_text
from gpu_client.cli.jobs.rule_events import is_preset_event, line_of
from gpu_client.cli.jobs.summary import JobSummary, headline, summarize
from gpu_client.cli.world.view import WORLD_EVENTS, describe_rates, event_line
from gpu_client.cli.world.view import watch_text as watch_world
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import ApiError, UnexpectedAnswer, Unreachable

DEFAULT_EVERY_S = 2.0
POLL_INTERVAL_S = 10.0
"""Interval of polls for artifacts and events. Each poll for artifacts is an API call and a list in the store."""
MAX_SHOWN = 8
"""Maximum links per poll; further links are counted."""
MAX_EVENTS = 1000
"""Events per page."""
_SHOWN = frozenset(
    {
        EventType.RULE_FIRED,
        EventType.RULE_ERROR,
        EventType.RULE_UNEVALUABLE,
        EventType.ACTION_APPLIED,
        EventType.ACTION_FAILED,
        EventType.ACTION_REJECTED,
        EventType.ROLLED_BACK,
        EventType.RING_QUARANTINED,
        *WORLD_EVENTS,
    }
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("watch")(watch)


def watch(
    context: typer.Context,
    job_id: JobIdArgument,
    every_s: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between updates.")] = DEFAULT_EVERY_S,
    price_per_hour: PricePerHour = None,
    as_json: AsJson = False,
) -> None:
    """Follow a job to its end: progress, loss, cost, goodput.

    Also prints links to pictures and events of rules. Exit code 1 unless the job completes. Ctrl-C ends the command;
    the job continues.
    """
    session = session_of(context)
    pause_s = require_finite(every_s, "--every") or DEFAULT_EVERY_S
    price = session.price_per_hour(price_per_hour)
    with session.client() as client:
        poller = _JobPoller(client, resolve_job_id(client, job_id), price, refresh_s=pause_s)
        first = poller.poll()
        with display(session, as_json) as show:
            links = ArtifactLinks(session, client, as_json=as_json, refresh_s=pause_s)
            rule_events = RuleEvents(session, client, as_json=as_json, refresh_s=pause_s)

            def show_all(now: JobSummary) -> None:
                # A JSON reader may stop at the line with the final state, therefore links and events come first.
                links.poll(now.id, now.state)
                rule_events.poll(now.id, now.state)
                show(replace(now, fired=rule_events.last))

            last = _poll_until_end(session, poller, first, show=show_all, every_s=pause_s)
    if not as_json:
        session.output.line(f"{last.id[:SHOWN_ID_CHARACTERS]} {headline(last)}")
        session.output.fields(goodput_lines(last.goodput, price))
    if last.state is not JobState.COMPLETE:
        raise typer.Exit(ExitCode.FAILED)


class _JobPoller:
    """Poller of a job that requests the attempts only after the start or end of an attempt."""

    def __init__(self, client: BatonClient, job_id: str, price_per_hour: float | None, *, refresh_s: float) -> None:
        """`refresh_s`: seconds between calls of `poll`."""
        self._schedule = _PollSchedule(refresh_s)
        self._machines: JobMachines | None = None
        self._client = client
        self._job_id = job_id
        self._price_per_hour = price_per_hour
        self._attempts: list[AttemptView] = []
        self._nodes_schedule = _PollSchedule(refresh_s)
        self._nodes = ""

    def poll(self) -> JobSummary:
        """Return the current summary of the job."""
        job = self._client.get_job(self._job_id)
        if job.nodes is not None:
            return self._poll_nodes(job)
        newest = self._attempts[-1] if self._attempts else None
        if job.epoch and (newest is None or job.epoch != newest.epoch or _has_ended(job, newest)):
            self._attempts = list_attempts(self._client, self._job_id)
        elif newest is not None and _belongs_to(job.progress, newest):
            self._attempts[-1] = newest.model_copy(update={"progress": job.progress})
        newest = self._attempts[-1] if self._attempts else None
        return self._with_machines(job, summarize(job, newest, self._price_per_hour, total_of(self._attempts)))

    def _poll_nodes(self, job: JobView) -> JobSummary:
        """Return the summary of an elastic job. Requests nodes and attempts on state changes, and at intervals."""
        if self._nodes_schedule.is_due(job.state, active=not job.state.terminal):
            self._attempts = list_attempts(self._client, self._job_id)
            world = None if job.state.terminal else self._client.world(self._job_id)
            self._nodes = "" if world is None else f"{watch_world(world)}{describe_rates(world)}"
        goodput = total_of(self._attempts)
        summary = summarize(job, None, self._price_per_hour, goodput, nodes=self._attempts)
        return self._with_machines(job, replace(summary, nodes=self._nodes))

    def _with_machines(self, job: JobView, summary: JobSummary) -> JobSummary:
        """Return the summary with the rented machine and its cost, unless a price was given."""
        if self._schedule.is_due(job.state, active=not job.state.terminal):
            self._machines = self._client.job_machines(self._job_id)
        found = self._machines
        if found is None or not found.fleets:
            return summary
        cost = round(cost_usd(found), 4) if summary.cost is None and found.attempts else summary.cost
        rented = "" if job.nodes is not None and summary.attempts else watch_text(found, job.state, job.epoch)
        return replace(summary, cost=cost, rented=rented)


def _has_ended(job: JobView, attempt: AttemptView) -> bool:
    return job.state is not JobState.RUNNING and attempt.ended_at is None


def _belongs_to(progress: Progress | None, attempt: AttemptView) -> bool:
    """Return True if this running attempt, and no earlier attempt, reported the job's progress."""
    if attempt.ended_at is not None or progress is None or progress.reported_at is None:
        return False
    return progress.reported_at > attempt.started_at


def _poll_until_end(
    session: CliSession,
    poller: _JobPoller,
    first: JobSummary,
    *,
    show: Callable[[JobSummary], None],
    every_s: float,
) -> JobSummary:
    """Poll until the job ends; return the last summary.

    Prints one message for an outage of the control plane and keeps polling.
    """
    now, silent = first, False
    while True:
        show(now)
        if now.state.terminal:
            return now
        session.sleep(every_s)
        try:
            now, silent = poller.poll(), False
        except Unreachable as error:
            if not silent:
                session.output.note(f"{error}. Retrying; Ctrl-C ends this command, not the job.")
            silent = True


@contextmanager
def display(session: CliSession, as_json: bool) -> Iterator[Callable[[JobSummary], None]]:
    """Yield a function that shows a changed summary: as a JSON line, a bar on a terminal, or a line of text."""
    if not as_json and session.output.live:
        with _bar(session) as show:
            yield show
        return
    shown: JobSummary | str | None = None

    def show_change(summary: JobSummary) -> None:
        nonlocal shown
        # The summary has fields that the headline omits, such as the newest checkpoint.
        now = summary if as_json else headline(summary)
        if now == shown:
            return
        shown = now
        if as_json:
            session.output.json_line(summary.as_data())
        elif not summary.state.terminal:
            session.output.note(headline(summary))

    yield show_change


class _Bar(Bars):
    """Bar with the headline below; one line cannot contain both on a narrow terminal."""

    headline = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        """Return the bar and the headline."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self.headline)


@contextmanager
def _bar(session: CliSession) -> Iterator[Callable[[JobSummary], None]]:
    """Yield a function that updates a bar; earlier states of the job stay above the bar."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with _Bar(*columns, console=session.output.err, transient=True) as bar:
        task = bar.add_task("", total=None)
        shown: list[tuple[JobState, int]] = []

        def show(summary: JobSummary) -> None:
            state = (summary.state, summary.attempts)
            if state not in shown[-1:] and not summary.state.terminal:
                shown.append(state)
                session.output.note(_format_transition(summary))
            bar.headline = plain(headline(summary))
            description = summary.id[:SHOWN_ID_CHARACTERS]
            bar.update(task, description=description, total=summary.total_steps, completed=summary.step or 0)

        yield show


def _format_transition(summary: JobSummary) -> str:
    """Format a transition: attempt, machine and headline."""
    where = f"attempt {summary.attempts} on {summary.machine_id}: " if summary.machine_id else ""
    return f"{where}{headline(summary)}"


class _PollSchedule:
    """Schedule of the refreshes that poll: at state changes, and once per POLL_INTERVAL_S."""

    def __init__(self, refresh_s: float) -> None:
        self._every = max(1, round(POLL_INTERVAL_S / refresh_s))
        self._refreshes = 0
        self._state: JobState | None = None

    def is_due(self, state: JobState, *, active: bool) -> bool:
        """Return True if this refresh polls. `active`: poll without a state change."""
        changed, self._state = state is not self._state, state
        due = changed or (active and self._refreshes % self._every == 0)
        self._refreshes += 1
        return due

    def retry(self) -> None:
        """Poll at the next refresh."""
        self._state = None


class ArtifactLinks:
    """View that shows each new file with a step in its name once, as a link."""

    def __init__(self, session: CliSession, client: BatonClient, *, as_json: bool, refresh_s: float) -> None:
        """`refresh_s`: seconds between calls of `poll`."""
        self._session = session
        self._client = client
        self._as_json = as_json
        self._schedule = _PollSchedule(refresh_s)
        self._seen: set[str] = set()
        self._supported = True

    def poll(self, job_id: str, state: JobState) -> None:
        """Show new files. Requests the list on state changes, and every POLL_INTERVAL_S while the job runs."""
        if not self._schedule.is_due(state, active=state is JobState.RUNNING) or not self._supported:
            return
        try:
            stored = StoredOutputs(self._client, job_id)
        except (ApiError, UnexpectedAnswer):
            # The control plane lacks this route, or `get_job` reports the error: show no links.
            self._supported = False
            return
        except Unreachable:
            self._schedule.retry()  # the poll of the job reports the outage
            return
        found = [one for one in stored.by_path.values() if one.step is not None and one.path not in self._seen]
        if found:
            self._seen.update(one.path for one in found)
            self._show(job_id, sorted(found, key=lambda one: (one.step or 0, one.path)), stored.expires_in_s)

    def _show(self, job_id: str, found: list[StoredArtifact], expires_in_s: int) -> None:
        if self._as_json:
            for one in found:
                artifact = {**one.model_dump(), "expires_in_s": expires_in_s}
                self._session.output.json_line({"id": job_id, "artifact": artifact})
            return
        earlier = found[:-MAX_SHOWN]
        if earlier:
            short = job_id[:SHOWN_ID_CHARACTERS]
            earlier_text = count(len(earlier), "earlier picture")
            self._session.output.note(f"{earlier_text}; fetch all with: baton fetch {short} DIR --so-far")
        for one in found[-MAX_SHOWN:]:
            note = f"({size(one.size_bytes or 0)}, link valid for {duration(expires_in_s)})"
            self._session.output.link(f"step {one.step}: ", one.path, one.url, note)


class RuleEvents:
    """View that shows each new event of rules and rings once. `last`: short text of the last firing."""

    def __init__(self, session: CliSession, client: BatonClient, *, as_json: bool, refresh_s: float) -> None:
        """`refresh_s`: seconds between calls of `poll`."""
        self._session = session
        self._client = client
        self._as_json = as_json
        self._schedule = _PollSchedule(refresh_s)
        self._cursor: str | None = None
        self._unpassed = 0
        """Number of shown events behind the cursor, because the last page has no cursor for its end."""
        self._seen = 0
        self.last = ""

    def poll(self, job_id: str, state: JobState) -> None:
        """Show new events. Requests events on state changes, and every POLL_INTERVAL_S until the job ends."""
        if not self._schedule.is_due(state, active=not state.terminal):
            return
        try:
            for event in self._new(job_id):
                if event.type is EventType.RULE_FIRED:
                    self.last = _format_short(event)
                if _is_shown(event):
                    self._show(job_id, event)
        except Unreachable:
            self._schedule.retry()  # the poll of the job reports the outage

    def _new(self, job_id: str) -> Iterator[EventView]:
        """Yield the events since the last poll. Reads one shown event again, independent of the history's length."""
        limit = self._unpassed - 1 if self._unpassed > 1 else MAX_EVENTS
        while True:
            page = self._client.events(job_id, limit=limit, cursor=self._cursor)
            for event in page.events:
                if event.seq > self._seen:
                    self._seen = event.seq
                    yield event
            if page.next_cursor is None:
                self._unpassed = len(page.events)
                return
            self._cursor, self._unpassed, limit = page.next_cursor, 0, MAX_EVENTS

    def _show(self, job_id: str, event: EventView) -> None:
        if self._as_json:
            self._session.output.json_line({"id": job_id, "event": event.model_dump(mode="json")})
        else:
            self._session.output.note(event_line(event) if event.type in WORLD_EVENTS else line_of(event))


def _is_shown(event: EventView) -> bool:
    return event.type in _SHOWN or is_preset_event(event)


def _format_short(event: EventView) -> str:
    """Return `spike fired at step 120: rollback`."""
    dry = " (dry run)" if event.data.get("dry_run") else ""
    actions = ", ".join(event.data.get("actions") or [])
    return f"{event.data.get('rule')} fired at step {event.data.get('step')}{dry}" + (f": {actions}" if actions else "")
