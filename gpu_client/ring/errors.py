"""Errors of the ring: a stable code, what is wrong, and what would be right."""

from __future__ import annotations


class RingError(Exception):
    """What was asked of a ring cannot be done."""

    code = "ring_error"

    def __init__(self, problem: str, remedy: str = "") -> None:
        """With the text alone, too: so loaders of torch raise anew what a worker has raised."""
        super().__init__(f"{problem}. {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[RingError], tuple[str, str]]:
        return type(self), (self.problem, self.remedy)


class SampleRefused(RingError):  # noqa: N818 - said of the sample, not of the ring
    """A sample that the ring does not take: nothing of it was stored."""

    code = "sample_refused"


class ObjectDamaged(RingError):  # noqa: N818
    """Stored bytes are not those that were put."""

    code = "object_damaged"


class RingMismatch(RingError):  # noqa: N818
    """There is another ring of that name, or none."""

    code = "ring_mismatch"


class RingMissing(RingMismatch):
    """There is no ring at that place."""


class ManifestMissing(RingError):  # noqa: N818
    """What the pointer names is not there, or cannot be read."""

    code = "manifest_missing"


class WriterFenced(RingError):  # noqa: N818
    """Another process has taken this writer's name, or it was silent for too long: its claims are refused."""

    code = "writer_fenced"


class StoreFull(RingError):  # noqa: N818
    """The store has no room for a sample."""

    code = "store_full"


class WaitedTooLong(RingError):  # noqa: N818
    """The other side did not come: no samples to read, or nobody who reads."""

    code = "waited_too_long"
