"""Rate limits: when writers are too far ahead, and when readers would read samples too often. Pure.

As in Reverb's rate limiter, the controlled quantity is samples read minus `samples_per_insert` times samples inserted.
The tolerance on the writers' side is what readers take and writers publish at a time, so both sides never wait for each
other. Of a pair, writers keep to the first number and readers to the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpu_client.ring.settings import RingSettings


class RingFlow(NamedTuple):
    """Samples in and out of a ring so far."""

    inserted: int = 0
    """Samples that have become readable."""
    finished: int = 0
    """Samples that wait to become readable."""
    read: int = 0
    """Samples read by all readers."""
    readable: int = 0
    wanted: int = 0
    """Largest number of samples that a reader takes at a time."""
    starved: int = 0
    """Readers that wait because every readable sample is too old or used up."""
    orphans: int = 0
    """Objects of dead writers that were stored, not claimed, and not deleted yet."""

    def content(self) -> dict[str, Any]:
        """Convert to the content of a record."""
        return self._asdict()

    @classmethod
    def of_content(cls, content: Mapping[str, Any]) -> RingFlow:
        """Read the content of a record; missing fields are 0."""
        return cls(*(int(content.get(name, 0)) for name in cls._fields))


def writer_wait_reason(flow: RingFlow, settings: RingSettings, slack: int) -> str:
    """Explain why a writer must wait before the next sample; "" if it need not. `slack`: minimum number of samples that
    readers take at a time.
    """
    if flow.finished >= settings.ahead:
        return f"{flow.finished} finished samples wait to become readable"
    bounds = settings.reads_per_insert
    if bounds is None or flow.readable < settings.min_size or flow.starved:
        return ""
    least = bounds[0]
    # Waiting readers may leave almost as many reads open as they take at a time. A generation is published whole, so
    # all samples of one are allowed on top; otherwise both sides would wait for ever.
    taken = max(slack, flow.wanted)
    allowed = taken + least * settings.cap if settings.mode == "generation" else max(taken, least * settings.pack)
    if (flow.inserted + flow.finished - settings.min_size) * least - flow.read > allowed:
        return f"{flow.read} samples were read of {flow.inserted}; {least:g} times each is wanted"
    return ""


def reader_wait_reason(flow: RingFlow, settings: RingSettings, wanted: int) -> str:
    """Explain why a reader must wait before it takes `wanted` samples; "" if it need not."""
    if flow.readable < settings.min_size:
        return f"{flow.readable} samples are readable; {settings.min_size} are wanted before the first is read"
    bounds = settings.reads_per_insert
    if bounds is not None and flow.read + wanted > flow.inserted * bounds[1]:
        return f"{flow.read} samples were read of {flow.inserted}; not more than {bounds[1]:g} times each is wanted"
    return ""
