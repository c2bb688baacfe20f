"""Manual clock of the server, seeded randomness, and a delivery queue as a list."""

from __future__ import annotations

import random
import uuid
from typing import Any

from baton.contract.fleets.events import PublishedFleetEvent
from baton.contract.jobs.events import JobEvent
from functions.domain.webhooks import Webhook


class FakeClock:
    """Clock of the server that a test moves."""

    def __init__(self, now: int) -> None:
        self.at = now

    def now(self) -> int:
        return self.at

    def advance(self, seconds: int) -> None:
        self.at += seconds


class SeededRandomness:
    """Implement ports.Randomness from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def token(self) -> str:
        return self._random.randbytes(32).hex()

    def job_id(self) -> str:
        return str(uuid.UUID(bytes=self._random.randbytes(16), version=4))

    def key_id(self) -> str:
        return self._random.randbytes(10).hex()

    def below(self, bound: int) -> int:
        return self._random.randrange(bound)


class FakeLine:
    """Implement ports.DeliveryQueue as a list of webhook, event, repetition."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, Any, str]] = []

    def put(self, webhook: Webhook, event: JobEvent | PublishedFleetEvent, *, repetition: str = "") -> None:
        self.waiting.append((webhook.id, event, repetition))
