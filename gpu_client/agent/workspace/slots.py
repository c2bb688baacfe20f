"""Manage the agent's disk: one slot directory per agent, one directory per attempt in it, and the agent's state file.

```
<root>/slot-0.lock            flock'ed by the agent that owns slot-0 (the kernel unlocks it when that agent dies)
<root>/slot-0/agent-state.json
<root>/slot-0/owner.json      mark of the API key that owns all files of the slot (`ownership.py`)
<root>/slot-0/arena           path of the attempt's shared memory (`arena.py`)
<root>/slot-0/jobs/<job id>.<epoch>/{data,output,staging}/, params.json
<root>/slot-0/store/<job id>/  local checkpoints (`checkpoints/local`); outlives attempts
<root>/slot-0/trash/          renamed entries before their deletion
```

Each attempt has a directory of its own, therefore a process that survived its job cannot write into the next attempt's
directory. No file outlives a change of the API key or of the control plane's address, because the jobs of the next
tenant could read the file.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from gpu_client.agent.workspace.arena import make_arena, remove_arena, remove_dead_arenas
from gpu_client.agent.workspace.ownership import clear_slot, is_owned_by, write_mark
from gpu_client.agent.workspace.safe_delete import empty_trash, ensure_directory, make_accessible
from gpu_client.checkpoints.local.chunk_cache import LocalChunkCache, find_excess_caches
from gpu_client.transport.net.files import sync_directory

_log = logging.getLogger(__name__)

MAX_SLOTS = 256
STATE_FILE = "agent-state.json"
STORES = "store"
STATE_MAX_BYTES = 64 * 1024
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


class WorkspaceError(Exception):
    """Error of an unusable workspace; the text names the path and the reason."""


class DiskFullError(WorkspaceError):
    """Error of a full disk or an exhausted quota. ``free_bytes``: free space at the time of the error."""

    def __init__(self, path: Path, free_bytes: int, needed_bytes: int | None = None) -> None:
        needed = "" if needed_bytes is None else f", {needed_bytes} needed"
        super().__init__(f"disk full at {path}: {free_bytes} bytes free{needed}")
        self.path = path
        self.free_bytes = free_bytes
        self.needed_bytes = needed_bytes


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert "no space left" and "quota exceeded" to DiskFullError; other errors propagate."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFullError(path, _measure_free_bytes(path)) from error


@dataclass(frozen=True, slots=True)
class AgentState:
    """Present work of an agent. ``started_at``: seconds since the epoch, by this machine's clock (for people only)."""

    agent_id: str
    job_id: str
    epoch: int
    phase: str
    started_at: int
    lease_token: str = ""
    """Lease token with which a restarted agent releases the job at once. Only the file's owner can read the file."""


@dataclass(frozen=True, slots=True)
class JobDirectories:
    """Directories of one attempt."""

    root: Path
    data: Path
    output: Path
    staging: Path
    params: Path
    arena: Path | None = None
    """Shared memory for staged checkpoints; None: checkpoints go to disk."""

    @property
    def control(self) -> Path:
        """Return the path of the training's initial rules and commands."""
        return self.root / "control.json"

    def write_params(self, parameters: Mapping[str, object]) -> None:
        """Write the job's parameters to `params.json`. Raises DiskFullError."""
        with disk_errors(self.params):
            self.params.write_text(json.dumps(parameters), encoding="utf-8")


class Workspace:
    """An agent's slot, locked by ``open`` and freed by ``close`` (or ``with``). Not thread-safe."""

    def __init__(self, slot: Path, agent_id: str, lock_fd: int, arenas: Path | None = None) -> None:
        self._slot = slot
        self._arenas = arenas
        self._agent_id = agent_id
        self._lock_fd: int | None = lock_fd
        self._arena_lock_fd: int | None = None
        self._previous = _read_state(slot / STATE_FILE)

    @classmethod
    def open(cls, root: Path, agent_id: str, arenas: Path | None = None, *, owner: str = "") -> Self:
        """Lock a free slot under ``root`` (created if missing): the slot in which this agent crashed, or the lowest.

        ``arenas``: directory in memory for the attempts' shared memory, or None. ``owner``: see `ownership.owner_id`.
        Removes the files of crashed agents in all free slots, the shared memory of all dead agents on this machine, and
        all files of other owners. Raises WorkspaceError if all slots are in use or another owner's files cannot be
        removed; DiskFullError, or OSError if ``root`` cannot be used.
        """
        with disk_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            root = root.resolve()
            number, lock_fd = _take_slot(root, agent_id)
            slot = root / f"slot-{number}"
            try:
                ensure_directory(slot)
                if not is_owned_by(slot, owner):
                    _clear_foreign(slot)
                    write_mark(slot, owner)
                workspace = cls(slot, agent_id, lock_fd, arenas)
                workspace.purge()
                _purge_abandoned(root, number, owner)
                if arenas is not None:
                    remove_dead_arenas(arenas)
            except BaseException:
                os.close(lock_fd)
                raise
        return workspace

    @property
    def slot(self) -> Path:
        """Return this agent's directory."""
        return self._slot

    @property
    def stores(self) -> Path:
        """Return the directory of the jobs' local checkpoint caches."""
        return self._slot / STORES

    def take_previous_state(self) -> AgentState | None:
        """Return and clear the state of an agent that crashed in this slot; None after an orderly end.

        Only an agent with the state's ``agent_id`` may release the state's job.
        """
        previous, self._previous = self._previous, None
        if previous:
            self.clear_state()
        return previous

    def write_state(self, job_id: str, epoch: int, phase: str, started_at: int, *, lease_token: str = "") -> None:
        """Write, atomically and durably, the agent's present work. Raises DiskFullError."""
        state = AgentState(self._agent_id, job_id, epoch, phase, started_at, lease_token)
        target = self._slot / STATE_FILE
        with disk_errors(target):
            fd, name = tempfile.mkstemp(prefix=".state-", dir=self._slot)
            temporary = Path(name)
            try:
                with os.fdopen(fd, "w", encoding="utf-8") as file:
                    json.dump(asdict(state), file)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            sync_directory(self._slot)

    def clear_state(self) -> None:
        """Remove the state file after the end of the work."""
        (self._slot / STATE_FILE).unlink(missing_ok=True)

    def prepare(self, job_id: str, epoch: int) -> JobDirectories:
        """Make fresh directories for an attempt, after removing another job's files.

        Raises ValueError for an id that cannot be a directory name, DiskFullError.
        """
        if not _JOB_ID.fullmatch(job_id):
            raise ValueError(f"job id {job_id[:40]!r} is not letters, digits, '-' and '_'")
        self._purge_own(keep_store=job_id)
        root = self._slot / "jobs" / f"{job_id}.{epoch}"
        locked = make_arena(self._arenas, self._slot) if self._arenas else None
        self._arena_lock_fd = locked.lock_fd if locked else None
        arena = locked.path if locked else None
        job = JobDirectories(root, root / "data", root / "output", root / "staging", root / "params.json", arena)
        with disk_errors(root):
            for directory in (job.data, job.output, job.staging):
                directory.mkdir(parents=True)
        return job

    def purge(self, *, finished: str | None = None) -> tuple[Path, ...]:
        """Remove every job's files. Returns (and logs) the files that stay, for the next purge.

        Local caches stay within their share of the disk; the cache of job ``finished`` does not stay. The purge renames
        entries before their deletion, so that a leftover never occupies a job's path, and never follows symbolic links.
        Raises WorkspaceError if the jobs cannot be renamed (a mount point).
        """
        if finished is not None and _JOB_ID.fullmatch(finished):
            LocalChunkCache(self.stores, finished).clear()
        return self._purge_own()

    def free_bytes(self) -> int:
        """Return the free space of the file system."""
        return _measure_free_bytes(self._slot)

    def require_free(self, needed_bytes: int) -> None:
        """Raise DiskFullError unless ``needed_bytes`` are free. Deletes local caches if necessary."""
        free_bytes = self.free_bytes()
        if free_bytes < needed_bytes:
            with contextlib.suppress(OSError):
                self.stores.rename(self._slot / "trash" / uuid.uuid4().hex)
                self.stores.mkdir(mode=0o700)
            empty_trash(self._slot / "trash")
            free_bytes = self.free_bytes()
        if free_bytes < needed_bytes:
            raise DiskFullError(self._slot, free_bytes, needed_bytes)

    def close(self) -> None:
        """Free the slot. Without work in progress, call `clear_state` before."""
        self._unlock_arena()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _purge_own(self, *, keep_store: str | None = None) -> tuple[Path, ...]:
        try:
            return _purge(self._slot, keep_store=keep_store)
        finally:
            self._unlock_arena()

    def _unlock_arena(self) -> None:
        if self._arena_lock_fd is not None:
            os.close(self._arena_lock_fd)
            self._arena_lock_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _measure_free_bytes(path: Path) -> int:
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def _try_lock(path: Path) -> int | None:
    """Lock a file without waiting. Returns its descriptor, or None if another process holds the lock."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _take_slot(root: Path, agent_id: str) -> tuple[int, int]:
    """Lock a slot and return its number and lock."""
    # A restarted agent first tries the slot of its crash.
    numbers = sorted(range(MAX_SLOTS), key=lambda number: _read_state_owner(root / f"slot-{number}") != agent_id)
    for number in numbers:
        fd = _try_lock(root / f"slot-{number}.lock")
        if fd is not None:
            return number, fd
    raise WorkspaceError(f"all {MAX_SLOTS} slots under {root} are taken by running agents")


def _read_state_owner(slot: Path) -> str | None:
    state = _read_state(slot / STATE_FILE)
    return state.agent_id if state else None


def _purge_abandoned(root: Path, own_number: int, owner: str) -> None:
    """Free the disk space of other crashed agents. Only their state stays, for their restart with this owner."""
    for lock_path in root.glob("slot-*.lock"):
        slot = lock_path.with_suffix("")
        if slot.name == f"slot-{own_number}" or not slot.is_dir() or slot.is_symlink():
            continue
        fd = _try_lock(lock_path)
        same_owner = is_owned_by(slot, owner)
        if fd is None:
            if not same_owner:
                _log.warning("the agent in %s seems to have another API key: jobs of both can read each other", slot)
            continue
        try:
            if not same_owner:
                _clear_foreign(slot)
                continue
            _purge(slot)
        except WorkspaceError as error:
            if not same_owner:
                raise
            _log.warning("an abandoned slot cannot be cleaned: %s", error)
        finally:
            os.close(fd)


def _clear_foreign(slot: Path) -> None:
    """Remove another owner's files. Raises WorkspaceError for remaining files, which a job could read."""
    try:
        leftovers = clear_slot(slot)
    except OSError as error:
        raise WorkspaceError(f"{slot} was made for another API key, and cannot be cleared: {error}") from error
    if leftovers:
        raise WorkspaceError(f"{leftovers[0]} was made for another API key, and cannot be removed")


def _purge(slot: Path, *, keep_store: str | None = None) -> tuple[Path, ...]:
    trash = slot / "trash"
    jobs = slot / "jobs"
    remove_arena(slot)
    ensure_directory(trash)
    try:
        if not jobs.is_symlink():
            make_accessible(jobs)
        jobs.rename(trash / uuid.uuid4().hex)
    except FileNotFoundError:
        pass  # The slot has no jobs directory yet.
    except OSError as error:
        raise WorkspaceError(f"{jobs} cannot be cleared: {error}") from error
    for left in slot.glob(".state-*"):
        left.unlink(missing_ok=True)  # Leftover of a crash between the write and the rename.
    leftovers = empty_trash(trash)
    if _trim_stores(slot, trash, keep_store):
        leftovers = empty_trash(trash)
    jobs.mkdir()  # Last, because the deletions have made room on a full disk.
    return leftovers


def _trim_stores(slot: Path, trash: Path, keep: str | None) -> bool:
    """Move local caches beyond their share of the disk into the trash; returns True after a move."""
    stores = slot / STORES
    trimmed = False
    try:
        ensure_directory(stores)
        make_accessible(stores)
        for path in find_excess_caches(stores, keep=keep):
            _log.info("the local store of job %s is removed: the disk is too full", path.name)
            make_accessible(path)
            path.rename(trash / uuid.uuid4().hex)
            trimmed = True
    except OSError as error:
        _log.warning("the local stores cannot be read: %s", error)
    return trimmed


def _read_state(path: Path) -> AgentState | None:
    """Return the state in a file; None without a file, or (logged) for a damaged file."""
    try:
        with path.open("rb") as file:
            raw = json.loads(file.read(STATE_MAX_BYTES))
        return AgentState(
            agent_id=str(raw["agent_id"]),
            job_id=str(raw["job_id"]),
            epoch=int(raw["epoch"]),
            phase=str(raw["phase"]),
            started_at=int(raw["started_at"]),
            lease_token=str(raw.get("lease_token", "")),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        _log.warning("%s is damaged and ignored: %s", path, error)
        return None
