"""A cache of the values that the jobs of a group publish for each other's rules.

Each evaluation reads a small group anew. A large group is cached for some seconds: reading the group with every
heartbeat of every member would exceed the read limit of the group's partition.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from functions.domain.ports import JobStore
from functions.domain.records import MemberRecord

LARGE_GROUP = 100
"""Number of members above which a group is cached."""
CACHE_S = 10
"""Seconds for which a process uses its copy of a large group."""
MAX_CACHED_GROUPS = 8

_GroupKey = tuple[Any, str, str]
Members = Mapping[str, MemberRecord]


class GroupCache:
    """Cache of groups in one process; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._large: dict[_GroupKey, tuple[int, Members]] = {}
        """Time of the read, and the members with this process's writes since."""

    def members(self, jobs: JobStore, tenant: str, group: str, now: int) -> Members:
        """Return the members of the group; of a large group up to `CACHE_S` old."""
        name = (jobs, tenant, group)
        with self._lock:
            read_at, members = self._large.get(name, (0, None))
        if members is not None and 0 <= now - read_at < CACHE_S:
            return members
        found = jobs.members(tenant, group)
        with self._lock:
            self._large.pop(name, None)
            if len(found) > LARGE_GROUP:
                while len(self._large) >= MAX_CACHED_GROUPS:
                    del self._large[next(iter(self._large))]
                self._large[name] = now, found
        return found

    def join(self, jobs: JobStore, tenant: str, group: str, job_id: str, member: MemberRecord) -> None:
        """Publish a job's values to its group. Raises StorageUnavailable."""
        jobs.join(tenant, group, job_id, member)
        name = (jobs, tenant, group)
        with self._lock:
            if name in self._large:
                # Another thread may read the old mapping, therefore a new mapping replaces the old mapping.
                read_at, members = self._large[name]
                self._large[name] = read_at, {**members, job_id: member}
