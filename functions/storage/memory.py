"""The stores in memory, for tests: the behaviour of the real ones, under one lock.

Jobs and their history are kept as the same JSON documents, so that they are not shared with the caller and sizes are
limited alike.
"""

from __future__ import annotations

from functions.storage.memory_jobs import MemoryJobStore
from functions.storage.memory_leases import MemoryLeaseStore
from functions.storage.memory_objects import MemoryObjectStore
from functions.storage.memory_packs import MemoryPackStore
from functions.storage.memory_recipes import MemoryRecipeStore
from functions.storage.memory_rings import MemoryRings
from functions.storage.memory_sharing import MemorySharedStore
from functions.storage.memory_state import MemoryState
from functions.storage.memory_tokens import MemoryTokenStore
from functions.storage.memory_webhooks import MemoryWebhookStore


class MemoryCloud:
    """All nine stores over one state. `objects` has test hooks of its own."""

    def __init__(self) -> None:
        self.state = MemoryState()
        self.jobs = MemoryJobStore(self.state)
        self.packs = MemoryPackStore(self.state)
        self.shared = MemorySharedStore(self.state)
        self.leases = MemoryLeaseStore(self.state)
        self.tokens = MemoryTokenStore(self.state)
        self.webhooks = MemoryWebhookStore(self.state)
        self.recipes = MemoryRecipeStore(self.state)
        self.rings = MemoryRings(self.state)
        self.objects = MemoryObjectStore()
