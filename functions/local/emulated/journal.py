"""A snapshot and the journal of what happened after it, in one directory.

Files: `snapshot.json` (a line with the generation, then the state) and `journal.<generation>` (one JSON record a
line). The snapshot of generation G is completed by the journal of generation G; a journal of any other generation
is a leftover. Taking a snapshot writes, in this order: the next, empty journal; the snapshot under a temporary name;
the rename that makes both current; the removal of the old journal. A process killed between any two steps leaves
either the old pair or the new one, never a record lost or applied twice.

What an `append` has returned survives the death of the process (the bytes are with the operating system). It is not
forced to the disk: a power failure may lose the last seconds of the journal. Snapshots are forced.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
DEFAULT_LIMIT_BYTES = 64 * 1024 * 1024


class JournalDamagedError(Exception):
    """The directory holds something that no kill of this program can have produced. Nothing was changed."""


@dataclass(frozen=True)
class Recovered:
    """What a directory held: the last snapshot (None: never taken) and the records after it, oldest first."""

    state: Any
    records: list[Any]


class Journal:
    """Call `recover` once, apply what it returns, then `snapshot`; from then on `append`."""

    def __init__(self, directory: Path, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._generation = 0
        self._file: int | None = None
        self._size_bytes = 0
        self._snapshot_bytes = 0

    @property
    def is_long(self) -> bool:
        """Whether a snapshot now saves more than it costs: the journal is over its limit and over the state's size."""
        return self._size_bytes > max(self._limit_bytes, self._snapshot_bytes)

    def recover(self) -> Recovered:
        """Read the directory (made if absent) and drop leftovers.

        Raises JournalDamagedError for a complete line that is not JSON or an unknown snapshot format. A last line
        without its end was being written when the process died: its request was never answered, so it is ignored.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = self._read_snapshot()
        current = self._journal_path(self._generation)
        records = _read_records(current) if current.exists() else []
        for leftover in self._directory.glob("journal.*"):
            if leftover != current:
                leftover.unlink()
        self._temporary_path.unlink(missing_ok=True)
        return Recovered(state, records)

    def snapshot(self, state: Any) -> None:
        """Make `state` the whole truth and begin an empty journal. Raises OSError; the old pair then still stands."""
        following = self._generation + 1
        body = json.dumps({"format": FORMAT, "generation": following}).encode() + b"\n" + _encode(state)
        fresh = os.open(self._journal_path(following), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            temporary = os.open(self._temporary_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                _write_all(temporary, body)
                os.fsync(temporary)
            finally:
                os.close(temporary)
            self._temporary_path.replace(self._snapshot_path)
        except BaseException:
            os.close(fresh)
            raise
        previous, self._file = self._file, fresh
        stale = self._journal_path(self._generation)
        self._generation, self._size_bytes, self._snapshot_bytes = following, 0, len(body)
        self._sync_directory()
        if previous is not None:
            os.close(previous)
        stale.unlink(missing_ok=True)

    def append(self, record: Any) -> None:
        """Add one record. Raises OSError (a full disk): the last line may then be torn and no more may follow it."""
        if self._file is None:
            raise RuntimeError("append before the first snapshot")
        line = _encode(record)
        _write_all(self._file, line)
        self._size_bytes += len(line)

    def close(self) -> None:
        """Let go of the file; the directory can be recovered from as it is."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def _snapshot_path(self) -> Path:
        return self._directory / "snapshot.json"

    @property
    def _temporary_path(self) -> Path:
        return self._directory / "snapshot.json.tmp"

    def _journal_path(self, generation: int) -> Path:
        return self._directory / f"journal.{generation}"

    def _read_snapshot(self) -> Any:
        if not self._snapshot_path.exists():
            return None
        body = self._snapshot_path.read_bytes()
        header_line, _, state_line = body.partition(b"\n")
        try:
            header = json.loads(header_line)
            if header.get("format") != FORMAT:
                raise JournalDamagedError(f"{self._snapshot_path}: format {header.get('format')}, expected {FORMAT}")
            state = json.loads(state_line)
        except (ValueError, AttributeError) as error:
            raise JournalDamagedError(f"{self._snapshot_path} is not a snapshot: {error}") from error
        self._generation, self._snapshot_bytes = int(header["generation"]), len(body)
        return state

    def _sync_directory(self) -> None:
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _read_records(path: Path) -> list[Any]:
    *complete, _torn = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(complete, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise JournalDamagedError(f"{path}, line {number}: {error}") from error
    return records


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
