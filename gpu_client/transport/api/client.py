"""The client of the control plane: one typed method per call of the API."""

from __future__ import annotations

from gpu_client.transport.api.admin import AdminCalls, RingCalls
from gpu_client.transport.api.http import HttpClient
from gpu_client.transport.api.objects import ObjectCalls
from gpu_client.transport.api.submitter import SubmitterCalls
from gpu_client.transport.api.worker import WorkerCalls
from gpu_client.transport.limits.stats import CallStats
from gpu_client.transport.retry import RetryPolicy
from gpu_client.transport.transfer.manager import Transfer


class BatonClient(SubmitterCalls, WorkerCalls, AdminCalls, RingCalls, ObjectCalls):
    """All calls; which of them the key may make depends on its scopes. Safe from several threads.

    Every method raises ApiError (by kind, see `errors`), Unreachable after all retries, UnexpectedAnswer.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        policy: RetryPolicy | None = None,
        transfer: Transfer | None = None,
        http: HttpClient | None = None,
    ) -> None:
        """`policy` bounds the tries of each call. `http`, given by tests, stands in for the other arguments."""
        transfer = transfer or Transfer()
        super().__init__(http or HttpClient(url, api_key, policy=policy, sent=transfer.count_upload), transfer)

    @property
    def stats(self) -> CallStats:
        """Control-plane requests by kind. Bytes moved are counted in `client.transfer.stats`."""
        return self._http.stats

    def within(self, budget_s: float) -> BatonClient:
        """The same client (connections and counts included), each call of which ends within `budget_s`."""
        limited = BatonClient(self._http.url, "", transfer=self.transfer, http=self._http)
        limited._budget_s = budget_s
        return limited

    def close(self) -> None:
        """Close idle connections."""
        self._http.close()
        self.transfer.close()

    def __enter__(self) -> BatonClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
