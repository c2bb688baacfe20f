"""Rings that lie with the control plane."""

from __future__ import annotations

from baton.contract.rings import (
    DeleteRequest,
    RecordsAnswer,
    RecordsRequest,
    RemovalAnswer,
    RingKeysPage,
    RingKeysQuery,
    RingsPage,
    UrlsAnswer,
    UrlsRequest,
)
from gpu_client.transport.calls import ApiCalls, read_answer, segment


class RingCalls(ApiCalls):
    """Their records, and URLs of their objects. Each call may be repeated: the same write has the same version."""

    def ring_records(self, ring: str, request: RecordsRequest) -> RecordsAnswer:
        """Write one record and read some."""
        answer = self._send("ring_records", "POST", f"{_ring(ring)}/records", body=request)
        return read_answer("ring_records", answer, RecordsAnswer)

    def ring_urls(self, ring: str, request: UrlsRequest) -> UrlsAnswer:
        """Where to store and to fetch objects."""
        return read_answer(
            "ring_urls", self._send("ring_urls", "POST", f"{_ring(ring)}/urls", body=request), UrlsAnswer
        )

    def ring_keys(self, ring: str, query: RingKeysQuery) -> RingKeysPage:
        """One page of the keys below a prefix."""
        return read_answer(
            "ring_keys", self._send("ring_keys", "GET", f"{_ring(ring)}/keys", query=query), RingKeysPage
        )

    def ring_delete(self, ring: str, request: DeleteRequest) -> None:
        """Forget records and objects."""
        self._send("ring_delete", "POST", f"{_ring(ring)}/delete", body=request)

    def rings(self, *, limit: int = 100, cursor: str | None = None) -> RingsPage:
        """One page of the tenant's rings, by name."""
        answer = self._send("rings", "GET", "/rings", query={"limit": limit, "cursor": cursor})
        return read_answer("rings", answer, RingsPage)

    def remove_ring(self, ring: str) -> RemovalAnswer:
        """Remove a part of it; to be called until it is done. NotFound if there is no such ring."""
        return read_answer("remove_ring", self._send("remove_ring", "DELETE", _ring(ring)), RemovalAnswer)


def _ring(name: str) -> str:
    return f"/rings/{segment(name)}"
