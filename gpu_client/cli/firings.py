"""What rules did in a job, and what was found damaged: shown by `baton watch` as it happens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_client.cli.session import Session

from baton.contract.history import EventType, EventView
from baton.contract.jobs import JobState
from baton.contract.rules import presets
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import Unreachable

LOOK_EVERY_S = 10.0
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


def is_of_preset(event: EventView) -> bool:
    """Whether it is what a preset told, or that this is over."""
    return event.data.get("rule") in presets.NAMES and event.type in (EventType.RULE_FIRED, EventType.RULE_CLEARED)


def preset_line(event: EventView) -> str:
    """`preset-stuck: no step for 14 min, usual 0.4 s`."""
    return f"{event.data['rule']}: {event.data.get('message') or 'is over'}"


def _in_short(event: EventView) -> str:
    """`spike fired at step 120: rollback`."""
    dry = " (dry run)" if event.data.get("dry_run") else ""
    actions = ", ".join(event.data.get("actions") or [])
    return f"{event.data.get('rule')} fired at step {event.data.get('step')}{dry}" + (f": {actions}" if actions else "")


def _is_shown(event: EventView) -> bool:
    return event.type in _SHOWN or is_of_preset(event)


def line_of(event: EventView) -> str:
    """`step 120: rule spike fired: loss = 7.25 (rollback)`."""
    data = event.data
    if is_of_preset(event):
        return f"step {data.get('step')}: {preset_line(event)}"
    if event.type is EventType.RING_QUARANTINED:
        count = f" ({data['objects']:,} objects so far)" if _is_many(data.get("objects")) else ""
        return f"step {data.get('step')}: ring {data.get('ring')}: quarantined{count}: {data.get('message')}"
    who = f"rule {data['rule']}" if data.get("rule") else "rules"
    who = f"command {data['command']}" if data.get("command") else who
    word = {EventType.ROLLED_BACK: f"rolled back to step {data.get('to_step')}"}.get(
        event.type, event.type.value.partition(".")[2]
    )
    if event.type.value.startswith("action."):
        word = f"{', '.join(data.get('actions', []))} {word}"
    dry = " (dry run)" if data.get("dry_run") else ""
    said = [f"{text} = {_said(value)}" for text, value in dict(data.get("operands") or {}).items()]
    said += [str(data["message"])] if data.get("message") else []
    line = f"step {data.get('step')}: {who} {word}{dry}"
    return f"{line}: {', '.join(said)}" if said else line


def _is_many(objects: object) -> bool:
    return isinstance(objects, int) and objects > 1


def _said(value: Any) -> str:
    return "unknown" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
