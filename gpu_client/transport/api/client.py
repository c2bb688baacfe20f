"""Provide the client of the control plane, with one typed method per call of the API."""

from __future__ import annotations

from gpu_client.transport.api.admin import AdminCalls, RingCalls
from gpu_client.transport.api.fleet import FleetCalls, MachineCalls
from gpu_client.transport.api.http import HttpClient
from gpu_client.transport.api.objects import ObjectCalls
from gpu_client.transport.api.providers import ProviderCalls
from gpu_client.transport.api.submitter import SubmitterCalls
from gpu_client.transport.api.worker import WorkerCalls
from gpu_client.transport.limits.stats import CallStats
from gpu_client.transport.retry import RetryPolicy
from gpu_client.transport.transfer.manager import Transfer


class BatonClient(
    SubmitterCalls, WorkerCalls, AdminCalls, RingCalls, FleetCalls, ProviderCalls, MachineCalls, ObjectCalls
):
    """Client with all calls of the API; the scopes of the API key decide which calls succeed. Thread-safe.

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
        """`policy`: limits of each call's tries. `http` replaces all other arguments (for tests)."""
        transfer = transfer or Transfer()
        super().__init__(http or HttpClient(url, api_key, policy=policy, sent=transfer.count_upload), transfer)

    @property
    def stats(self) -> CallStats:
        """Return the counters of control-plane requests by kind. `client.transfer.stats` counts transferred bytes."""
        return self._http.stats

    def within(self, budget_s: float) -> BatonClient:
        """Return a client with shared connections and counters whose calls each end within `budget_s` seconds."""
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
