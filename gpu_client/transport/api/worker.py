"""Calls of the scope `worker`: one attempt, from claim to its end. The lease token of the claim fences each write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from baton.contract.checkpoints import BlobUrls, BlobUrlsRequest, CommitAnswer, DamagedRequest
from baton.contract.manifest import Manifest, ManifestV1
from baton.contract.output import LogChunk
from baton.contract.work import (
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
from gpu_client.transport.api.calls import ApiCalls, job_path, segment

_LEASE_AWARE = {"x-lease-aware": "1"}
MAX_DAMAGE_MESSAGE = 512


class WorkerCalls(ApiCalls):
    """What workers do. All writes raise LeaseLost or LeaseExpired when the attempt may no longer write."""

    def claim(self, query: WorkQuery) -> WorkItem | None:
        """A job with its lease, or None if there is none for this worker.

        If an answer gets lost, the job it carried waits until its lease ends: that is an interruption, not a loss.
        Tried once: a second try would claim a second job, and whoever asks for work asks again anyway.
        """
        items = self._read(list[WorkItem], "claim", "GET", "/work", query=query, headers=_LEASE_AWARE, repeatable=False)
        return items[0] if items else None

    def peek(self, query: WorkQuery) -> list[dict[str, Any]]:
        """What a claim would hand out now, without claiming it: none or one job."""
        return self._read(list[dict[str, Any]], "peek", "GET", "/work/peek", query=query, headers=_LEASE_AWARE)

    def heartbeat(self, job_id: str, lease_token: str, request: HeartbeatRequest | None = None) -> HeartbeatAnswer:
        """Prolong the lease, report progress, receive the directive. `client.within(budget_s)` keeps it short."""
        path = f"/heartbeat/{segment(job_id)}"
        return self._read(
            HeartbeatAnswer, "heartbeat", "POST", path, body=request or HeartbeatRequest(), lease_token=lease_token
        )

    def commit(self, lease_token: str, manifest: Manifest | ManifestV1) -> CommitAnswer:
        """Commit a checkpoint, or learn which packs are missing. Posting the same manifest again is safe."""
        path = f"{job_path(manifest.job_id)}/checkpoints"
        return self._read(CommitAnswer, "commit", "POST", path, body=manifest, lease_token=lease_token)

    def blob_urls(self, job_id: str, step: int, blake3: Sequence[str], *, lease_token: str | None = None) -> BlobUrls:
        """Where to fetch up to 1,000 packs of a committed checkpoint."""
        path = f"{job_path(job_id)}/checkpoints/{step}/urls"
        body = BlobUrlsRequest(blake3=list(blake3))
        return self._read(BlobUrls, "blob_urls", "POST", path, body=body, lease_token=lease_token)

    def report_damaged(self, job_id: str, step: int, lease_token: str, *, epoch: int, message: str) -> None:
        """Say that a committed checkpoint's bytes do not verify: nobody is sent to it again."""
        path = f"{job_path(job_id)}/checkpoints/{step}/damaged"
        body = DamagedRequest(epoch=epoch, message=message[:MAX_DAMAGE_MESSAGE])
        self._send("report_damaged", "POST", path, body=body, lease_token=lease_token)

    def declare_artifacts(
        self, job_id: str, lease_token: str, artifacts: Sequence[DeclaredArtifact]
    ) -> ArtifactsAnswer:
        """Say which outputs will be uploaded; answers with URLs for those that are not stored."""
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
        """End the attempt: the job is done. NotStoredYet or DigestMismatch if an artifact is not as declared."""
        return self._read(TransitionAnswer, "complete", "POST", "/complete", body=request, lease_token=lease_token)

    def fail(self, lease_token: str, request: FailRequest) -> TransitionAnswer:
        """End the attempt: it failed."""
        return self._read(TransitionAnswer, "fail", "POST", "/fail", body=request, lease_token=lease_token)

    def release(self, lease_token: str, request: ReleaseRequest) -> TransitionAnswer:
        """End the attempt: hand the job to another worker now."""
        return self._read(TransitionAnswer, "release", "POST", "/release", body=request, lease_token=lease_token)

    def inputs_page(self, job_id: str, lease_token: str, *, cursor: str | None = None) -> InputPage:
        """One page of the job's inputs. Ask for the same cursor again when its URLs have run out."""
        path = f"{job_path(job_id)}/inputs"
        return self._read(InputPage, "inputs", "GET", path, query={"cursor": cursor}, lease_token=lease_token)

    def inputs(self, job_id: str, lease_token: str) -> Iterator[InputPage]:
        """All pages of the job's inputs, asked for one by one, so that their URLs are fresh."""
        cursor: str | None = None
        while True:
            page = self.inputs_page(job_id, lease_token, cursor=cursor)
            yield page
            cursor = page.next_cursor
            if cursor is None:
                return

    def send_logs(self, job_id: str, lease_token: str, chunk: LogChunk) -> None:
        """Store lines of output; the same chunk sent again changes nothing."""
        self._read(StatusAnswer, "send_logs", "POST", f"{job_path(job_id)}/logs", body=chunk, lease_token=lease_token)
