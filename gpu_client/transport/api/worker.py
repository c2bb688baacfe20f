"""Call the API with the scope `worker`, from an attempt's claim to its end. The lease token fences each write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from baton.contract.checkpoints.calls import BlobUrls, BlobUrlsRequest, CommitAnswer, DamagedRequest
from baton.contract.checkpoints.manifest import Manifest
from baton.contract.elastic.data import DataGrant, DataRequest
from baton.contract.elastic.relay import RelayAnswer, RelayRequest
from baton.contract.elastic.world import EpochProposal, JoinRequest, WorldReport, WorldView
from baton.contract.worker.calls import (
    ArtifactsAnswer,
    ArtifactsRequest,
    CompleteRequest,
    DeclaredArtifact,
    FailRequest,
    HeartbeatAnswer,
    HeartbeatRequest,
    InputPage,
    ReleaseRequest,
    StatusAnswer,
    TransitionAnswer,
    WorkItem,
    WorkQuery,
)
from baton.contract.worker.output import LogChunk
from gpu_client.transport.api.calls import ApiCalls, job_path, segment

_LEASE_AWARE = {"x-lease-aware": "1"}
MAX_DAMAGE_MESSAGE = 512


class WorkerCalls(ApiCalls):
    """Calls of an attempt, from claim to report. Writes without a valid lease raise LeaseLost or LeaseExpired."""

    def claim(self, query: WorkQuery) -> WorkItem | None:
        """Claim a job with its lease. Returns None if no job suits this worker.

        The method does not retry, because a retry would claim a second job, and workers poll anyway. If the answer is
        lost, the claimed job waits for the expiry of its lease.
        """
        items = self._read(list[WorkItem], "claim", "GET", "/work", query=query, headers=_LEASE_AWARE, repeatable=False)
        return items[0] if items else None

    def peek(self, query: WorkQuery) -> list[dict[str, Any]]:
        """Return, without a claim, the job that a claim would return: a list of one job or none."""
        return self._read(list[dict[str, Any]], "peek", "GET", "/work/peek", query=query, headers=_LEASE_AWARE)

    def heartbeat(self, job_id: str, lease_token: str, request: HeartbeatRequest | None = None) -> HeartbeatAnswer:
        """Renew the lease, report progress, return the directive. `client.within(budget_s)` limits the time."""
        path = f"/heartbeat/{segment(job_id)}"
        return self._read(
            HeartbeatAnswer, "heartbeat", "POST", path, body=request or HeartbeatRequest(), lease_token=lease_token
        )

    def commit(self, lease_token: str, manifest: Manifest) -> CommitAnswer:
        """Commit a checkpoint, or return the missing packs. Idempotent for an unchanged manifest."""
        path = f"{job_path(manifest.job_id)}/checkpoints"
        return self._read(CommitAnswer, "commit", "POST", path, body=manifest, lease_token=lease_token)

    def blob_urls(self, job_id: str, step: int, blake3: Sequence[str], *, lease_token: str | None = None) -> BlobUrls:
        """Return URLs of up to 1,000 packs of a committed checkpoint."""
        path = f"{job_path(job_id)}/checkpoints/{step}/urls"
        body = BlobUrlsRequest(blake3=list(blake3))
        return self._read(BlobUrls, "blob_urls", "POST", path, body=body, lease_token=lease_token)

    def report_damaged(self, job_id: str, step: int, lease_token: str, *, epoch: int, message: str) -> None:
        """Report a damaged committed checkpoint, so that no attempt resumes from this checkpoint."""
        path = f"{job_path(job_id)}/checkpoints/{step}/damaged"
        body = DamagedRequest(epoch=epoch, message=message[:MAX_DAMAGE_MESSAGE])
        self._send("report_damaged", "POST", path, body=body, lease_token=lease_token)

    def declare_artifacts(
        self, job_id: str, lease_token: str, artifacts: Sequence[DeclaredArtifact]
    ) -> ArtifactsAnswer:
        """Declare outputs before their upload. Returns URLs for the missing outputs."""
        body = ArtifactsRequest(artifacts=list(artifacts))
        return self._read(
            ArtifactsAnswer,
            "declare_artifacts",
            "POST",
            f"{job_path(job_id)}/artifacts",
            body=body,
            lease_token=lease_token,
        )

    def complete(self, lease_token: str, request: CompleteRequest) -> TransitionAnswer:
        """Complete the job. Raises NotStoredYet or DigestMismatch for an artifact that differs from its declaration."""
        return self._read(TransitionAnswer, "complete", "POST", "/complete", body=request, lease_token=lease_token)

    def fail(self, lease_token: str, request: FailRequest) -> TransitionAnswer:
        """End the attempt as failed."""
        return self._read(TransitionAnswer, "fail", "POST", "/fail", body=request, lease_token=lease_token)

    def release(self, lease_token: str, request: ReleaseRequest) -> TransitionAnswer:
        """End the attempt, so that another worker can claim the job at once."""
        return self._read(TransitionAnswer, "release", "POST", "/release", body=request, lease_token=lease_token)

    def inputs_page(self, job_id: str, lease_token: str, *, cursor: str | None = None) -> InputPage:
        """Return one page of the job's inputs. A repeated call returns fresh URLs after an expiry."""
        path = f"{job_path(job_id)}/inputs"
        return self._read(InputPage, "inputs", "GET", path, query={"cursor": cursor}, lease_token=lease_token)

    def inputs(self, job_id: str, lease_token: str) -> Iterator[InputPage]:
        """Yield all pages of the job's inputs, each requested just before its use, so that the URLs are fresh."""
        cursor: str | None = None
        while True:
            page = self.inputs_page(job_id, lease_token, cursor=cursor)
            yield page
            cursor = page.next_cursor
            if cursor is None:
                return

    def send_logs(self, job_id: str, lease_token: str, chunk: LogChunk) -> None:
        """Store lines of output. Idempotent for an unchanged chunk."""
        self._read(StatusAnswer, "send_logs", "POST", f"{job_path(job_id)}/logs", body=chunk, lease_token=lease_token)

    def world(self, job_id: str, lease_token: str | None = None) -> WorldView:
        """Return the world of an elastic job. A node passes the id of its seat and the lease token of its attempt."""
        return self._read(WorldView, "world", "GET", f"{job_path(job_id)}/world", lease_token=lease_token)

    def join_world(self, job_id: str, lease_token: str, request: JoinRequest) -> WorldView:
        """Ask to become a member. Idempotent; raises Conflict (`world_mismatch`) for another program."""
        path = f"{job_path(job_id)}/world/join"
        return self._read(WorldView, "join_world", "POST", path, body=request, lease_token=lease_token)

    def propose_epoch(self, job_id: str, lease_token: str, proposal: EpochProposal) -> WorldView:
        """Replace the membership. Raises Conflict if the epoch has changed, or without a majority.

        A repeat after a lost answer is refused with `world_changed`; the world then shows the proposal's own epoch.
        """
        path = f"{job_path(job_id)}/world/epoch"
        return self._read(WorldView, "propose_epoch", "POST", path, body=proposal, lease_token=lease_token)

    def relay_world(self, job_id: str, lease_token: str, request: RelayRequest) -> RelayAnswer:
        """Return presigned URLs for a node's exchange with its peers, or the channels that peers have opened."""
        path = f"{job_path(job_id)}/world/relay"
        return self._read(RelayAnswer, "relay_world", "POST", path, body=request, lease_token=lease_token)

    def lease_shards(self, job_id: str, lease_token: str, request: DataRequest) -> DataGrant:
        """Return the shards that a node holds, with new ones. Idempotent; raises Conflict (`data_mismatch`)."""
        path = f"{job_path(job_id)}/world/data"
        return self._read(DataGrant, "lease_shards", "POST", path, body=request, lease_token=lease_token)

    def report_world(self, job_id: str, lease_token: str, report: WorldReport) -> WorldView:
        """Report committed rounds and the state of nodes."""
        path = f"{job_path(job_id)}/world/report"
        return self._read(WorldView, "report_world", "POST", path, body=report, lease_token=lease_token)
