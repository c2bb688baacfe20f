"""What a key may do, found out by asking for things that change nothing."""

from __future__ import annotations

from collections.abc import Callable

from baton.contract.errors import ErrorCode
from baton.contract.names import Scope
from baton.contract.rings import RecordsRequest
from baton.contract.work import WorkQuery
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import NotFound, Unauthorized


def scopes_of(client: BatonClient) -> frozenset[Scope]:
    """The scopes of the client's key. Raises Unauthorized if it has none, for it is unknown, revoked or expired."""
    asked: dict[Scope, Callable[[], object]] = {
        Scope.SUBMIT: lambda: client.jobs(limit=1),
        Scope.WORKER: lambda: client.peek(WorkQuery()),
        Scope.ADMIN: lambda: client.list_keys(limit=1),
    }
    found = frozenset(scope for scope, ask in asked.items() if _allowed(ask))
    # Who may do nothing of that may have a key for rings alone.
    return found or frozenset({Scope.RING} if _allowed(lambda: client.ring_records("any", RecordsRequest())) else ())


def _allowed(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except Unauthorized as error:
        if error.code != ErrorCode.WRONG_SCOPE:
            raise
        return False
    except NotFound as error:
        return not error.foreign  # there is no such thing, which only those learn who may ask
    return True
