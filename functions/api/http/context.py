"""What every route is handed: the stores, and one request with who sent it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baton.contract.errors import ErrorCode
from baton.contract.names import Scope
from functions.api.http.settings import Settings
from functions.domain.access.api_keys import token_digest
from functions.domain.checkpoints.object_keys import attempt_of
from functions.domain.errors import Refusal
from functions.domain.jobs.job_selection import ClaimWindow
from functions.domain.jobs.leases import Fence
from functions.domain.ports import (
    Clock,
    DeliveryQueue,
    JobStore,
    LeaseStore,
    ObjectStore,
    PackStore,
    Randomness,
    RecipeStore,
    SharedStore,
    TokenStore,
    WebhookStore,
)
from functions.domain.records import Job

if TYPE_CHECKING:
    from functions.domain.ports import RingStore


@dataclass(frozen=True, kw_only=True)
class Context:
    """Everything outside the request."""

    jobs: JobStore
    leases: LeaseStore
    packs: PackStore
    shared: SharedStore
    tokens: TokenStore
    objects: ObjectStore
    webhooks: WebhookStore
    recipes: RecipeStore
    line: DeliveryQueue
    clock: Clock
    random: Randomness
    settings: Settings = field(default_factory=Settings)
    window: ClaimWindow = field(default_factory=ClaimWindow)
    rings: RingStore | None = None
    """Of the function that serves rings; the others load nothing for it."""


@dataclass(frozen=True)
class Principal:
    """Who is asking, as the authorizer found out."""

    tenant: str
    key_id: str
    scopes: frozenset[Scope]
    rings: frozenset[str] | None = None
    """The only rings that this one may use; None: no limit of this kind."""


def is_original(scopes: frozenset[str], headers: Mapping[str, str]) -> bool:
    """Return True for a client of the original orchestrator, by the key and the absence of Baton's headers.

    The original knows one key, for submitting as well as for working; Baton's users have no need of such a key.
    """
    ours = "x-lease-aware" in headers or "x-lease-token" in headers or headers.get("user-agent", "").startswith("baton")
    return scopes == {Scope.SUBMIT, Scope.WORKER} and not ours


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request after validation. `body` and `query` are instances of the route's models."""

    principal: Principal
    path: Mapping[str, str]
    query: Any
    body: Any
    headers: Mapping[str, str]
    request_id: str
    now: int
    source_address: str

    @property
    def tenant(self) -> str:
        """The tenant whose things this call may see."""
        return self.principal.tenant

    @property
    def original(self) -> bool:
        """True for a client of the original orchestrator, which gets its shapes."""
        return is_original(self.principal.scopes, self.headers)

    @property
    def lease_aware(self) -> bool:
        """True for clients that hold leases; the original orchestrator's do not."""
        said = self.headers.get("x-lease-aware")
        if said not in (None, "1"):
            raise Refusal(ErrorCode.INVALID_VALUE, "The header x-lease-aware is 1 or absent.", field="x-lease-aware")
        return said is not None

    def fence(
        self, job_id: str, machine_id: str | None = None, *, key: str | None = None, heartbeat: bool = False
    ) -> Fence:
        """What this call proves about its right to write to a job. `key`: of the object that an original client names,
        which begins with the prefix of its attempt."""
        token = self.headers.get("x-lease-token")
        return Fence(
            job_id=job_id,
            tenant=self.tenant,
            now=self.now,
            epoch=None if token else attempt_of(job_id, key),
            token_sha256=token_digest(token) if token else None,
            machine_id=machine_id or None,
            key_id=self.principal.key_id,
            source_address=self.source_address,
            heartbeat=heartbeat,
        )


class NoContent:
    """An answer without a body (204)."""


@dataclass(frozen=True)
class WithHeaders:
    """An answer that says something in headers too."""

    value: Any
    headers: Mapping[str, str]


def job_of(context: Context, call: Call, job_id: str) -> Job:
    """The tenant's job; unknown and other tenants' jobs look alike."""
    job = context.jobs.get(job_id)
    if job is None or job.tenant != call.tenant:
        raise Refusal(ErrorCode.JOB_NOT_FOUND, f"No job {job_id}.", field="id")
    return job
