"""Hold the state that the twins in memory share: every item and every index, under one lock."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from typing import NamedTuple

from functions.domain import table_keys
from functions.domain.access.api_keys import ApiKey
from functions.domain.access.rings import RingRecord, StoredRing
from functions.domain.checkpoints.shared_outputs import SharedRecord
from functions.domain.jobs.lease_expiry import ReclaimWatermark
from functions.domain.jobs.transaction import Delete, Put
from functions.domain.record_base import Attribute, Record
from functions.domain.records import Job, Lease, PackRecord, RuleStateRecord, StoredRecipe, TransferGrant
from functions.domain.table_keys import Key
from functions.domain.webhooks import Delivery, Webhook
from tests.twins.sorted_index import SortedIndex


class StoredItem(NamedTuple):
    """A record at rest: its document, and the attributes beside it."""

    document: str
    attributes: Mapping[str, Attribute]

    def has(self, attributes: Mapping[str, Attribute]) -> bool:
        """Return whether the item has all of these attributes."""
        return all(self.attributes[name] == value for name, value in attributes.items())


class JobsTable:
    """The jobs table in memory: items by key, sort keys in order, and the sparse indexes of jobs and rule states."""

    def __init__(self) -> None:
        self._items: dict[Key, StoredItem] = {}
        self._sorts: dict[str, list[str]] = {}
        self.ready: SortedIndex[str] = SortedIndex()
        self.by_tenant: SortedIndex[str] = SortedIndex()
        self.by_state: SortedIndex[str] = SortedIndex()
        self.timers: SortedIndex[int] = SortedIndex()
        self.rules_due: SortedIndex[int] = SortedIndex()

    def items(self) -> dict[Key, StoredItem]:
        """Return all items by key."""
        return dict(self._items)

    def get(self, key: Key) -> StoredItem | None:
        """Return the item of a key."""
        return self._items.get(key)

    def between(self, lowest: Key, highest: Key) -> list[StoredItem]:
        """Return the items of one partition from one sort key to another, in order."""
        sorts = self._sorts.get(lowest.partition, [])
        chosen = sorts[bisect_left(sorts, lowest.sort) : bisect_right(sorts, highest.sort)]
        return [self._items[Key(lowest.partition, sort)] for sort in chosen]

    def admits(self, write: Put | Delete) -> bool:
        """Return whether the stored item is as the write requires."""
        stored = self.get(write.key)
        if write.seen is None:
            return True
        if isinstance(write, Put):
            return stored is None if not write.seen else stored is not None and stored.has(write.seen)
        return stored is None or (stored.has(write.seen) and int(stored.attributes["protected_until"]) <= write.now)

    def put(self, write: Put, document: str) -> None:
        """Store a record, and enter it into the indexes."""
        self.replace(write.key, StoredItem(document, write.attributes))
        if isinstance(write.record, Job):
            self._index(write.record)
        if isinstance(write.record, RuleStateRecord):
            if write.record.next_at is None:
                self.rules_due.discard(write.owner)
            else:
                self.rules_due.put(write.owner, table_keys.RULES_DUE, write.record.next_at)

    def replace(self, key: Key, item: StoredItem) -> None:
        """Store an item in place of the one before."""
        if key not in self._items:
            insort(self._sorts.setdefault(key.partition, []), key.sort)
        self._items[key] = item

    def delete(self, key: Key) -> None:
        """Take an item out, if there is one."""
        if self._items.pop(key, None) is not None:
            self._sorts[key.partition].remove(key.sort)

    def _index(self, job: Job) -> None:
        """Enter a job into the indexes whose keys are among its attributes, and take it out of the others."""
        keys = job.attributes()
        texts: tuple[tuple[SortedIndex[str], str, str], ...] = (
            (self.ready, "ready_pk", "ready_sk"),
            (self.by_tenant, "tenant", "created_sk"),
            (self.by_state, "state_pk", "created_sk"),
        )
        for index, partition, sort in texts:
            if sort in keys:
                index.put(job.id, str(keys[partition]), str(keys[sort]))
            else:
                index.discard(job.id)
        if "timer_at" in keys:
            self.timers.put(job.id, str(keys["timer_pk"]), int(keys["timer_at"]))
        else:
            self.timers.discard(job.id)


class MemoryState:
    """State that the twins share: one lock, all items, all indexes."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.jobs = JobsTable()
        self.groups: dict[tuple[str, str], dict[str, str]] = {}
        """Documents of a group's members, by tenant and group, then by job."""
        self.packs: dict[tuple[str, str], PackRecord] = {}
        self._pack_writes = 0
        self.shared: dict[tuple[str, str], SharedRecord] = {}
        self.leases: dict[str, Lease] = {}
        self.fleets: dict[tuple[str, str], tuple[int, Record]] = {}
        """Fleets with their versions, by tenant and name."""
        self.watch: ReclaimWatermark | None = None
        self.due: SortedIndex[int] = SortedIndex()
        self.keys: dict[str, ApiKey] = {}
        self.keys_by_tenant: SortedIndex[str] = SortedIndex()
        self.grants: dict[str, TransferGrant] = {}
        self.webhooks: dict[tuple[str, str], Webhook] = {}
        self.recipes: dict[tuple[str, str], StoredRecipe] = {}
        self.rings: dict[tuple[str, str], StoredRing] = {}
        self.ring_records: dict[tuple[str, str, str], dict[str, RingRecord]] = {}
        """Records of rings, by tenant, name and id of the ring."""
        self.deliveries: dict[str, dict[tuple[int, str, int], Delivery]] = {}

    def pack_version(self) -> str:
        """A name that no write of a pack has had before. To be called under the lock."""
        self._pack_writes += 1
        return str(self._pack_writes)


def created_of(position: list[str | int] | None) -> tuple[str, str] | None:
    """A position in a list by creation, as a place in an index: sort key and id."""
    if position is None:
        return None
    created_at, record_id = int(position[0]), str(position[1])
    return table_keys.created_sk(created_at, record_id), record_id
