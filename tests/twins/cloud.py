"""Build all ten stores in memory over one state and one lock: the twins of the real stores, for tests."""

from __future__ import annotations

from tests.twins.fleet import MemoryFleetStore
from tests.twins.jobs import MemoryJobStore
from tests.twins.leases import MemoryLeaseStore
from tests.twins.objects import MemoryObjectStore
from tests.twins.packs import MemoryPackStore
from tests.twins.recipes import MemoryRecipeStore
from tests.twins.rings import MemoryRings
from tests.twins.sharing import MemorySharedStore
from tests.twins.state import MemoryState
from tests.twins.tokens import MemoryTokenStore
from tests.twins.webhooks import MemoryWebhookStore


class MemoryCloud:
    """The twins of all ten stores, over one state. `objects` has additional test hooks."""

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
        self.fleet = MemoryFleetStore(self.state)
        self.objects = MemoryObjectStore()
