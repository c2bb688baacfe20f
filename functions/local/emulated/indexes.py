"""Ordered secondary indexes for ministack's DynamoDB.

ministack's Query on an index collects the whole partition, sorts the items and evaluates the key condition on every
item, so the first page of a partition of 10,000 items costs a thousand times the page of 10 items. DynamoDB seeks to
the start of a page. Here each index partition keeps its members in ministack's order, and a Query with a Limit receives
only the members that its page can contain: from the cursor and the bounds of the sort key condition, up to `Limit`
matches. ministack's code then runs unchanged on these members and decides the matches and the end of the page. A Query
without a Limit, or on a key of several attributes, receives all members.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Any

Member = tuple[str, str]
Order = tuple[Any, ...]
Entry = tuple[Order, Member]


class Partition:
    """Members of one index partition, iterable in index order; sorted at the first read, then kept sorted."""

    __slots__ = ("_entries", "_order")

    def __init__(self) -> None:
        self._order: dict[Member, Order] = {}
        self._entries: list[Entry] | None = None

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Member]:
        return (member for _, member in self.entries())

    def add(self, member: Member, order: Order) -> None:
        """Insert a member at its position, or move an existing member."""
        self.discard(member)
        self._order[member] = order
        if self._entries is not None:
            insort(self._entries, (order, member))

    def discard(self, member: Member) -> None:
        """Remove a member by the order of its insertion; no effect if absent."""
        order = self._order.pop(member, None)
        if order is not None and self._entries is not None:
            del self._entries[bisect_left(self._entries, (order, member))]

    def entries(self) -> list[Entry]:
        """Return the sorted list itself; callers must not change the list."""
        if self._entries is None:
            self._entries = sorted((order, member) for member, order in self._order.items())
        return self._entries


class OrderedIndexes:
    """Patch of the dynamodb module, which requires one request at a time (tables.py)."""

    def __init__(self, dynamodb: Any) -> None:
        self._dynamodb = dynamodb
        self._query: dict[str, Any] | None = None

    def install(self) -> None:
        """Replace the index membership, and narrow the members that Query reads."""
        module = self._dynamodb
        query = module._query

        def ordered_query(data: dict[str, Any]) -> Any:
            self._query = data
            try:
                return query(data)
            finally:
                self._query = None

        module._query = ordered_query
        module._index_members = self.members
        module._index_item = self.index_item

    def members(self, table: dict[str, Any]) -> Any:
        """Return the members by index and partition; inside a Query with a Limit, the members of the page."""
        module = self._dynamodb
        members: dict[str, dict[Any, Partition]] | None = table.get(module._INDEX_MEMBERS)
        if members is None:
            members = {name: {} for name, _, _ in module._index_key_schemas(table)}
            table[module._INDEX_MEMBERS] = members
            for pk, items in table["items"].items():
                for sk, item in items.items():
                    self.index_item(table, pk, sk, item, add=True)
        if self._query is not None and self._query.get("Limit") is not None and self._query.get("IndexName"):
            return _Page(self._dynamodb, table, self._query, members)
        return members

    def index_item(self, table: dict[str, Any], pk: str, sk: str, item: dict[str, Any], add: bool) -> None:
        """Add an item to the indexes whose key attributes the item has, or remove the item from them."""
        module = self._dynamodb
        members = table.get(module._INDEX_MEMBERS)
        if members is None:
            return
        for name, hashes, ranges in module._index_key_schemas(table):
            if name not in members:
                table.pop(module._INDEX_MEMBERS, None)
                return
            partition = module._index_partition(item, hashes, ranges)
            if partition is None:
                continue
            partitions = members[name]
            if add:
                partitions.setdefault(partition, Partition()).add((pk, sk), order_of(module, table, ranges, item))
            elif partition in partitions:
                partitions[partition].discard((pk, sk))
                if not len(partitions[partition]):
                    del partitions[partition]


class _Page:
    """Members during one Query: `get(index).get(partition)` returns the members that the page can contain, in order."""

    def __init__(
        self, module: Any, table: dict[str, Any], query: dict[str, Any], members: dict[str, dict[Any, Partition]]
    ) -> None:
        self._module = module
        self._table = table
        self._query = query
        self._members = members

    def get(self, index_name: str) -> _PartitionPages | None:
        partitions = self._members.get(index_name)
        if partitions is None:
            return None
        return _PartitionPages(self._module, self._table, self._query, partitions)


class _PartitionPages:
    def __init__(
        self, module: Any, table: dict[str, Any], query: dict[str, Any], partitions: dict[Any, Partition]
    ) -> None:
        self._module = module
        self._table = table
        self._query = query
        self._partitions = partitions
        _, self._ranges = module._index_key_lists(module._index_def(table, query["IndexName"]))

    def get(self, partition: Any, default: Any) -> Any:
        found = self._partitions.get(partition)
        condition = self._query.get("KeyConditionExpression")
        if found is None or not condition or len(self._ranges) > 1:
            return default if found is None else found
        return self._page(found.entries(), condition, int(self._query["Limit"]))

    def _page(self, entries: list[Entry], condition: str, limit: int) -> list[Member]:
        forward = self._query.get("ScanIndexForward", True)
        first, end = self._bounds(entries, condition)
        cursor = self._query.get("ExclusiveStartKey")
        if cursor:
            order = order_of(self._module, self._table, self._ranges, cursor)
            if forward:
                first = max(first, bisect_right(entries, order, key=_order))
            else:
                end = min(end, bisect_left(entries, order, key=_order))
        values = self._query.get("ExpressionAttributeValues", {})
        names = self._query.get("ExpressionAttributeNames", {})
        page: list[Member] = []
        for position in range(first, end) if forward else range(end - 1, first - 1, -1):
            pk, sk = entries[position][1]
            item = self._table["items"][pk][sk]
            try:
                matches = self._module._evaluate_condition(
                    condition, item, values, names, slot="KeyConditionExpression"
                )
            except ValueError:
                matches = True  # ministack evaluates the same item later and reports the error
            if matches:
                page.append((pk, sk))
                if len(page) == limit:
                    break
        return page

    def _bounds(self, entries: list[Entry], condition: str) -> tuple[int, int]:
        """Return the slice of entries that match the sort key condition; all entries for an unknown condition."""
        for clause in self._module._key_condition_clauses(self._module._tokenize(condition)):
            kinds = [kind for kind, _ in clause]
            words = [text for _, text in clause]
            if kinds[1:] == ["EQ", "VALUE_REF"] and self._is_sort_key(words[0]):
                value = self._operand(words[2])
                return bisect_left(entries, value, key=_sort), bisect_right(entries, value, key=_sort)
            if kinds[1:] in (["LT", "VALUE_REF"], ["LE", "VALUE_REF"]) and self._is_sort_key(words[0]):
                side = bisect_left if kinds[1] == "LT" else bisect_right
                return 0, side(entries, self._operand(words[2]), key=_sort)
            if kinds[1:] in (["GT", "VALUE_REF"], ["GE", "VALUE_REF"]) and self._is_sort_key(words[0]):
                side = bisect_right if kinds[1] == "GT" else bisect_left
                return side(entries, self._operand(words[2]), key=_sort), len(entries)
            if len(words) == 5 and words[1].upper() == "BETWEEN" and self._is_sort_key(words[0]):
                low, high = self._operand(words[2]), self._operand(words[4])
                return bisect_left(entries, low, key=_sort), bisect_right(entries, high, key=_sort)
            if len(words) == 6 and words[0].lower() == "begins_with" and self._is_sort_key(words[2]):
                prefix = self._operand(words[4])
                size = len(prefix)
                return (
                    bisect_left(entries, prefix, key=_sort),
                    bisect_right(entries, prefix, key=lambda entry: entry[0][0][:size]),
                )
        return 0, len(entries)

    def _is_sort_key(self, word: str) -> bool:
        name = self._query.get("ExpressionAttributeNames", {}).get(word, word)
        return bool(self._ranges) and name == self._ranges[0]

    def _operand(self, word: str) -> Any:
        kind = self._module._get_attr_type(self._table, self._ranges[0])
        return self._module._sort_key_value(self._query["ExpressionAttributeValues"][word], kind)


def _order(entry: Entry) -> Order:
    return entry[0]


def _sort(entry: Entry) -> Any:
    return entry[0][0]


def order_of(module: Any, table: dict[str, Any], ranges: list[str], item: dict[str, Any]) -> Order:
    """Return the order of an item in an index partition: the sort key of the index, then the key of the table."""
    keys = module._index_order_keys(table, ranges)
    return tuple(module._index_order_value(item, name, kind) for name, kind in keys)
