"""The calls of nodes on a world in memory, which the control plane's own decisions change."""

from __future__ import annotations

import threading
from collections.abc import Callable

from baton.contract.elastic.data import DataGrant, DataRequest
from baton.contract.elastic.world import EpochProposal, JoinRequest, WorldReport, WorldSeat, WorldView
from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal
from functions.domain.records import Lease
from functions.domain.worlds import membership
from functions.domain.worlds.data_pool import DataRecord, lease_shards
from functions.domain.worlds.world_record import WorldRecord, view_world
from gpu_client.elastic.errors import (
    DataMismatchError,
    NoMajorityError,
    NotAMemberError,
    WorldChangedError,
    WorldMismatchError,
    WorldUnavailableError,
)

JOB = "146683a1-0000-4000-8000-000000000000"
ERRORS = {
    ErrorCode.WORLD_CHANGED: WorldChangedError,
    ErrorCode.NO_MAJORITY: NoMajorityError,
    ErrorCode.NOT_A_MEMBER: NotAMemberError,
    ErrorCode.WORLD_MISMATCH: WorldMismatchError,
    ErrorCode.DATA_MISMATCH: DataMismatchError,
}


class MemoryWorld:
    """World of one elastic job. `is_down`: calls get no answer; `lost_answers`: calls that take effect without one."""

    def __init__(self, least: int = 1, most: int = 8, now: Callable[[], float] = lambda: 1000.0) -> None:
        self.least, self.most, self.now = least, most, now
        self.world: WorldRecord | None = None
        self.data: DataRecord | None = None
        self._lock = threading.Lock()
        self.leases: dict[int, Lease] = {}
        self.formed_epochs: list[int] = []
        """Epochs that consist of joining nodes only."""
        self.is_down = False
        self.cut_off: set[str] = set()
        """Nodes whose calls get no answer."""
        self.lost_answers = 0
        self.calls = 0

    def claim(self, seat: int) -> str:
        """Begin a new attempt at a seat, and return the id of its node."""
        attempt = self.leases[seat].epoch + 1 if seat in self.leases else 1
        self.leases[seat] = Lease(
            job_id=JOB, tenant="t", epoch=attempt, expires_at=10**9, duration_s=60, heartbeat_interval_s=10
        )
        return f"{seat}.{attempt}.{seat * 256 + attempt:08x}"

    def end(self, node: str) -> None:
        """End the attempt of a node, as its agent or the sweeper does."""
        if not self.has_ended(node):
            seat = int(node.partition(".")[0])
            self.leases[seat] = self.leases[seat].model_copy(update={"closed": "interrupted"})

    def has_ended(self, node: str) -> bool:
        """Return True if the attempt of a node has ended."""
        seat, attempt = (int(part) for part in node.split(".")[:2])
        return self.leases[seat].epoch != attempt or bool(self.leases[seat].closed)

    def view(self) -> WorldView:
        """Return the present world."""
        return view_world(JOB, self.world, self.leases, least=self.least, most=self.most, now=int(self.now()))

    def lease(self, request: DataRequest) -> DataGrant:
        """Lease shards to a node."""
        if self.is_down or request.node in self.cut_off or self.has_ended(request.node):
            raise WorldUnavailableError("the control plane is down, or the lease has ended")
        try:
            with self._lock:
                world = self.world or WorldRecord(version=0)
                after, grant = lease_shards(self.data, request, world, self.leases)
                self.data = after or self.data
        except Refusal as refusal:
            raise ERRORS[refusal.code](str(refusal)) from refusal
        return grant

    def answer(self, node: str, request: JoinRequest | EpochProposal | WorldReport | None) -> WorldView:
        """Carry out one call of a node. Raises the errors of `WorldCalls`."""
        self.calls += 1
        if self.is_down or node in self.cut_off:
            raise WorldUnavailableError("the control plane is down")
        number = int(node.partition(".")[0])
        seat, lease = WorldSeat(job=JOB, seat=number, min=self.least, max=self.most), self.leases[number]
        now = int(self.now())
        try:
            if isinstance(request, JoinRequest):
                self.world = membership.join(self.world, request, seat, lease, self.leases) or self.world
            elif isinstance(request, EpochProposal):
                before = {one.node for one in self.world.members} if self.world else set()
                self.world = membership.propose(self.world, request, seat, lease, self.leases, now=now) or self.world
                if self.world and not before & {one.node for one in self.world.members}:
                    self.formed_epochs.append(self.world.epoch)
            elif request is not None:
                self.world = membership.report(self.world, request, seat, lease)
        except Refusal as refusal:
            raise ERRORS.get(refusal.code, AssertionError)(str(refusal)) from refusal
        if self.lost_answers:
            self.lost_answers -= 1
            raise WorldUnavailableError("the answer was lost")
        return self.view()


class MemoryWorldCalls:
    """`WorldCalls` of one node."""

    def __init__(self, world: MemoryWorld, node: str) -> None:
        self.world, self.node = world, node

    def join(self, request: JoinRequest) -> WorldView:
        return self.world.answer(self.node, request)

    def view(self) -> WorldView:
        return self.world.answer(self.node, None)

    def propose(self, proposal: EpochProposal) -> WorldView:
        return self.world.answer(self.node, proposal)

    def report(self, report: WorldReport) -> WorldView:
        return self.world.answer(self.node, report)

    def lease(self, request: DataRequest) -> DataGrant:
        return self.world.lease(request)
