"""Test the stream feed of the local stack without a stream."""

from __future__ import annotations

from typing import Any

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

    def wait(self, timeout: float) -> bool:
        self.waits -= 1
        return self.waits < 0

    def set(self) -> None:
        self.waits = 0


def test_it_stops_between_two_batches_however_many_wait() -> None:
    stream = EndlessStream()
    feed = StreamFeed(lambda event, context: {"batchItemFailures": []}, stream, "arn", stopper=After(3))
    feed.run()
    assert stream.pages == 3
