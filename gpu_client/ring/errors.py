"""Define the ring's errors, each with a stable code, the problem, and the remedy."""

from __future__ import annotations


class RingError(Exception):
    """Base class of the ring's errors."""

    code = "ring_error"

    def __init__(self, problem: str, remedy: str = "") -> None:
        """`problem` may be the whole text, because a DataLoader rebuilds a worker's error from the text alone."""
        super().__init__(f"{problem}. {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[RingError], tuple[str, str]]:
        return type(self), (self.problem, self.remedy)


class SampleRefused(RingError):  # noqa: N818 - said of the sample, not of the ring
    """Error of a sample that the ring refuses, before storing any of its bytes."""

    code = "sample_refused"


class ObjectDamaged(RingError):  # noqa: N818
    """Error of stored bytes that differ from the put bytes."""

    code = "object_damaged"


class RingMismatch(RingError):  # noqa: N818
    """Error of a missing ring, or of a ring that does not fit the request."""

    code = "ring_mismatch"


class RingMissing(RingMismatch):
    """Error of a place without a ring."""


class ManifestMissing(RingError):  # noqa: N818
    """Error of a missing or unreadable manifest or pointer."""

    code = "manifest_missing"


class WriterFenced(RingError):  # noqa: N818
    """Error of a fenced writer, whose claims the ring ignores.

    Another process has taken the writer's name, or the writer has not renewed its lease in time.
    """

    code = "writer_fenced"


class StoreFull(RingError):  # noqa: N818
    """Error of a store without space for a sample."""

    code = "store_full"


class WaitedTooLong(RingError):  # noqa: N818
    """Error of a reader that received no samples, or a writer without consumers, within the time limit."""

    code = "waited_too_long"
