"""Invocation of a function with the stream of a table, as Lambda's event source mappings do."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from functions.local.lambda_context import HANDLER_TIMEOUT_S, LambdaHandler, LocalContext
from functions.local.lifecycle import PollingLoop, StopSignal
from functions.storage.stream import FILTER, Filter

logger = logging.getLogger(__name__)

BATCH_RECORDS = 100


class StreamFeed(PollingLoop):
    """Thread that polls the stream `stream_arn` through `client` (`dynamodbstreams`).

    The emulated stream has one shard and starts empty with each run. The handler receives the records that match one of
    `filters`. As with Lambda, the records repeat from the record that the handler reports as failed, or from the start
    of the batch if the handler raises; with `repeats` False failed records are left out.
    """

    full_batch = BATCH_RECORDS

    def __init__(
        self,
        handler: LambdaHandler,
        client: Any,
        stream_arn: str,
        *,
        function: str = "publisher",
        timeout_s: float = HANDLER_TIMEOUT_S,
        filters: Sequence[Filter] = (FILTER,),
        repeats: bool = True,
        interval_s: float = 0.5,
        stopper: StopSignal | None = None,
    ) -> None:
        super().__init__("stream feed", stopper, interval_s)
        self._handler = handler
        self._client = client
        self._stream_arn = stream_arn
        self._function = function
        self._timeout_s = timeout_s
        self._filters = filters
        self._repeats = repeats
        self._iterator: str | None = None
        self._done = ""
        """Sequence number of the last processed record; empty before the first."""

    def tick(self) -> int:
        """Process one batch; return the number of processed records."""
        try:
            if self._iterator is None:
                self._iterator = self._position()
            page = self._client.get_records(ShardIterator=self._iterator, Limit=BATCH_RECORDS)
        except (BotoCoreError, ClientError) as error:
            logger.warning("the stream cannot be read: %s", error)
            self._iterator = None
            if isinstance(error, ClientError) and error.response["Error"]["Code"] == "TrimmedDataAccessException":
                # The last processed record is older than a day and deleted, so every remaining record is new.
                self._done = ""
            return 0
        records = page["Records"]
        failed = self._invoke([_as_lambda_record(record, self._stream_arn) for record in records])
        if failed is None:
            self._iterator = page.get("NextShardIterator")
            self._done = _sequence_number(records[-1]) if records else self._done
            return len(records)
        numbers = [_sequence_number(record) for record in records]
        done = numbers[: numbers.index(failed)]
        self._done = done[-1] if done else self._done
        self._iterator = None
        return len(done)

    def _position(self) -> str:
        (shard,) = self._client.describe_stream(StreamArn=self._stream_arn)["StreamDescription"]["Shards"]
        start = (
            {"ShardIteratorType": "AFTER_SEQUENCE_NUMBER", "SequenceNumber": self._done}
            if self._done
            else {"ShardIteratorType": "TRIM_HORIZON"}
        )
        answer = self._client.get_shard_iterator(StreamArn=self._stream_arn, ShardId=shard["ShardId"], **start)
        return str(answer["ShardIterator"])

    def _invoke(self, records: Sequence[Mapping[str, Any]]) -> str | None:
        """Invoke the handler; return the sequence number of the first record to repeat, None if there is none."""
        wanted = [record for record in records if any(matches(record, pattern) for pattern in self._filters)]
        if not wanted:
            return None
        try:
            context = LocalContext(self._function, timeout_s=self._timeout_s)
            answer = self._handler({"Records": wanted}, context)
        except Exception:  # the boundary at which Lambda reports a failed invocation
            logger.exception("the function %s failed", self._function)
            return _sequence_number(wanted[0]) if self._repeats else None
        if not self._repeats:
            return None
        failures = [str(failure["itemIdentifier"]) for failure in answer["batchItemFailures"]]
        return min(failures, default=None)


def matches(found: Any, pattern: Any) -> bool:
    """Return True if a record has what a pattern of an event source mapping names: texts, `prefix`, `exists: true`."""
    if isinstance(pattern, Mapping):
        return isinstance(found, Mapping) and all(matches(found.get(name), part) for name, part in pattern.items())
    return isinstance(found, str) and any(
        found.startswith(rule.get("prefix", "")) if isinstance(rule, Mapping) else found == rule for rule in pattern
    )


def _as_lambda_record(record: Mapping[str, Any], stream_arn: str) -> dict[str, Any]:
    change = dict(record["dynamodb"])
    at = change.get("ApproximateCreationDateTime")
    if isinstance(at, datetime):
        change["ApproximateCreationDateTime"] = at.timestamp()
    return {**record, "dynamodb": change, "eventSourceARN": stream_arn}


def _sequence_number(record: Mapping[str, Any]) -> str:
    return str(record["dynamodb"]["SequenceNumber"])
