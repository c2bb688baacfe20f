"""Refusals. Each names a stable code; the API maps it to an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.contract.errors import ErrorCode, Fault

if TYPE_CHECKING:
    # For annotations only: the authorizer starts without the records and what they are made of.
    from functions.domain.records import Lease


class NotDoneError(Exception):
    """A rule's action cannot be done here; the text says why."""


class Refusal(Exception):  # noqa: N818 - a refusal is a normal outcome, not a fault
    """The request cannot be granted in the present state; nothing was changed."""

    def __init__(
        self, code: ErrorCode, detail: str = "", *, field: str | None = None, problems: Sequence[Fault] = ()
    ) -> None:
        """`problems`: everything that is wrong, where that may be more than `detail` says."""
        self.problems = tuple(problems)
        self.code = code
        self.detail = detail
        self.field = field
        super().__init__(f"{code}: {self.message}")

    @property
    def message(self) -> str:
        """What was wrong, then what would be right."""
        said = self.detail or self.code.meaning
        return f"{said} {self.code.remedy}"


class WriteConflict(Exception):  # noqa: N818 - a normal outcome of optimistic concurrency
    """The item changed between read and write: read again and decide again."""


class FenceBroken(Exception):  # noqa: N818 - a normal outcome: the attempt lost its right to write
    """The lease did not satisfy the fence. `lease` is what was found instead, None if there is none."""

    def __init__(self, lease: Lease | None = None) -> None:
        self.lease = lease
        super().__init__(
            "there is no lease" if lease is None else f"the lease of job {lease.job_id} is attempt {lease.epoch}'s"
        )


class StorageUnavailable(Exception):  # noqa: N818 - a condition that passes, not a fault of ours
    """The store did not answer, or asked to slow down. Whether a write happened is not known; repeating it is safe."""
