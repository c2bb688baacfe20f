"""Select the files of each source for one rank. Pure: the selection depends on the lists and the options only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, Protocol

from pydantic import BaseModel

from gpu_client.datasets.prefetch.errors import PrefetchCode, PrefetchError
from gpu_client.transport.net.cancellation import CancelEvent

PREFETCH_MANIFEST = "prefetch.json"

_WITH_RATIO = re.compile(r"(.+):(\d{1,9}(?:\.\d{1,9})?)")


class ListedFile(BaseModel, frozen=True):
    """File of a source. `path`: '/'-separated path below the target directory."""

    path: str
    size_bytes: int
    checksum: str
    """`sha256:HEX`, `blake3:HEX`, or `git-blob:HEX` (SHA-1 of a git blob)."""


@dataclass(frozen=True)
class FileLink:
    """URL of a file, and the headers for the URL's host."""

    url: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)


class FileSource(Protocol):
    """Data set to prefetch. `directory`: directory of its files below the target directory."""

    name: str
    directory: str

    def list_files(self, cancel: CancelEvent) -> tuple[str, list[ListedFile]]:
        """Return the revision of the data set and all its files. Raises PrefetchError."""
        ...

    def link(self, file: ListedFile, cancel: CancelEvent) -> FileLink:
        """Return a fresh link to a file. Raises ObjectMissing, UrlExpired, PrefetchError."""
        ...


@dataclass(frozen=True)
class ListedSource:
    """Source with its requested ratio, its revision and all its files."""

    source: FileSource
    ratio: Fraction | None
    revision: str
    files: Sequence[ListedFile]


class SelectedSource(BaseModel, frozen=True):
    """Selected files of one source. `ratio` is None if the selection has no ratios."""

    name: str
    revision: str
    ratio: float | None
    files: list[ListedFile]


class PrefetchManifest(BaseModel, frozen=True):
    """Content of `prefetch.json`, which exists once all its files are complete and verified."""

    version: Literal[1] = 1
    rank: int
    world: int
    sources: list[SelectedSource]


def split_ratio(text: str) -> tuple[str, Fraction | None]:
    """Split `NAME:RATIO` into name and ratio; the ratio of a plain `NAME` is None. Raises PrefetchError."""
    found = _WITH_RATIO.fullmatch(text)
    if found is None:
        return text, None
    ratio = Fraction(found[2])
    if not ratio:
        raise PrefetchError(PrefetchCode.INVALID_SOURCE, f"the ratio of {found[1]} is 0", "Give a positive number.")
    return found[1], ratio


def select_files(
    listed: Sequence[ListedSource],
    *,
    rank: int,
    world: int,
    filters: Sequence[str] = (),
    max_files: int | None = None,
) -> list[SelectedSource]:
    """Return the files of each source for one rank, in the order of their paths. Raises PrefetchError.

    A rank owns every `world`-th file that contains one of the `filters` in its path below the source. With ratios, the
    numbers of files are proportional to the ratios, as large as the scarcest source and `max_files` permit, and at
    least 1. Without ratios the rank takes all its files; `max_files` then shrinks all sources alike.
    """
    _require_consistent(listed, max_files)
    own = [_own_files(one, rank=rank, world=world, filters=filters) for one in listed]
    weights = [one.ratio or Fraction(len(files)) for one, files in zip(listed, own, strict=True)]
    scale = min(len(files) / weight for files, weight in zip(own, weights, strict=True))
    if max_files is not None:
        scale = min(scale, max_files / sum(weights, Fraction()))
    counts = [max(1, int(scale * weight)) for weight in weights]
    while max_files is not None and sum(counts) > max_files:
        counts[counts.index(max(counts))] -= 1
    return [
        SelectedSource(
            name=one.source.name,
            revision=one.revision,
            ratio=None if one.ratio is None else float(one.ratio),
            files=files[:count],
        )
        for one, files, count in zip(listed, own, counts, strict=True)
    ]


def _own_files(listed: ListedSource, *, rank: int, world: int, filters: Sequence[str]) -> list[ListedFile]:
    below = len(listed.source.directory) + 1
    matching = [file for file in listed.files if not filters or any(text in file.path[below:] for text in filters)]
    own = sorted(matching, key=lambda file: file.path)[rank::world]
    if not own:
        filtered = f" of which {len(matching)} match --filter" if filters else ""
        raise PrefetchError(
            PrefetchCode.NO_FILES,
            f"{listed.source.name} has {len(listed.files)} files{filtered}, and none for rank {rank} of {world}",
            "Use a smaller --world, or another filter.",
        )
    return own


def _require_consistent(listed: Sequence[ListedSource], max_files: int | None) -> None:
    without_ratio = [one.source.name for one in listed if one.ratio is None]
    if without_ratio and len(without_ratio) < len(listed):
        raise PrefetchError(
            PrefetchCode.INVALID_SOURCE, f"{without_ratio[0]} has no ratio", "Give a ratio to all sources or to none."
        )
    if max_files is not None and max_files < len(listed):
        raise PrefetchError(
            PrefetchCode.INVALID_SOURCE,
            f"--max-files is {max_files}, with {len(listed)} sources",
            "Permit at least one file of each source.",
        )
    owners: dict[str, str] = {}
    for one in listed:
        for file in one.files:
            if file.path in owners:
                raise PrefetchError(
                    PrefetchCode.INVALID_SOURCE,
                    f"{file.path} belongs to {owners[file.path]} and to {one.source.name}",
                    "Name sources without common files.",
                )
            owners[file.path] = one.source.name
