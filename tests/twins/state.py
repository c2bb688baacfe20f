"""What the twins in memory share: every item and every index, under one lock."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from typing import NamedTuple

from functions.domain.api_keys import ApiKey
from functions.domain.recipes import StoredRecipe
from functions.domain.reclaiming import Watch
from functions.domain.records import Lease, PackRecord, TransferGrant
from functions.domain.rings import RingRecord, StoredRing
from functions.domain.sharing import SharedRecord
from functions.domain.webhooks import Delivery, Webhook
from functions.storage import keys
from tests.twins.sorted_index import SortedIndex


class StoredJob(NamedTuple):
    """A job at rest."""

    rev: int
    document: str


class Numbered:
    """Documents of one kind and job, by number."""

    def __init__(self) -> None:
        self.documents: dict[int, str] = {}
        self.numbers: list[int] = []

    def put(self, number: int, document: str) -> None:
        """Enter a document, or replace the one of that number."""
        if number not in self.documents:
            insort(self.numbers, number)
        self.documents[number] = document

    def remove(self, number: int) -> None:
        """Take out the document of a number; it must be there."""
        del self.documents[number]
        del self.numbers[bisect_left(self.numbers, number)]


class MemoryState:
    """What the twins share: one lock, all items, all indexes."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.jobs: dict[str, StoredJob] = {}
        self.history: dict[tuple[str, str], Numbered] = {}
        self.groups: dict[tuple[str, str], dict[str, str]] = {}
        """What is known of the jobs of a group, by tenant and group, then by job."""
        self.scalings: dict[tuple[str, str], str] = {}
        """What rules have decided on a group, by tenant and group."""
        self.packs: dict[tuple[str, str], PackRecord] = {}
        self._pack_writes = 0
        self.shared: dict[tuple[str, str], SharedRecord] = {}
        self.leases: dict[str, Lease] = {}
        self.watch: Watch | None = None
        self.ready: SortedIndex[str] = SortedIndex()
        self.by_tenant: SortedIndex[str] = SortedIndex()
        self.by_state: SortedIndex[str] = SortedIndex()
        self.timers: SortedIndex[int] = SortedIndex()
        self.rules_due: SortedIndex[int] = SortedIndex()
        self.due: SortedIndex[int] = SortedIndex()
        self.keys: dict[str, ApiKey] = {}
        self.keys_by_tenant: SortedIndex[str] = SortedIndex()
        self.grants: dict[str, TransferGrant] = {}
        self.webhooks: dict[tuple[str, str], Webhook] = {}
        self.recipes: dict[tuple[str, str], StoredRecipe] = {}
        self.rings: dict[tuple[str, str], StoredRing] = {}
        self.ring_records: dict[tuple[str, str, str], dict[str, RingRecord]] = {}
        """By tenant, name and id of the ring."""
        self.deliveries: dict[str, dict[tuple[int, str, int], Delivery]] = {}

    def pack_version(self) -> str:
        """A name that no write of a pack has had before. To be called under the lock."""
        self._pack_writes += 1
        return str(self._pack_writes)

    def numbered(self, job_id: str, kind: str) -> Numbered:
        """The job's items of one kind."""
        return self.history.setdefault((job_id, kind), Numbered())


def created_of(position: list[str | int] | None) -> tuple[str, str] | None:
    """A position in a list by creation, as a place in an index: sort key and id."""
    if position is None:
        return None
    created_at, record_id = int(position[0]), str(position[1])
    return keys.created_sk(created_at, record_id), record_id
