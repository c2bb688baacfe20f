"""Who has to wait: writers that are too far ahead, readers that would read the same too often. Pure.

As in Reverb's rate limiter, what counts is the difference between samples read and `samples_per_insert` times samples
inserted; it may go to the writers' side by what readers take and what writers make readable at a time, so that they
never wait for each other. Of a pair, writers keep to the first number and readers to the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpu_client.ring.settings import RingSettings


class Flow(NamedTuple):
    """What has gone in and out so far."""

    inserted: int = 0
    """Samples that have become readable."""
    finished: int = 0
    """Samples that wait to become readable."""
    read: int = 0
    """By all readers together."""
    readable: int = 0
    wanted: int = 0
    """The most that a reader takes at a time."""
    starved: int = 0
    """Readers that wait since nothing is readable that they may read: all is too old, or was used up."""
    orphans: int = 0
    """Objects that were stored and never claimed, and are not removed yet: a writer that has died left them behind."""

    def content(self) -> dict[str, Any]:
        """For a record."""
        return self._asdict()

    @classmethod
    def of_content(cls, content: Mapping[str, Any]) -> Flow:
        """As a record has it; what it lacks is 0."""
        return cls(*(int(content.get(name, 0)) for name in cls._fields))


def write_wait(flow: Flow, settings: RingSettings, slack: int) -> str:
    """Why a writer has to wait before it makes another sample; empty if it has not.

    `slack`: samples that readers take at a time, at least.
    """
    if flow.finished >= settings.ahead:
        return f"{flow.finished} finished samples wait to become readable"
    bounds = settings.reads_per_insert
    if bounds is None or flow.readable < settings.min_size or flow.starved:
        return ""
    least = bounds[0]
    # Readers who wait may leave almost as many reads open as they take at a time. A generation is published whole: all
    # that it takes to make it whole comes on top, or nobody would end the other's waiting.
    taken = max(slack, flow.wanted)
    allowed = taken + least * settings.cap if settings.mode == "generation" else max(taken, least * settings.pack)
    if (flow.inserted + flow.finished - settings.min_size) * least - flow.read > allowed:
        return f"{flow.read} samples were read of {flow.inserted}; {least:g} times each is wanted"
    return ""


def read_wait(flow: Flow, settings: RingSettings, wanted: int) -> str:
    """Why a reader has to wait before it takes `wanted` more samples; empty if it has not."""
    if flow.readable < settings.min_size:
        return f"{flow.readable} samples are readable; {settings.min_size} are wanted before the first is read"
    bounds = settings.reads_per_insert
    if bounds is not None and flow.read + wanted > flow.inserted * bounds[1]:
        return f"{flow.read} samples were read of {flow.inserted}; not more than {bounds[1]:g} times each is wanted"
    return ""
