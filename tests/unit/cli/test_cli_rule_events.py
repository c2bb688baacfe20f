"""`baton watch` prints each rule event once, without rereading a long history."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.contract.jobs.history import EventPage, EventType, EventView
from baton.contract.jobs.job import JobState
from gpu_client.cli.jobs.watch import MAX_EVENTS, POLL_INTERVAL_S, RuleEvents
from gpu_client.transport.errors import Unreachable


class History:
    """A control plane with some events of one job."""

    def __init__(self, events: int = 0) -> None:
        self.events_so_far: list[EventView] = []
        self.read: list[int] = []
        self.away = False
        self.add(EventType.CHECKPOINT_COMMITTED, events)

    def add(self, type_: EventType, times: int = 1, **data: Any) -> None:
        for _ in range(times):
            seq = len(self.events_so_far) + 1
            self.events_so_far.append(
                EventView(seq=seq, type=type_, at=seq, epoch=1, data=data, event_type=type_.value, timestamp=seq)
            )

    def fired(self, step: int, **more: Any) -> None:
        self.add(EventType.RULE_FIRED, rule="spike", step=step, **{"actions": ["rollback"], **more})

    def events(self, job_id: str, *, limit: int, cursor: str | None = None) -> EventPage:
        if self.away:
            raise Unreachable("away")
        behind = self.events_so_far[int(cursor or 0) :]
        found = behind[:limit]
        self.read.append(len(found))
        return EventPage(events=found, next_cursor=str(found[-1].seq) if len(behind) > limit else None)


class Watched:
    def __init__(self, history: History) -> None:
        self.said: list[str] = []
        session: Any = SimpleNamespace(output=SimpleNamespace(note=self.said.append))
        client: Any = history
        self.history = history
        self.rule_events = RuleEvents(session, client, as_json=False, refresh_s=POLL_INTERVAL_S)

    def poll(self) -> tuple[list[int], list[str]]:
        """Poll once; return the number of events of each read, and the printed lines."""
        self.history.read.clear()
        self.said.clear()
        self.rule_events.poll("j", JobState.RUNNING)
        return list(self.history.read), list(self.said)


@pytest.mark.parametrize("events", [1, 2, 700, MAX_EVENTS, 2 * MAX_EVENTS + 5])
def test_a_look_goes_on_where_the_one_before_it_ended(events: int) -> None:
    history = History(events)
    watched = Watched(history)
    assert sum(watched.poll()[0]) == events
    watched.poll()
    assert watched.poll() == ([1], []), "one event, to learn what lies behind it"
    history.fired(120)
    history.fired(130)
    read, said = watched.poll()
    assert read == [3]
    assert said == ["step 120: rule spike fired", "step 130: rule spike fired"]
    assert [watched.poll()[1], watched.poll()] == [[], ([1], [])]


def test_what_came_while_nobody_answered_is_said_once() -> None:
    history = History(3)
    watched = Watched(history)
    watched.poll()
    history.away = True
    history.fired(7)
    assert watched.poll() == ([], [])
    history.away = False
    assert watched.poll()[1] == ["step 7: rule spike fired"]
    assert watched.poll()[1] == []


def test_what_fired_last_is_known_in_short() -> None:
    history = History()
    watched = Watched(history)
    watched.poll()
    assert watched.rule_events.last == ""
    history.fired(7)
    history.add(EventType.ACTION_APPLIED, rule="spike", step=7, actions=["rollback"])
    watched.poll()
    assert watched.rule_events.last == "spike fired at step 7: rollback"
    history.fired(9, dry_run=True)
    watched.poll()
    assert watched.rule_events.last == "spike fired at step 9 (dry run): rollback"


def test_a_damaged_object_of_a_ring_is_shown() -> None:
    history = History()
    about = {"ring": "/mnt/ring", "object": "samples/w/1", "step": 12, "message": "samples/w/1 is damaged: altered"}
    history.add(EventType.RING_QUARANTINED, **about, objects=1)
    history.add(EventType.RING_QUARANTINED, **about, objects=1280)
    assert Watched(history).poll()[1] == [
        "step 12: ring /mnt/ring: quarantined: samples/w/1 is damaged: altered",
        "step 12: ring /mnt/ring: quarantined (1,280 objects so far): samples/w/1 is damaged: altered",
    ]
