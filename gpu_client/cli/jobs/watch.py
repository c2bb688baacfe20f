"""`baton watch`: one job until its end."""

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

from baton.contract.artifacts import StoredArtifact
from baton.contract.history import AttemptView, EventType, EventView
from baton.contract.jobs import JobState, JobView, Progress
from gpu_client.cli.core.errors import ExitCode
from gpu_client.cli.core.formats import count, duration, finite, plain, size
from gpu_client.cli.core.session import SHOWN_ID_CHARACTERS, AsJson, JobIdArgument, Session, full_id, session_of
from gpu_client.cli.data.fetch import Stored
from gpu_client.cli.jobs.goodput import goodput_lines, total_of
from gpu_client.cli.jobs.rule_events import is_of_preset, line_of
from gpu_client.cli.jobs.summary import Summary, headline, summarize
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import ApiError, UnexpectedAnswer, Unreachable

DEFAULT_EVERY_S = 2.0
LOOK_EVERY_S = 10.0
"""A look is a call of the API and a list in the store."""
MAX_SHOWN = 8
"""At once; the others are counted."""
MAX_EVENTS = 1000
"""In one answer."""
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
    }
)


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


class Pictures:
    """Shows the files of a job whose name says a step when they appear, as links; each once."""

    def __init__(self, session: Session, client: BatonClient, *, as_json: bool, look_every_s: float) -> None:
        """`look_every_s`: how often `look` will be called."""
        self._session = session
        self._client = client
        self._as_json = as_json
        self._pause = max(1, round(LOOK_EVERY_S / look_every_s))
        self._looks = 0
        self._seen: set[str] = set()
        self._known = True
        self._state: JobState | None = None

    def look(self, job_id: str, state: JobState) -> None:
        """Show what is new. Asks at the first look, now and then while the job runs, and when its state changes."""
        moved, self._state = state is not self._state, state
        due = moved or (state is JobState.RUNNING and self._looks % self._pause == 0)
        self._looks += 1
        if not due or not self._known:
            return
        try:
            stored = Stored(self._client, job_id)
        except (ApiError, UnexpectedAnswer):
            self._known = (
                False  # an older control plane, or a newer one: whatever else is wrong is said of the job itself
            )
            return
        except Unreachable:
            self._state = None  # the next look asks again, and the watching itself says that it cannot
            return
        found = [one for one in stored.by_path.values() if one.step is not None and one.path not in self._seen]
        if found:
            self._seen.update(one.path for one in found)
            self._show(job_id, sorted(found, key=lambda one: (one.step or 0, one.path)), stored.expires_in_s)

    def _show(self, job_id: str, found: list[StoredArtifact], expires_in_s: int) -> None:
        if self._as_json:
            for one in found:
                told = {**one.model_dump(), "expires_in_s": expires_in_s}
                self._session.screen.json_line({"id": job_id, "artifact": told})
            return
        earlier = found[:-MAX_SHOWN]
        if earlier:
            short = job_id[:SHOWN_ID_CHARACTERS]
            said = count(len(earlier), "earlier picture")
            self._session.screen.say(f"{said}; for all: baton fetch {short} DIR --so-far")
        for one in found[-MAX_SHOWN:]:
            note = f"({size(one.size_bytes or 0)}, link valid for {duration(expires_in_s)})"
            self._session.screen.link(f"step {one.step}: ", one.path, one.url, note)


class Firings:
    """Shows each once, from the first look on; `last` says in short what fired last."""

    def __init__(self, session: Session, client: BatonClient, *, as_json: bool, look_every_s: float) -> None:
        """`look_every_s`: how often `look` will be called."""
        self._session = session
        self._client = client
        self._as_json = as_json
        self._pause = max(1, round(LOOK_EVERY_S / look_every_s))
        self._looks = 0
        self._cursor: str | None = None
        self._unpassed = 0
        """Events that were seen and lie behind the cursor: where the newest one ends no answer says."""
        self._seen = 0
        self.last = ""
        self._state: JobState | None = None

    def look(self, job_id: str, state: JobState) -> None:
        """Show what is new. Asks now and then until the job has ended, and when its state changes."""
        moved, self._state = state is not self._state, state
        due = moved or (not state.terminal and self._looks % self._pause == 0)
        self._looks += 1
        if not due:
            return
        try:
            for event in self._new(job_id):
                if event.type is EventType.RULE_FIRED:
                    self.last = _in_short(event)
                if _is_shown(event):
                    self._show(job_id, event)
        except Unreachable:
            self._state = None  # the next look asks again, and the watching itself says that it cannot

    def _new(self, job_id: str) -> Iterator[EventView]:
        """What has come since the last look, of which one event is read again, whatever the history's length."""
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
            self._session.screen.json_line({"id": job_id, "event": event.model_dump(mode="json")})
        else:
            self._session.screen.say(line_of(event))


def _is_shown(event: EventView) -> bool:
    return event.type in _SHOWN or is_of_preset(event)


def _in_short(event: EventView) -> str:
    """`spike fired at step 120: rollback`."""
    dry = " (dry run)" if event.data.get("dry_run") else ""
    actions = ", ".join(event.data.get("actions") or [])
    return f"{event.data.get('rule')} fired at step {event.data.get('step')}{dry}" + (f": {actions}" if actions else "")
