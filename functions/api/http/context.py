"""The arguments of every route: the context with the stores, and one authenticated request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baton.contract.errors import ErrorCode
from baton.contract.names import Scope
from functions.domain.access.api_keys import token_digest
from functions.domain.checkpoints.object_keys import attempt_of
from functions.domain.errors import Refusal
from functions.domain.jobs.job_selection import ClaimWindow
from functions.domain.jobs.lease_fence import Fence
from functions.domain.ports import (
    Clock,
    DeliveryQueue,
    JobStore,
    LeaseStore,
    ObjectStore,
    PackStore,
    Randomness,
    RecipeStore,
    RingStore,
    SharedStore,
    TokenStore,
    WebhookStore,
)
from functions.domain.records import Job
from functions.settings import ControlPlaneSettings

if TYPE_CHECKING:
    # Only the function `machines` loads the records of fleets.
    from functions.fleet.accounts import CachedAccounts
    from functions.fleet.drivers.protocol import Driver
    from functions.fleet.store import FleetStore


@dataclass(frozen=True, kw_only=True)
class Context:
    """Stores, clock, randomness and settings of the control plane."""

    jobs: JobStore
    leases: LeaseStore
    packs: PackStore
    shared: SharedStore
    tokens: TokenStore
    objects: ObjectStore
    webhooks: WebhookStore
    recipes: RecipeStore
    delivery_queue: DeliveryQueue
    clock: Clock
    random: Randomness
    settings: ControlPlaneSettings = field(default_factory=ControlPlaneSettings)
    window: ClaimWindow = field(default_factory=ClaimWindow)
    rings: RingStore | None = None
    """Only the function that serves rings has this store; the other functions do not load its module."""
    fleet: FleetStore | None = None
    """Only the function that serves fleets has this store."""
    accounts: CachedAccounts | None = None
    """The accounts at providers; None also for a deployment whose settings name no place for them."""
    drivers: Mapping[str, Driver] = field(default_factory=dict)
    """The drivers of all providers that the deployment can rent from; empty in functions that do not serve fleets."""


@dataclass(frozen=True)
class Principal:
    """Caller as identified by the authorizer."""

    tenant: str
    key_id: str
    scopes: frozenset[Scope]
    rings: frozenset[str] | None = None
    """The only rings that the caller may use; None: every ring of the tenant."""
    machine: str | None = None
    """The rented machine to which the caller's key belongs, as `<fleet>/<token>`; None for the keys of users."""
    queues: Sequence[str] | None = None
    """The only queues from which the caller may claim; None: every queue of the tenant."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tags of the only jobs that the caller may claim."""


def is_original(scopes: frozenset[str], headers: Mapping[str, str]) -> bool:
    """Return True for a client of the original orchestrator: its key has both scopes, and no header is Baton's.

    The original has one key for submitters and workers; Baton's users need no key with exactly both scopes.
    """
    ours = "x-lease-aware" in headers or "x-lease-token" in headers or headers.get("user-agent", "").startswith("baton")
    return scopes == {Scope.SUBMIT, Scope.WORKER} and not ours


@dataclass(frozen=True, kw_only=True)
class ApiCall:
    """Validated request; `body` and `query` are instances of the route's models."""

    principal: Principal
    path: Mapping[str, str]
    query: Any
    body: Any
    headers: Mapping[str, str]
    cookies: Mapping[str, str] = field(default_factory=dict)
    request_id: str
    now: int
    source_address: str

    @property
    def tenant(self) -> str:
        """Return the tenant whose records this call may read and write."""
        return self.principal.tenant

    @property
    def original(self) -> bool:
        """Return True for a client of the original orchestrator, which receives the original's shapes."""
        return is_original(self.principal.scopes, self.headers)

    @property
    def lease_aware(self) -> bool:
        """Return True for clients that prove leases by a token; the original's clients do not."""
        value = self.headers.get("x-lease-aware")
        if value not in (None, "1"):
            raise Refusal(ErrorCode.INVALID_VALUE, "The header x-lease-aware is 1 or absent.", field="x-lease-aware")
        return value is not None

    @property
    def origin(self) -> str:
        """Return the origin of the API, as the caller addressed it."""
        return f"{self.headers.get('x-forwarded-proto', 'https')}://{self.headers.get('host', '')}"

    @property
    def accepts_gzip(self) -> bool:
        """Return True if the caller reads answers that are compressed with gzip."""
        codings = self.headers.get("accept-encoding", "").split(",")
        return any(coding.partition(";")[0].strip() == "gzip" for coding in codings)

    def fence(
        self, job_id: str, machine_id: str | None = None, *, key: str | None = None, heartbeat: bool = False
    ) -> Fence:
        """Return the proof of this call's right to write to a job.

        `key`: the object that an original client names; the key begins with the prefix of the client's attempt.
        """
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
    """Answer without a body (204)."""


@dataclass(frozen=True)
class NotModified:
    """Answer without a body (304): the caller has the newest answer, whose `ETag` is `etag`."""

    etag: str


@dataclass(frozen=True)
class WithHeaders:
    """Answer with additional headers."""

    value: Any
    headers: Mapping[str, str]
    cookies: Sequence[str] = ()
    """Values of `Set-Cookie`."""


def require_job(context: Context, call: ApiCall, job_id: str) -> Job:
    """Return the tenant's job; refuse unknown jobs and other tenants' jobs alike.

    Only the bearer of its lease sees a seat; users see the elastic job.
    """
    job = context.jobs.get(job_id)
    if job is None or job.tenant != call.tenant:
        raise Refusal(ErrorCode.JOB_NOT_FOUND, f"No job {job_id}.", field="id")
    bears = "x-lease-token" in call.headers and Scope.WORKER in call.principal.scopes
    if job.spec.seat is not None and not bears:
        detail = f"{job_id} is node {job.spec.seat.seat} of job {job.spec.seat.job}."
        raise Refusal(ErrorCode.JOB_NOT_FOUND, detail, field="id", remedy=f"Call with the id {job.spec.seat.job}.")
    return job
