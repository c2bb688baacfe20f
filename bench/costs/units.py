"""Bill requests by AWS's rules: read and write units of DynamoDB, requests of S3.

The emulated cloud does not count units, so items are looked at before and after each request, by a client of our own.
Sizes are those of the items as DynamoDB counts them (names and values, numbers about two digits a byte).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

from functions.storage.tables import TABLES, Index, Table

WRITE_BYTES, READ_BYTES = 1024, 4096
S3_PUTS = frozenset(("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "ListObjectsV2"))
S3_GETS = frozenset(("GetObject", "HeadObject"))
TRANSACTION_FACTOR = 2

Item = Mapping[str, Any]
Place = tuple[str, str]
"""A table's name, and a key in it as text."""
Billed = dict[str, float]
"""Number of units of one call, by the name of the unit."""


def item_bytes(item: Item) -> int:
    """Compute the size of an item, or of its projection in an index, in bytes."""
    return sum(len(name.encode()) + _value_bytes(value) for name, value in item.items())


def _value_bytes(value: Mapping[str, Any]) -> int:
    ((kind, content),) = value.items()
    match kind:
        case "S":
            return len(content.encode())
        case "N":
            return ceil(len(content.lstrip("-").replace(".", "")) / 2) + 1
        case "BOOL" | "NULL":
            return 1
        case "B":
            return len(content)
        case "SS":
            return sum(len(text.encode()) for text in content)
        case _:
            raise ValueError(f"no item of ours has a {kind}")


def write_units(size_bytes: int) -> int:
    """Bill one write of an item of that size."""
    return max(ceil(size_bytes / WRITE_BYTES), 1)


def read_units(read_bytes: int, *, consistent: bool) -> float:
    """Bill one read of that many bytes."""
    return max(ceil(read_bytes / READ_BYTES), 1) * (1 if consistent else 0.5)


def index_units(table: Table, before: Item | None, after: Item | None) -> int:
    """Bill the index writes of an item's write: a moved key is a delete and a put."""
    units = 0
    for index in table.indexes:
        old, new = _entry(table, index, before), _entry(table, index, after)
        if old is not None and new is not None and _index_key(index, old) == _index_key(index, new):
            units += 0 if old == new else write_units(max(item_bytes(old), item_bytes(new)))
        else:
            units += sum(write_units(item_bytes(entry)) for entry in (old, new) if entry is not None)
    return units


def _entry(table: Table, index: Index, item: Item | None) -> Item | None:
    if item is None or not set(index.key.attributes()) <= set(item):
        return None
    if index.projection == "ALL":
        return item
    names = {*index.key.attributes(), *table.key.attributes()}
    return {name: value for name, value in item.items() if name in names}


def _index_key(index: Index, item: Item) -> list[Any]:
    return [item[name] for name in index.key.attributes()]


class Meter:
    """Meter for the requests of two clients; `reader` is an unmetered client."""

    def __init__(self, dynamodb: Any, s3: Any, reader: Any, prefix: str) -> None:
        self._tables = {table.name(prefix): table for table in TABLES}
        self._reader = reader
        self._billed: Counter[str] = Counter()
        self._before: dict[Place, Item | None] = {}
        for client in (dynamodb, s3):
            client.meta.events.register("provide-client-params.*.*", self._note_request)
            client.meta.events.register("after-call.*.*", self._note_answer)

    @contextmanager
    def billed(self) -> Iterator[Counter[str]]:
        """Bill the requests inside the block; the fields are filled at the end."""
        self._billed.clear()
        during: Counter[str] = Counter()
        yield during
        during.update(self._billed)

    def _note_request(self, params: dict[str, Any], model: Any, context: dict[str, Any], **_: Any) -> None:
        context["billed_params"] = params
        if model.service_model.service_name == "dynamodb":
            self._before = {place: self._item(place) for place in self._written(params, model.name)}

    def _note_answer(self, parsed: dict[str, Any], model: Any, context: dict[str, Any], **_: Any) -> None:
        name, params = model.name, context["billed_params"]
        if model.service_model.service_name == "s3":
            self._billed["s3_put"] += name in S3_PUTS
            self._billed["s3_get"] += name in S3_GETS
            return
        if parsed["ResponseMetadata"]["HTTPStatusCode"] >= 300:
            raise RuntimeError(f"{name} was refused: only calls that succeed are counted here")
        factor = TRANSACTION_FACTOR if name == "TransactWriteItems" else 1
        for place, before in self._before.items():
            after = self._item(place)
            largest_bytes = max(item_bytes(item) if item else 0 for item in (before, after))
            self._billed["write"] += factor * write_units(largest_bytes)
            # Indexes are kept up to date behind the transaction, at the price of plain writes.
            self._billed["write"] += index_units(self._tables[place[0]], before, after)
        if params.get("Select") == "COUNT":
            # A count costs as much as its items, which the answer leaves out.
            parsed = self._reader.query(**{field: value for field, value in params.items() if field != "Select"})
        self._billed["read"] += _read(name, params, parsed)  # type: ignore[assignment]

    def _written(self, params: dict[str, Any], name: str) -> list[Place]:
        if name == "TransactWriteItems":
            return [self._place(part) for action in params["TransactItems"] for part in action.values()]
        return [self._place(params)] if name in ("PutItem", "UpdateItem", "DeleteItem") else []

    def _place(self, part: dict[str, Any]) -> Place:
        schema = self._tables[part["TableName"]].key
        key = {name: part["Key" if "Key" in part else "Item"][name]["S"] for name in schema.attributes()}
        return part["TableName"], "\n".join(key.values())

    def _item(self, place: Place) -> Item | None:
        name, key = place
        parts = zip(self._tables[name].key.attributes(), key.split("\n"), strict=True)
        answer = self._reader.get_item(
            TableName=name, Key={part: {"S": value} for part, value in parts}, ConsistentRead=True
        )
        found: Item | None = answer.get("Item")
        return found


def _batch_read(asked: Mapping[str, Any], items: Sequence[Item]) -> float:
    """Bill each key alone; a missing item costs as much as a small one."""
    consistent = bool(asked.get("ConsistentRead"))
    found = sum(read_units(item_bytes(item), consistent=consistent) for item in items)
    return found + (len(asked["Keys"]) - len(items)) * read_units(0, consistent=consistent)


def _read(name: str, params: dict[str, Any], answer: dict[str, Any]) -> float:
    consistent = bool(params.get("ConsistentRead"))
    match name:
        case "GetItem":
            return read_units(item_bytes(answer["Item"]) if "Item" in answer else 0, consistent=consistent)
        case "Query" | "Scan":
            return read_units(sum(item_bytes(item) for item in answer["Items"]), consistent=consistent)
        case "BatchGetItem":
            return sum(
                _batch_read(asked, answer["Responses"].get(table, []))
                for table, asked in params["RequestItems"].items()
            )
        case _:
            return 0
