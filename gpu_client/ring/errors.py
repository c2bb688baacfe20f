"""Errors of the ring: a stable code, the problem, and the remedy."""

from __future__ import annotations


class RingError(Exception):
    """Base class of all errors of a ring."""

    code = "ring_error"

    def __init__(self, problem: str, remedy: str = "") -> None:
        """Accept the whole text as `problem` too: a DataLoader rebuilds the error of a worker from its text alone."""
        super().__init__(f"{problem}. {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[RingError], tuple[str, str]]:
        return type(self), (self.problem, self.remedy)


class SampleRefused(RingError):  # noqa: N818 - said of the sample, not of the ring
    """The ring does not accept the sample; nothing of the sample was stored."""

    code = "sample_refused"


class ObjectDamaged(RingError):  # noqa: N818
    """Stored bytes differ from the bytes that were put."""

    code = "object_damaged"


class RingMismatch(RingError):  # noqa: N818
    """The ring at the place does not fit the request, or there is none."""

    code = "ring_mismatch"


class RingMissing(RingMismatch):
    """There is no ring at the place."""


class ManifestMissing(RingError):  # noqa: N818
    """A manifest or the pointer is missing or unreadable."""

    code = "manifest_missing"


class WriterFenced(RingError):  # noqa: N818
    """Another process has taken the name of the writer, or the writer was silent for too long; the ring ignores its
    claims.
    """

    code = "writer_fenced"


class StoreFull(RingError):  # noqa: N818
    """The store has no space for a sample."""

    code = "store_full"


class WaitedTooLong(RingError):  # noqa: N818
    """No samples arrived for a reader, or no reader consumed samples, within the time limit."""

    code = "waited_too_long"
