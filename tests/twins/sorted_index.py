"""A sparse index as DynamoDB keeps one, in memory: members in partitions, sorted."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import Generic, TypeVar

S = TypeVar("S", str, int)


class SortedIndex(Generic[S]):
    """Members by partition and sort key. Not thread-safe: the stores hold their lock."""

    def __init__(self) -> None:
        self._partitions: dict[str, list[tuple[S, str]]] = {}
        self._places: dict[str, tuple[str, S]] = {}

    def put(self, member: str, partition: str, sort: S) -> None:
        """Enter a member, or move it."""
        if self._places.get(member) == (partition, sort):
            return
        self.discard(member)
        self._places[member] = (partition, sort)
        insort(self._partitions.setdefault(partition, []), (sort, member))

    def discard(self, member: str) -> None:
        """Take a member out, if it is in."""
        place = self._places.pop(member, None)
        if place is None:
            return
        partition, sort = place
        entries = self._partitions[partition]
        del entries[bisect_left(entries, (sort, member))]
        if not entries:
            del self._partitions[partition]

    def after(self, partition: str, position: tuple[S, str] | None, limit: int) -> Sequence[tuple[S, str]]:
        """The next entries behind `position`, in order."""
        entries = self._partitions.get(partition, [])
        first = 0 if position is None else bisect_right(entries, position)
        return entries[first : first + limit]

    def before(self, partition: str, position: tuple[S, str] | None, limit: int) -> Sequence[tuple[S, str]]:
        """The next entries ahead of `position`, or of the end, backwards."""
        entries = self._partitions.get(partition, [])
        end = len(entries) if position is None else bisect_left(entries, position)
        return entries[max(end - limit, 0) : end][::-1]

    def up_to(self, partition: str, highest: S, limit: int) -> Sequence[tuple[S, str]]:
        """The first entries whose sort key is at most `highest`."""
        entries = self._partitions.get(partition, [])
        return entries[: min(bisect_right(entries, highest, key=_sort), limit)]

    def members(self) -> set[str]:
        """Return all members of the index."""
        return set(self._places)


def _sort(entry: tuple[S, str]) -> S:
    return entry[0]
