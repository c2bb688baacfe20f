"""Snapshot and write-ahead journal in one directory.

Files: `snapshot.json` (a line with the generation, then the state) and `journal.<generation>` (one JSON record per
line). The state is the snapshot of generation G plus the journal of generation G; a journal of another generation is a
leftover. A snapshot has four steps: create the next, empty journal; write the snapshot under a temporary name; rename
the snapshot, which makes both current; remove the old journal. A process killed between two steps leaves the old pair
or the new pair, so no record is lost or applied twice.

A record survives the death of the process once `append` returns, since the operating system has the bytes. `append`
does not call fsync: a power failure may lose the last seconds of the journal. Snapshots are synced.
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
    """The directory contains damage that no kill of this program can cause. The directory is unchanged."""


@dataclass(frozen=True)
class Recovered:
    """Content of a directory: the last snapshot (None: no snapshot) and the later records, oldest first."""

    state: Any
    records: list[Any]


class Journal:
    """Journal of a state: call `recover` once, apply the result, call `snapshot`; then call `append` per change."""

    def __init__(self, directory: Path, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._generation = 0
        self._file: int | None = None
        self._size_bytes = 0
        self._snapshot_bytes = 0

    @property
    def is_long(self) -> bool:
        """True if the journal exceeds its limit and the size of the last snapshot, so that a snapshot pays off."""
        return self._size_bytes > max(self._limit_bytes, self._snapshot_bytes)

    def recover(self) -> Recovered:
        """Read the directory, create a missing directory, remove leftovers.

        Raises JournalDamagedError for a complete line that is not JSON and for an unknown snapshot format. The process
        died while it wrote a last line without an end; the request was never answered, so the line is ignored.
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
        """Save `state` and start an empty journal. Raises OSError, after which the old pair is still valid."""
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
        """Append one record. Raises OSError (full disk); the last line may then be incomplete, so append no more."""
        if self._file is None:
            raise RuntimeError("append before the first snapshot")
        line = _encode(record)
        _write_all(self._file, line)
        self._size_bytes += len(line)

    def close(self) -> None:
        """Close the file; a later `recover` continues from the directory."""
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
