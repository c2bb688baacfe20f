"""Test the stream feed of the local stack without a stream, and the pauses of its loop."""

from __future__ import annotations

from typing import Any

from functions.local.lifecycle import LONGEST_PAUSE_S, PollingLoop
from functions.local.triggers.stream_feed import BATCH_RECORDS, StreamFeed


class EndlessStream:
    """Client of a stream with an endless supply of full batches."""

    def __init__(self) -> None:
        self.pages = 0

    def describe_stream(self, **_: Any) -> dict[str, Any]:
        return {"StreamDescription": {"Shards": [{"ShardId": "shard"}]}}

    def get_shard_iterator(self, **_: Any) -> dict[str, Any]:
        return {"ShardIterator": "0"}

    def get_records(self, **_: Any) -> dict[str, Any]:
        self.pages += 1
        assert self.pages < 10, "it does not stop"
        record = {"eventName": "MODIFY", "dynamodb": {"SequenceNumber": "1"}}
        return {"Records": [record] * BATCH_RECORDS, "NextShardIterator": "0"}


class After:
    """Stop signal that is set after a number of waits."""

    def __init__(self, waits: int) -> None:
        self.waits = waits
        self.pauses: list[float] = []

    def wait(self, timeout: float) -> bool:
        self.pauses.append(timeout)
        self.waits -= 1
        return self.waits < 0

    def set(self) -> None:
        self.waits = 0


def test_it_stops_between_two_batches_however_many_wait() -> None:
    stream = EndlessStream()
    feed = StreamFeed(lambda event, context: {"batchItemFailures": []}, stream, "arn", stopper=After(3))
    feed.run()
    assert stream.pages == 3


class Inputs(PollingLoop):
    """Loop whose polls find these numbers of inputs; a full batch has two."""

    full_batch = 2

    def __init__(self, found: list[int], stopper: After) -> None:
        super().__init__("inputs", stopper, interval_s=0.5)
        self.found = found

    def tick(self) -> int:
        return self.found.pop(0)


def test_the_pause_grows_without_input_and_shrinks_with_the_first() -> None:
    stopper = After(9)
    Inputs([0, 0, 0, 0, 1, 2, 1, 0, 0], stopper).run()
    assert stopper.pauses == [0.5, 1, 2, LONGEST_PAUSE_S, LONGEST_PAUSE_S, 0.5, 0, 0.5, 1, 2]
