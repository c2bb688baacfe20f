"""Reading what the jobs of a group say to each other's rules.

A small group is read by each look. A large one is not: with every heartbeat of every member that would be millions of
items an hour out of one partition, more than it gives. What was read of it is used again for some seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from functions.domain.ports import JobStore
from functions.domain.records import MemberRecord

LARGE_GROUP = 100
"""Members. Larger groups are not read anew by each look."""
KEPT_S = 10
"""For so long one process uses what it has read of a large group."""
GROUPS_KEPT = 8

_Name = tuple[Any, str, str]
Members = Mapping[str, MemberRecord]


class GroupReads:
    """Of one process; safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._large: dict[_Name, tuple[int, Members]] = {}
        """When it was read, and what it was, with what this process has written since."""

    def members(self, jobs: JobStore, tenant: str, group: str, now: int) -> Members:
        """What is known of the group, some seconds late if it is large."""
        name = (jobs, tenant, group)
        with self._lock:
            read_at, members = self._large.get(name, (0, None))
        if members is not None and 0 <= now - read_at < KEPT_S:
            return members
        found = jobs.members(tenant, group)
        with self._lock:
            self._large.pop(name, None)
            if len(found) > LARGE_GROUP:
                while len(self._large) >= GROUPS_KEPT:
                    del self._large[next(iter(self._large))]
                self._large[name] = now, found
        return found

    def join(self, jobs: JobStore, tenant: str, group: str, job_id: str, member: MemberRecord) -> None:
        """Tell the group of a job's values. Raises StorageUnavailable."""
        jobs.join(tenant, group, job_id, member)
        name = (jobs, tenant, group)
        with self._lock:
            if name in self._large:
                # Another mapping: somebody may be looking at this one.
                read_at, members = self._large[name]
                self._large[name] = read_at, {**members, job_id: member}
