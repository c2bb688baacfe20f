"""The event source mapping's part on one machine: what the jobs table's stream tells of is handed to the publisher."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from functions.local.lambda_context import LambdaHandler, LocalContext
from functions.local.lifecycle import Poller, Stopper
from functions.storage.stream import is_transition

logger = logging.getLogger(__name__)

BATCH_RECORDS = 100


class StreamFeed(Poller):
    """Reads the stream `stream_arn` through `client` (of `dynamodbstreams`) every `interval_s` seconds in a thread.

    The emulated stream has one shard, and remembers nothing of earlier runs. As Lambda does: from the record that the
    handler names as failed, or from the beginning of the batch when it raises, records are handed over again.
    """

    def __init__(
        self,
        handler: LambdaHandler,
        client: Any,
        stream_arn: str,
        *,
        interval_s: float = 0.5,
        stopper: Stopper | None = None,
    ) -> None:
        super().__init__("feed", stopper, interval_s)
        self._handler = handler
        self._client = client
        self._stream_arn = stream_arn
        self._iterator: str | None = None
        self._done = ""
        """Sequence number of the last record that need not come again; empty before the first."""

    def tick(self) -> bool:
        """Hand over one batch; True if more may be waiting."""
        try:
            if self._iterator is None:
                self._iterator = self._position()
            page = self._client.get_records(ShardIterator=self._iterator, Limit=BATCH_RECORDS)
        except (BotoCoreError, ClientError) as error:
            logger.warning("the stream cannot be read: %s", error)
            self._iterator = None
            if isinstance(error, ClientError) and error.response["Error"]["Code"] == "TrimmedDataAccessException":
                # What was read last is older than a day and gone: what is left is all new.
                self._done = ""
            return False
        records = page["Records"]
        failed = self._hand_over([_as_lambda_sees_it(record, self._stream_arn) for record in records])
        if failed is None:
            self._iterator = page.get("NextShardIterator")
            self._done = _number_of(records[-1]) if records else self._done
            return len(records) == BATCH_RECORDS
        numbers = [_number_of(record) for record in records]
        done = numbers[: numbers.index(failed)]
        self._done = done[-1] if done else self._done
        self._iterator = None
        return False

    def _position(self) -> str:
        (shard,) = self._client.describe_stream(StreamArn=self._stream_arn)["StreamDescription"]["Shards"]
        start = (
            {"ShardIteratorType": "AFTER_SEQUENCE_NUMBER", "SequenceNumber": self._done}
            if self._done
            else {"ShardIteratorType": "TRIM_HORIZON"}
        )
        answer = self._client.get_shard_iterator(StreamArn=self._stream_arn, ShardId=shard["ShardId"], **start)
        return str(answer["ShardIterator"])

    def _hand_over(self, records: Sequence[Mapping[str, Any]]) -> str | None:
        """The number of the record from which they are to come again; None if all are done."""
        wanted = [record for record in records if is_transition(record)]
        if not wanted:
            return None
        try:
            answer = self._handler({"Records": wanted}, LocalContext("publisher"))
        except Exception:  # the boundary at which Lambda reports a failed invocation
            logger.exception("the call of the publisher failed")
            return _number_of(wanted[0])
        failures = [str(failure["itemIdentifier"]) for failure in answer["batchItemFailures"]]
        return min(failures, default=None)


def _as_lambda_sees_it(record: Mapping[str, Any], stream_arn: str) -> dict[str, Any]:
    change = dict(record["dynamodb"])
    at = change.get("ApproximateCreationDateTime")
    if isinstance(at, datetime):
        change["ApproximateCreationDateTime"] = at.timestamp()
    return {**record, "dynamodb": change, "eventSourceARN": stream_arn}


def _number_of(record: Mapping[str, Any]) -> str:
    return str(record["dynamodb"]["SequenceNumber"])
