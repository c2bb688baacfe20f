"""Test under random refusals that every event arrives, after all earlier events of its job."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.contract.jobs.events import JobEvent
from functions.publishing.entries import Entry
from functions.publishing.outbox import publish
from tests.kits.api.stream_records import FakeBus, FakeDeadLetters, stream_record

JOBS = [f"{index:08x}-cb76-4702-9fef-fcccd32594f1" for index in range(1, 5)]
MAX_CALLS = 500
ANSWER = "batchItemFailures"


class Crash(BaseException):
    """End of the publisher's process."""


class FickleBus(FakeBus):
    """Refuse the poison always, others at random; `crashes`: numbers of requests after which the publisher dies."""

    def __init__(self, poison: set[tuple[str, int]], *refusals: str | None, away: int, crashes: set[int]) -> None:
        super().__init__(*refusals, away=away)
        self.poison = poison
        self.crashes = crashes

    def put(self, entries: Sequence[Entry]) -> list[str | None]:
        good = [entry for entry in entries if key_of(entry) not in self.poison]
        codes = iter(super().put(good) if good else [])
        if len(self.requests) in self.crashes:
            self.crashes.remove(len(self.requests))
            raise Crash
        return [next(codes) if entry in good else "MalformedDetail" for entry in entries]


def key_of(entry: Entry) -> tuple[str, int]:
    return entry.job_id, JobEvent.model_validate_json(entry.detail).seq


@settings(max_examples=300, deadline=None)
@given(
    who=st.lists(st.sampled_from(JOBS), min_size=1, max_size=40),
    unreadable=st.sets(st.integers(0, 39), max_size=4),
    poison=st.sets(st.tuples(st.sampled_from(JOBS), st.integers(1, 10)), max_size=4),
    refusals=st.lists(st.sampled_from([None, None, "ThrottlingException"]), max_size=120),
    away=st.integers(0, 7),
    letters_away=st.integers(0, 3),
    crashes=st.sets(st.integers(1, 30), max_size=4),
    batch=st.integers(1, 40),
)
def test_every_event_arrives_in_the_order_of_its_job(
    who: list[str],
    unreadable: set[int],
    poison: set[tuple[str, int]],
    refusals: list[str | None],
    away: int,
    letters_away: int,
    crashes: set[int],
    batch: int,
) -> None:
    counted = dict.fromkeys(JOBS, 0)
    stream = []
    for place, job in enumerate(who):
        counted[job] += 1
        record = stream_record(counted[job], job_id=job, document="{}" if place in unreadable else None)
        # Numbers of one shard rise with its records.
        record["dynamodb"]["SequenceNumber"] = f"{place:08d}"
        stream.append(record)
    bus, letters = FickleBus(poison, *refusals, away=away, crashes=crashes), FakeDeadLetters(away=letters_away)
    line: list[Entry] = []
    start = calls = 0
    while start < len(stream):
        # Lambda repeats from the record that the answer names, or goes on.
        handed = stream[start : start + batch]
        calls += 1
        assert calls < MAX_CALLS, "it goes on"
        try:
            answer = publish(handed, bus, letters, lambda _: None, line.extend)
        except Crash:
            # All of the batch comes again, whatever of it was done.
            continue
        named = [failure["itemIdentifier"] for failure in answer[ANSWER]]
        assert len(named) <= 1 and set(named) <= {record["dynamodb"]["SequenceNumber"] for record in handed}
        start = int(named[0]) if named else start + batch
    expected = {job: list(range(1, counted[job] + 1)) for job in JOBS}
    counted = dict.fromkeys(JOBS, 0)
    for place, job in enumerate(who):
        counted[job] += 1
        if place in unreadable or (job, counted[job]) in poison:
            expected[job].remove(counted[job])
    for told in (bus.accepted, line):
        first = {job: list(dict.fromkeys(seq for other, seq in map(key_of, told) if other == job)) for job in JOBS}
        assert first == expected
    buried = {sk for sk, _ in letters.letters}
    assert len(letters.letters) >= len(who) - sum(map(len, expected.values())) and len(buried) <= len(who)
