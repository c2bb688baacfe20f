"""Test one batch of the stream: published entries, repeated records, dead letters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from baton.contract.jobs.events import JobEvent
from baton.contract.jobs.history import EventType
from functions.domain.errors import StorageUnavailable
from functions.publishing.entries import MAX_REQUEST_BYTES, Entry
from functions.publishing.outbox import PERMANENT_REFUSALS, WAITS_S, publish
from functions.storage.stream import is_transition
from tests.kits.api.stream_records import (
    JOB_ID,
    OTHER_JOB,
    OTHER_WRITES,
    TENANT,
    FakeBus,
    FakeDeadLetters,
    no_wait,
    number_of,
    other_record,
    stream_record,
)

DONE: dict[str, Any] = {"batchItemFailures": []}


class Run:
    """A call of `publish` with fakes, and its results."""

    def __init__(self, records: list[dict[str, Any]], bus: FakeBus, letters: FakeDeadLetters | None = None) -> None:
        self.letters = letters or FakeDeadLetters()
        self.waits_s: list[float] = []
        self.answer = publish(records, bus, self.letters, self.waits_s.append)

    def again_from(self) -> str:
        """Return the sequence number of the record from which Lambda repeats."""
        (failure,) = self.answer["batchItemFailures"]
        return str(failure["itemIdentifier"])


def accepted(bus: FakeBus) -> list[tuple[str, int]]:
    """Return job and number of the accepted events, in order."""
    return [(event.job_id, event.seq) for event in (JobEvent.model_validate_json(e.detail) for e in bus.accepted)]


def jobs(number: int) -> list[str]:
    return [f"{index:08x}{JOB_ID[8:]}" for index in range(1, number + 1)]


def test_an_event_says_what_the_transition_says() -> None:
    bus = FakeBus()
    run = Run([stream_record(3, type_=EventType.CHECKPOINT_COMMITTED, data={"step": 100, "files": 2})], bus)
    assert run.answer == DONE
    (entry,) = bus.accepted
    assert (entry.type, entry.at) == ("checkpoint.committed", 1_790_000_003)
    assert json.loads(entry.detail) == {
        "schema_version": 1,
        "id": f"{JOB_ID}#3",
        "type": "checkpoint.committed",
        "job_id": JOB_ID,
        "tenant": TENANT,
        "seq": 3,
        "epoch": 1,
        "at": 1_790_000_003,
        "data": {"step": 100, "files": 2},
        "data_omitted": False,
    }


@pytest.mark.parametrize("name", ["INSERT", "MODIFY", "REMOVE"])
def test_other_writes_are_no_transitions(name: str) -> None:
    bus = FakeBus()
    records = [other_record(sk, name=name) for sk in OTHER_WRITES]
    if name != "INSERT":
        records.append(stream_record(1, name=name))
    assert Run(records, bus).answer == DONE
    assert bus.requests == []


def test_what_is_no_record_of_the_table_is_no_transition() -> None:
    for keys in ({}, {"sk": {"N": "1"}}, {"pk": {"S": "EVENT#1"}}):
        assert not is_transition({"eventName": "INSERT", "dynamodb": {"Keys": keys}})
    assert not is_transition({"eventName": "INSERT"})


def test_events_of_different_jobs_go_together_and_those_of_one_job_never() -> None:
    bus = FakeBus()
    many = jobs(12)
    records = [stream_record(seq, job_id=job) for seq in (1, 2) for job in many]
    assert Run(records, bus).answer == DONE
    assert accepted(bus) == [(job, seq) for seq in (1, 2) for job in many]
    assert [len(request) for request in bus.requests] == [10, 10, 4]
    for request in bus.requests:
        assert len({entry.job_id for entry in request}) == len(request)


def test_large_events_go_in_as_many_requests_as_they_need() -> None:
    bus = FakeBus()
    records = [stream_record(1, job_id=job, data={"message": "x" * 100_000}) for job in jobs(5)]
    assert Run(records, bus).answer == DONE
    assert [len(request) for request in bus.requests] == [2, 2, 1]
    assert not any(json.loads(entry.detail)["data_omitted"] for entry in bus.accepted)


def test_an_event_too_large_for_the_bus_is_told_without_its_data() -> None:
    bus = FakeBus()
    records = [stream_record(seq, data={"message": "ü" * (seq * MAX_REQUEST_BYTES // 4)}) for seq in (1, 2)]
    assert Run(records, bus).answer == DONE
    first, second = (JobEvent.model_validate_json(entry.detail) for entry in bus.accepted)
    assert (first.data_omitted, len(first.data["message"])) == (False, MAX_REQUEST_BYTES // 4)
    assert (second.data_omitted, second.data, second.seq) == (True, {}, 2)


def test_what_is_refused_in_passing_is_offered_again_alone() -> None:
    bus = FakeBus(None, "ThrottlingException", None)
    one, two, three = jobs(3)
    run = Run([stream_record(1, job_id=job) for job in (one, two, three)], bus)
    assert run.answer == DONE and run.waits_s == [WAITS_S[0]]
    assert [[entry.job_id for entry in request] for request in bus.requests] == [[one, two, three], [two]]
    assert run.letters.letters == []


def test_a_bus_that_is_away_for_a_moment_loses_and_doubles_nothing() -> None:
    bus = FakeBus(away=2)
    run = Run([stream_record(1), stream_record(2)], bus)
    assert run.answer == DONE and run.waits_s == list(WAITS_S)
    assert accepted(bus) == [(JOB_ID, 1), (JOB_ID, 2)]


def test_behind_an_event_that_stays_refused_nothing_is_published() -> None:
    bus = FakeBus(None, *["InternalFailure"] * 3)
    records = [stream_record(1), stream_record(2), stream_record(3), stream_record(1, job_id=OTHER_JOB)]
    run = Run(records, bus)
    assert run.again_from() == number_of(JOB_ID, 2)
    assert accepted(bus) == [(JOB_ID, 1)]
    assert Run(records[1:], bus).answer == DONE
    assert accepted(bus) == [(JOB_ID, 1), (JOB_ID, 2), (JOB_ID, 3), (OTHER_JOB, 1)], "each once, in order"


def test_the_first_refused_of_a_request_is_named() -> None:
    one, two, three = jobs(3)
    # Refused at first: two and three; then three passes and two does not.
    bus = FakeBus(None, "ThrottlingException", "ThrottlingException", "InternalFailure", None, "InternalFailure")
    run = Run([stream_record(1, job_id=job) for job in (one, two, three)], bus)
    assert run.again_from() == number_of(two, 1)
    assert accepted(bus) == [(one, 1), (three, 1)]


@pytest.mark.parametrize("code", sorted(PERMANENT_REFUSALS))
def test_an_event_that_the_bus_never_takes_is_buried_and_the_rest_goes_on(code: str) -> None:
    bus = FakeBus(code, None)
    run = Run([stream_record(1), stream_record(1, job_id=OTHER_JOB), stream_record(2)], bus)
    assert run.answer == DONE and run.waits_s == []
    assert accepted(bus) == [(OTHER_JOB, 1), (JOB_ID, 2)]
    assert run.letters.letters == [("EVENT#0000000001", f"the bus refuses it: {code}")]


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ("{}", "no event"),
        ("not json", "no event"),
        ('{"seq": 1, "type": "job.melted", "at": 1, "epoch": 1}', "no event"),
    ],
)
def test_an_item_that_is_no_event_is_buried_without_a_word_of_what_is_in_it(document: str, why: str) -> None:
    bus = FakeBus()
    run = Run([stream_record(1), stream_record(2, document=document), stream_record(3)], bus)
    assert run.answer == DONE
    assert accepted(bus) == [(JOB_ID, 1), (JOB_ID, 3)]
    ((sk, said),) = run.letters.letters
    assert sk == "EVENT#0000000002" and why in said
    assert "melted" not in said and "json" not in said


@pytest.mark.parametrize("lost", ["tenant", "doc", "pk"])
def test_an_item_without_what_it_needs_is_buried(lost: str) -> None:
    record = stream_record(1)
    del record["dynamodb"]["NewImage"][lost]
    run = Run([record], bus := FakeBus())
    assert run.answer == DONE and bus.requests == []
    assert run.letters.letters == [("EVENT#0000000001", f"it has no '{lost}'")]


def test_what_comes_again_is_not_buried_yet() -> None:
    bus = FakeBus(*["InternalFailure"] * 3)
    records = [stream_record(1, document="{}"), stream_record(2), stream_record(3, document="{}")]
    run = Run(records, bus)
    assert run.again_from() == number_of(JOB_ID, 2)
    assert [sk for sk, _ in run.letters.letters] == ["EVENT#0000000001"]


def test_what_cannot_be_buried_comes_again() -> None:
    records = [stream_record(1), stream_record(2, document="{}"), stream_record(3, document="{}")]
    run = Run(records, FakeBus(), FakeDeadLetters(away=1))
    assert run.again_from() == number_of(JOB_ID, 2)
    assert run.letters.letters == []
    run = Run(records[1:], FakeBus(), run.letters)
    assert run.answer == DONE
    assert [sk for sk, _ in run.letters.letters] == ["EVENT#0000000002", "EVENT#0000000003"]


class Line:
    """Record the accepted events; fail for the first `away` calls."""

    def __init__(self, *, away: int = 0) -> None:
        self.away = away
        self.told: list[tuple[str, int]] = []

    def tell(self, entries: Sequence[Entry]) -> None:
        if self.away:
            self.away -= 1
            raise StorageUnavailable("SendMessage: no connection")
        self.told += [(entry.job_id, JobEvent.model_validate_json(entry.detail).seq) for entry in entries]


def test_events_of_one_transaction_are_put_in_their_order() -> None:
    """The stream orders the writes of one item, but not the items of one transaction."""
    bus, line = FakeBus(), Line()
    records = [stream_record(2), stream_record(7, job_id=OTHER_JOB), stream_record(1), stream_record(3)]
    assert publish(records, bus, FakeDeadLetters(), no_wait, line.tell) == DONE
    assert accepted(bus) == line.told == [(JOB_ID, 1), (OTHER_JOB, 7), (JOB_ID, 2), (JOB_ID, 3)]


def test_what_was_put_behind_is_not_forgotten_when_what_is_before_it_is_refused() -> None:
    bus = FakeBus(*["InternalFailure"] * 3)
    records = [stream_record(2), stream_record(1), stream_record(3)]
    run = Run(records, bus)
    assert run.again_from() == number_of(JOB_ID, 2), "the first record, though it was not offered yet"
    assert accepted(bus) == []
    assert Run(records, bus).answer == DONE
    assert accepted(bus) == [(JOB_ID, 1), (JOB_ID, 2), (JOB_ID, 3)]


def test_who_waits_in_line_is_told_what_the_bus_has_accepted_and_nothing_else() -> None:
    bus, line = FakeBus(None, "MalformedDetail", *["InternalFailure"] * 3), Line()
    one, two, three = jobs(3)
    records = [stream_record(1, job_id=job) for job in (one, two, three)]
    answer = publish(records, bus, FakeDeadLetters(), lambda _: None, line.tell)
    assert line.told == accepted(bus) == [(one, 1)]
    assert answer == {"batchItemFailures": [{"itemIdentifier": number_of(three, 1)}]}


def test_what_cannot_be_put_in_line_comes_again_and_nothing_behind_it_goes_ahead() -> None:
    bus, line, letters = FakeBus(), Line(away=1), FakeDeadLetters()
    records = [stream_record(1), stream_record(1, job_id=OTHER_JOB), stream_record(2), stream_record(3)]
    answer = publish(records, bus, letters, no_wait, line.tell)
    assert answer == {"batchItemFailures": [{"itemIdentifier": number_of(JOB_ID, 1)}]}
    assert line.told == [] and accepted(bus) == [(JOB_ID, 1), (OTHER_JOB, 1)]
    assert publish(records, bus, letters, no_wait, line.tell) == DONE
    assert line.told == [(JOB_ID, 1), (OTHER_JOB, 1), (JOB_ID, 2), (JOB_ID, 3)]
    assert letters.letters == []


def test_a_fault_of_the_deployment_is_raised_for_somebody_to_see() -> None:
    class NoRight(FakeBus):
        def put(self, entries: Any) -> list[str | None]:
            raise PermissionError("AccessDenied")

    with pytest.raises(PermissionError):
        Run([stream_record(1)], NoRight())
