"""Define the calls by which a node reads and changes the membership of its world."""

from __future__ import annotations

from typing import Protocol

from baton.contract.elastic.data import DataGrant, DataRequest
from baton.contract.elastic.world import EpochProposal, JoinRequest, WorldReport, WorldView


class WorldCalls(Protocol):
    """Calls to the control plane, made by the round thread only, but for `lease`.

    Each call blocks for a few seconds at most, and is safe to repeat after WorldUnavailableError, whether or not the
    control plane has carried out the lost call. Every call may raise WorldUnavailableError.
    """

    def join(self, request: JoinRequest) -> WorldView:
        """Ask to become a member, or update the request. Raises WorldMismatchError for a program that differs."""
        ...

    def view(self) -> WorldView:
        """Return the present world."""
        ...

    def propose(self, proposal: EpochProposal) -> WorldView:
        """Replace the membership of `proposal.epoch`, and return the world of the next epoch.

        Raises WorldChangedError if the epoch has moved, NoMajorityError if too few members would stay, and
        NotAMemberError if the proposer is neither a member nor a node that may form a membership.
        """
        ...

    def report(self, report: WorldReport) -> WorldView:
        """Report committed rounds and nodes. Raises NotAMemberError, and WorldChangedError for an old epoch."""
        ...

    def lease(self, request: DataRequest) -> DataGrant:
        """Return the shards that the node holds, with new ones; any thread may call. Raises DataMismatchError."""
        ...
