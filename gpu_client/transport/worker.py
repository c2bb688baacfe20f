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
from gpu_client.transport.calls import ApiCalls, read_answer, segment

_LEASE_AWARE = {"x-lease-aware": "1"}
MAX_DAMAGE_MESSAGE = 512


class WorkerCalls(ApiCalls):
    """What workers do. All writes raise LeaseLost or LeaseExpired when the attempt may no longer write."""

    def claim(self, query: WorkQuery) -> WorkItem | None:
        """A job with its lease, or None if there is none for this worker.

        If an answer gets lost, the job it carried waits until its lease ends: that is an interruption, not a loss.
        Tried once: a second try would claim a second job, and whoever asks for work asks again anyway.
        """
        answer = self._send("claim", "GET", "/work", query=query, headers=_LEASE_AWARE, repeatable=False)
        items = read_answer("claim", answer, list[WorkItem])
        return items[0] if items else None

    def peek(self, query: WorkQuery) -> list[dict[str, Any]]:
        """What a claim would hand out now, without claiming it: none or one job."""
        answer = self._send("peek", "GET", "/work/peek", query=query, headers=_LEASE_AWARE)
        return read_answer("peek", answer, list[dict[str, Any]])

    def heartbeat(self, job_id: str, lease_token: str, request: HeartbeatRequest | None = None) -> HeartbeatAnswer:
        """Prolong the lease, report progress, receive the directive. `client.within(budget_s)` keeps it short."""
        path = f"/heartbeat/{segment(job_id)}"
        answer = self._send("heartbeat", "POST", path, body=request or HeartbeatRequest(), lease_token=lease_token)
        return read_answer("heartbeat", answer, HeartbeatAnswer)

    def commit(self, lease_token: str, manifest: Manifest | ManifestV1) -> CommitAnswer:
        """Commit a checkpoint, or learn which packs are missing. Posting the same manifest again is safe."""
        path = f"{_job(manifest.job_id)}/checkpoints"
        return read_answer(
            "commit", self._send("commit", "POST", path, body=manifest, lease_token=lease_token), CommitAnswer
        )

    def blob_urls(self, job_id: str, step: int, blake3: Sequence[str], *, lease_token: str | None = None) -> BlobUrls:
        """Where to fetch up to 1,000 packs of a committed checkpoint."""
        path = f"{_job(job_id)}/checkpoints/{step}/urls"
        body = BlobUrlsRequest(blake3=list(blake3))
        return read_answer(
            "blob_urls", self._send("blob_urls", "POST", path, body=body, lease_token=lease_token), BlobUrls
        )

    def report_damaged(self, job_id: str, step: int, lease_token: str, *, epoch: int, message: str) -> None:
        """Say that a committed checkpoint's bytes do not verify: nobody is sent to it again."""
        path = f"{_job(job_id)}/checkpoints/{step}/damaged"
        body = DamagedRequest(epoch=epoch, message=message[:MAX_DAMAGE_MESSAGE])
        self._send("report_damaged", "POST", path, body=body, lease_token=lease_token)

    def declare_artifacts(
        self, job_id: str, lease_token: str, artifacts: Sequence[DeclaredArtifact]
    ) -> ArtifactsAnswer:
        """Say which outputs will be uploaded; answers with URLs for those that are not stored."""
        body = ArtifactsRequest(artifacts=list(artifacts))
        answer = self._send(
            "declare_artifacts", "POST", f"{_job(job_id)}/artifacts", body=body, lease_token=lease_token
        )
        return read_answer("declare_artifacts", answer, ArtifactsAnswer)

    def complete(self, lease_token: str, request: CompleteRequest) -> TransitionAnswer:
        """End the attempt: the job is done. NotStoredYet or DigestMismatch if an artifact is not as declared."""
        answer = self._send("complete", "POST", "/complete", body=request, lease_token=lease_token)
        return read_answer("complete", answer, TransitionAnswer)

    def fail(self, lease_token: str, request: FailRequest) -> TransitionAnswer:
        """End the attempt: it failed."""
        answer = self._send("fail", "POST", "/fail", body=request, lease_token=lease_token)
        return read_answer("fail", answer, TransitionAnswer)

    def release(self, lease_token: str, request: ReleaseRequest) -> TransitionAnswer:
        """End the attempt: hand the job to another worker now."""
        answer = self._send("release", "POST", "/release", body=request, lease_token=lease_token)
        return read_answer("release", answer, TransitionAnswer)

    def inputs_page(self, job_id: str, lease_token: str, *, cursor: str | None = None) -> InputPage:
        """One page of the job's inputs. Ask for the same cursor again when its URLs have run out."""
        path = f"{_job(job_id)}/inputs"
        answer = self._send("inputs", "GET", path, query={"cursor": cursor}, lease_token=lease_token)
        return read_answer("inputs", answer, InputPage)

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
        answer = self._send("send_logs", "POST", f"{_job(job_id)}/logs", body=chunk, lease_token=lease_token)
        read_answer("send_logs", answer, StatusAnswer)


def _job(job_id: str) -> str:
    return f"/job/{segment(job_id)}"
