"""The stream's feed in the local stack, without a stream."""

from __future__ import annotations

from typing import Any

from functions.local.triggers.stream_feed import BATCH_RECORDS, StreamFeed


class EndlessStream:
    """A client of a stream that always has another full batch."""

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
    """A stopper that says so after a number of looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def wait(self, timeout: float) -> bool:
        self.looks -= 1
        return self.looks < 0

    def set(self) -> None:
        self.looks = 0


def test_it_stops_between_two_batches_however_many_wait() -> None:
    stream = EndlessStream()
    feed = StreamFeed(lambda event, context: {"batchItemFailures": []}, stream, "arn", stopper=After(3))
    feed.run()
    assert stream.pages == 3
