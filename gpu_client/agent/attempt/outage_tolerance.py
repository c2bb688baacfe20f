"""Call the control plane for one attempt: only on a proven lease, and repeatedly during an outage.

The methods have the client's names (see `InputsApi`, `RestoreApi`, `ArtifactsApi`), therefore a phase that takes a
client survives an outage without code of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from baton.contract.checkpoints.calls import BlobUrls
from baton.contract.worker.calls import ArtifactsAnswer, DeclaredArtifact, InputPage
from gpu_client.agent.attempt.lease import LeaseKeeper
from gpu_client.agent.polled_event import PolledEvent
from gpu_client.agent.retry_pauses import backoff_s, may_pass
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import ApiError, LeaseExpired, TransferCanceled, UnexpectedAnswer, Unreachable

logger = logging.getLogger("baton.job")

T = TypeVar("T")

CALL_BUDGET_S = 35.0
"""Seconds for one call with the client's own retries; afterwards the lease is checked again."""

HURRIED_BUDGET_S = 2.0
"""Seconds for the last call after the attempt's time has run out."""

RETRY_S = 2.0
MAX_UNEXPECTED = 5
"""Unknown answers after which a call fails."""

MAX_FOREIGN = 20
"""Refusals by a proxy or gateway after which a call fails: eight minutes, enough for a deployment."""


class LeasedCalls:
    """Control-plane calls of one attempt, repeated until the control plane answers.

    All methods raise ApiError (refused), UnexpectedAnswer, and TransferCanceled once the lease is lost or `given_up`
    returns True. While the lease holds, each call is tried at least once.
    """

    def __init__(
        self,
        client: BatonClient,
        keeper: LeaseKeeper,
        *,
        given_up: Callable[[], bool],
        retry_s: float = RETRY_S,
    ) -> None:
        self._client = client.within(CALL_BUDGET_S)
        self._hurried = client.within(HURRIED_BUDGET_S)
        self._keeper = keeper
        self._given_up = given_up
        self._retry_s = retry_s

    def call_with_retry(self, call_name: str, call: Callable[[BatonClient], T]) -> T:
        """Return the result of `call`, repeated while the control plane or the store is away."""
        unexpected = foreign = rounds = 0
        while True:
            if self._keeper.lost is not None:
                raise TransferCanceled("the lease is lost")
            try:
                if self._keeper.prove():
                    return call(self._hurried if self._given_up() else self._client)
                trouble = "the control plane does not confirm the lease"
            except LeaseExpired as error:
                # The proof was older than the agent assumed, or the control plane's clock jumped, therefore the agent
                # proves the lease before the next try.
                self._keeper.beat()
                trouble = str(error)
            except Unreachable as error:
                trouble = str(error)
            except UnexpectedAnswer as error:
                unexpected += 1
                if unexpected >= MAX_UNEXPECTED:
                    raise
                trouble = str(error)
            except ApiError as error:
                foreign += 1
                if not may_pass(error) or foreign >= MAX_FOREIGN:
                    raise
                trouble = str(error)
            if self._given_up():
                raise TransferCanceled(f"{call_name}: no time left ({trouble})")
            logger.warning("%s: %s; trying again", call_name, trouble)
            over = PolledEvent(lambda: self._keeper.lost is not None or self._given_up())
            over.wait(backoff_s(self._retry_s, rounds))
            rounds += 1

    def inputs_page(self, job_id: str, lease_token: str, *, cursor: str | None = None) -> InputPage:
        """See WorkerCalls."""
        return self.call_with_retry("inputs", lambda client: client.inputs_page(job_id, lease_token, cursor=cursor))

    def blob_urls(self, job_id: str, step: int, blake3: Sequence[str], *, lease_token: str | None = None) -> BlobUrls:
        """See WorkerCalls."""
        return self.call_with_retry(
            "blob_urls", lambda client: client.blob_urls(job_id, step, blake3, lease_token=lease_token)
        )

    def report_damaged(self, job_id: str, step: int, lease_token: str, *, epoch: int, message: str) -> None:
        """See WorkerCalls."""
        self.call_with_retry(
            "report_damaged",
            lambda client: client.report_damaged(job_id, step, lease_token, epoch=epoch, message=message),
        )

    def declare_artifacts(
        self, job_id: str, lease_token: str, artifacts: Sequence[DeclaredArtifact]
    ) -> ArtifactsAnswer:
        """See WorkerCalls."""
        return self.call_with_retry(
            "declare_artifacts", lambda client: client.declare_artifacts(job_id, lease_token, artifacts)
        )
