"""Stand in for the control plane where a script runs alone: a world of one node in this process."""

from __future__ import annotations

from baton.contract.elastic.data import DataGrant, DataRequest
from baton.contract.elastic.spans import count_spans, list_numbers, merge_spans, take_free
from baton.contract.elastic.world import EpochProposal, JoinRequest, NodeView, WorldReport, WorldView

SOLO_NODE = "0.0.00000000"


class SoloWorld:
    """World of the node SOLO_NODE. Each call succeeds."""

    def __init__(self) -> None:
        self._epoch = 0
        self._request: JoinRequest | None = None

    def join(self, request: JoinRequest) -> WorldView:
        """Remember the node."""
        self._request = request
        return self.view()

    def view(self) -> WorldView:
        """Return the world with the node as joining or, after the first proposal, as member."""
        request = self._request
        nodes = []
        if request is not None:
            is_member = self._epoch > 0
            nodes = [NodeView(node=request.node, seat=0, member=is_member, ready=request.ready, round=request.round)]
        state = "training" if self._epoch else "forming"
        return WorldView(
            job="",
            state=state,
            epoch=self._epoch,
            round=0,
            min=1,
            max=1,
            nodes=nodes,
            program=request and request.program,
        )

    def propose(self, proposal: EpochProposal) -> WorldView:
        """Begin the epoch of the node."""
        self._epoch = proposal.epoch + 1
        return self.view()

    def report(self, report: WorldReport) -> WorldView:
        """Discard the report; return the world of the single node."""
        return self.view()

    def lease(self, request: DataRequest) -> DataGrant:
        """Return the next shards in their order."""
        progress = request.trained.merge(request.pending)
        free = take_free(progress.finished, request.positions, request.want)
        taken = merge_spans(progress.finished, free)
        return DataGrant(
            leases=[[one, progress.offset_of(one)] for one in list_numbers(free)],
            exhausted=not take_free(taken, request.positions, 1) and count_spans(free) < request.want,
        )
