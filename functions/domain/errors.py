"""Errors of decisions and stores. A refusal has a stable code, which the API maps to an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.contract.errors import ErrorCode, Fault

if TYPE_CHECKING:
    # For annotations only, because the authorizer starts without the records and without pydantic.
    from functions.domain.records import Lease


class NotDoneError(Exception):
    """An action of a rule cannot be executed; the message is the reason."""


class Refusal(Exception):  # noqa: N818 - a refusal is a normal outcome, not a fault
    """The request cannot be granted in the present state; nothing was changed."""

    def __init__(
        self,
        code: ErrorCode,
        detail: str = "",
        *,
        field: str | None = None,
        problems: Sequence[Fault] = (),
        remedy: str | None = None,
    ) -> None:
        """`problems`: all faults of a request that can have several; `detail` describes the first.

        `remedy`: correction in place of the code's; empty if `detail` contains the correction.
        """
        self.remedy = remedy
        self.problems = tuple(problems)
        self.code = code
        self.detail = detail
        self.field = field
        super().__init__(f"{code}: {self.message}")

    @property
    def message(self) -> str:
        """Return the error, then the remedy."""
        error = self.detail or self.code.meaning
        remedy = self.code.remedy if self.remedy is None else self.remedy
        return f"{error} {remedy}".rstrip()


class WriteConflict(Exception):  # noqa: N818 - a normal outcome of optimistic concurrency
    """The item changed between read and write: read again and decide again."""


class FenceBroken(Exception):  # noqa: N818 - a normal outcome: the attempt lost its right to write
    """The lease does not satisfy the fence. `lease`: the stored lease; None for a missing lease."""

    def __init__(self, lease: Lease | None = None) -> None:
        self.lease = lease
        super().__init__(
            "there is no lease" if lease is None else f"the lease of job {lease.job_id} is attempt {lease.epoch}'s"
        )


class StorageUnavailable(Exception):  # noqa: N818 - a transient condition, not a fault of the product
    """The store did not answer, or throttled. A write may have happened; repeating the write is safe."""
