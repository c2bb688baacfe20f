"""Define the errors of a prefetch by stable code."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from gpu_client.transport.errors import BatonError


class PrefetchCode(StrEnum):
    """Stable codes of failed prefetches."""

    INVALID_SOURCE = "invalid_source"
    NO_FILES = "no_files"
    SOURCE_MISSING = "source_missing"
    SOURCE_REFUSED = "source_refused"
    PUSH_UNFINISHED = "push_unfinished"
    DISK_TOO_SMALL = "disk_too_small"
    FILES_MISSING = "files_missing"


class PrefetchError(BatonError):
    """Error that ends a prefetch. `problems`: one line for each missing file."""

    def __init__(self, code: PrefetchCode, message: str, remedy: str, *, problems: Sequence[str] = ()) -> None:
        self.code = code
        self.remedy = remedy
        self.problems = tuple(problems)
        super().__init__(f"{code}: {message}")
