"""Records of the stream of the jobs table; a fake bus and fake dead letters."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from baton.contract.jobs.history import EventType
from functions.domain.errors import StorageUnavailable
from functions.domain.jobs.transaction import Put, write_job
from functions.domain.records import Event
from functions.publishing.entries import MAX_ENTRIES, MAX_REQUEST_BYTES, Entry
from functions.storage.dynamodb.items import job_items
from tests.kits.api.factories import make_job, make_spec

JOB_ID = "146683a1-cb76-4702-9fef-fcccd32594f1"
OTHER_JOB = "5d1f8f0e-6c0d-4b7c-8f3a-0f5c2b9d7e10"
TENANT = "acme"
AT = 1_790_000_000
OTHER_WRITES = ("META", "ATTEMPT#0000000001", "CHECKPOINT#0000000000100")


def stream_record(
    seq: int,
    *,
    job_id: str = JOB_ID,
    type_: EventType = EventType.STARTED,
    data: Mapping[str, Any] | None = None,
    document: str | None = None,
    name: str = "INSERT",
    webhook: str | None = None,
) -> dict[str, Any]:
    """Build the stream record of a new event. `document` replaces the stored event."""
    event = Event(seq=seq, type=type_, at=AT + seq, epoch=1, data=dict(data or {}))
    job = make_job(id=job_id, tenant=TENANT, spec=make_spec(webhook=webhook))
    _, put = write_job(job).put(event).writes
    assert isinstance(put, Put)
    item = job_items.item_of(put)
    if document is not None:
        item["doc"] = {"S": document}
    return as_record(item, name=name, number=number_of(job_id, seq))


def other_record(sk: str, *, name: str = "MODIFY") -> dict[str, Any]:
    """Build the stream record of another item of a job."""
    item = {"pk": {"S": f"JOB#{JOB_ID}"}, "sk": {"S": sk}, "doc": {"S": "{}"}, "tenant": {"S": TENANT}}
    return as_record(item, name=name, number="1")


def as_record(item: Mapping[str, Any], *, name: str, number: str) -> dict[str, Any]:
    """Wrap an item as a record of DynamoDB Streams."""
    return {
        "eventID": "c4ca4238a0b923820dcc509a6f75849b",
        "eventName": name,
        "eventVersion": "1.1",
        "eventSource": "aws:dynamodb",
        "awsRegion": "eu-central-1",
        "dynamodb": {
            "ApproximateCreationDateTime": float(AT),
            "Keys": {key: item[key] for key in ("pk", "sk")},
            **({} if name == "REMOVE" else {"NewImage": dict(item)}),
            "SequenceNumber": number,
            "SizeBytes": 300,
            "StreamViewType": "NEW_IMAGE",
        },
        "eventSourceARN": "arn:aws:dynamodb:eu-central-1:123456789012:table/jobs/stream/2026-09-21T14:15:00.000",
    }


def number_of(job_id: str, seq: int) -> str:
    """Return the unique sequence number that `stream_record` gives to an event."""
    return f"{seq:06d}{int(job_id[:8], 16):012d}"


class FakeBus:
    """EventBus that accepts all entries except for the scripted `refusals`: one code (or None) for each entry in turn.

    `away`: number of requests that fail before the first accepted request.
    """

    def __init__(self, *refusals: str | None, away: int = 0) -> None:
        self.refusals = deque(refusals)
        self.away = away
        self.requests: list[list[Entry]] = []
        self.accepted: list[Entry] = []

    def put(self, entries: Sequence[Entry]) -> list[str | None]:
        assert 1 <= len(entries) <= MAX_ENTRIES
        assert sum(entry.size_bytes for entry in entries) <= MAX_REQUEST_BYTES
        self.requests.append(list(entries))
        if self.away:
            self.away -= 1
            raise StorageUnavailable("PutEvents: no connection")
        codes = [self.refusals.popleft() if self.refusals else None for _ in entries]
        self.accepted += [entry for entry, code in zip(entries, codes, strict=True) if code is None]
        return codes


class FakeDeadLetters:
    """Keep dead letters; fail for the first `away` of them."""

    def __init__(self, *, away: int = 0) -> None:
        self.away = away
        self.letters: list[tuple[str, str]] = []

    def put(self, keys: Mapping[str, str], why: str) -> None:
        if self.away:
            self.away -= 1
            raise StorageUnavailable("SendMessage: no connection")
        self.letters.append((keys["sk"], why))


def no_wait(wait_s: float) -> None:
    """Fail the test on any wait."""
    raise AssertionError(f"waited {wait_s} s")
