"""Compute back-pressure: delay writers that are too far ahead, and readers that would reread samples. Pure.

As in Reverb's rate limiter, the controlled quantity is samples read minus `samples_per_insert` times samples inserted.
The writers' tolerance covers the samples that readers take and writers publish at a time, so that the sides never wait
for each other. In a pair of limits, the first number applies to writers, the second to readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpu_client.ring.settings import RingSettings


class RingFlow(NamedTuple):
    """Counts of samples in and out of a ring."""

    inserted: int = 0
    """Number of samples that have become readable."""
    finished: int = 0
    """Number of claimed samples that are not yet readable."""
    read: int = 0
    """Number of samples read by all readers."""
    readable: int = 0
    wanted: int = 0
    """Largest number of samples that a reader takes at a time."""
    starved: int = 0
    """Number of readers that wait because every readable sample is too old or used up."""
    orphans: int = 0
    """Number of undeleted orphans."""

    def content(self) -> dict[str, Any]:
        """Convert to the content of a record."""
        return self._asdict()

    @classmethod
    def of_content(cls, content: Mapping[str, Any]) -> RingFlow:
        """Read the content of a record; missing fields are 0."""
        return cls(*(int(content.get(name, 0)) for name in cls._fields))


def writer_wait_reason(flow: RingFlow, settings: RingSettings, slack: int) -> str:
    """Return why a writer must wait before the next sample; "" without a reason.

    `slack`: minimum number of samples that readers take at a time.
    """
    if flow.finished >= settings.ahead:
        return f"{flow.finished} finished samples wait to become readable"
    bounds = settings.reads_per_insert
    if bounds is None or flow.readable < settings.min_size or flow.starved:
        return ""
    least = bounds[0]
    # Waiting readers may leave almost as many samples unread as they take at a time. The publication of a generation
    # requires all its samples. Therefore the limit allows both numbers together; otherwise both sides would wait
    # forever.
    taken = max(slack, flow.wanted)
    allowed = taken + least * settings.cap if settings.mode == "generation" else max(taken, least * settings.pack)
    if (flow.inserted + flow.finished - settings.min_size) * least - flow.read > allowed:
        return f"{flow.read} samples were read of {flow.inserted}; {least:g} times each is wanted"
    return ""


def reader_wait_reason(flow: RingFlow, settings: RingSettings, wanted: int) -> str:
    """Return why a reader must wait before taking `wanted` samples; "" without a reason."""
    if flow.readable < settings.min_size:
        return f"{flow.readable} samples are readable; {settings.min_size} are wanted before the first is read"
    bounds = settings.reads_per_insert
    if bounds is not None and flow.read + wanted > flow.inserted * bounds[1]:
        return f"{flow.read} samples were read of {flow.inserted}; not more than {bounds[1]:g} times each is wanted"
    return ""
