"""Define the ports of the API: stores, clock and randomness. `storage` implements the stores, tests have twins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from baton.contract.fleets.events import PublishedFleetEvent
from baton.contract.jobs.events import JobEvent
from baton.contract.jobs.job import JobState, Progress
from functions.domain.access.api_keys import ApiKey
from functions.domain.checkpoints.packs import PackSnapshot, PackWrite
from functions.domain.checkpoints.shared_outputs import SharedRecord
from functions.domain.jobs.lease_expiry import ReclaimWatermark
from functions.domain.jobs.lease_fence import Fence
from functions.domain.jobs.transaction import Put, Transaction
from functions.domain.record_base import TableRecord
from functions.domain.records import (
    CheckpointRecord,
    CommandRecord,
    Job,
    Lease,
    MemberRecord,
    PackRecord,
    RecipeEntry,
    ScalingRecord,
    StoredRecipe,
    TransferGrant,
)
from functions.domain.webhooks import Delivery, Webhook

if TYPE_CHECKING:
    # Only the function `rings` loads the records of rings.
    from functions.domain.access.rings import RingRecord, StoredRing

T = TypeVar("T")
R = TypeVar("R", bound=TableRecord)

MAX_MEMBERS = 1000
"""Maximum number of jobs of a group whose values rules compare."""


@dataclass(frozen=True)
class ResultPage(Generic[T]):
    """Page of a list; `cursor` is None at the end. Cursors are opaque and bound to their list."""

    items: Sequence[T]
    cursor: str | None = None


class JobStore(Protocol):
    """Jobs with their attempts, events and checkpoints. Reads by id are strongly consistent; index reads are hints.

    Every call of every store may raise StorageUnavailable. A cursor that is damaged or of another list raises
    Refusal(INVALID_CURSOR); a value too large for an item raises Refusal(PAYLOAD_TOO_LARGE).
    """

    def get(self, job_id: str) -> Job | None: ...

    def get_many(self, job_ids: Sequence[str]) -> list[Job]:
        """Return the existing jobs in the requested order, each once."""

    def apply(self, transaction: Transaction) -> None:
        """Apply all writes of the transaction or none.

        Raises WriteConflict if a stored record does not satisfy the condition of its write (above all the job's `rev`),
        FenceBroken if the lease does not satisfy the guard of its write.
        """

    def ready(self, tenant: str, queue: str, shard: int, *, limit: int, cursor: str | None = None) -> ResultPage[Job]:
        """Return claimable jobs of the index in rank order; the index may be out of date."""

    def longest_waiting(self, *, limit: int) -> int | None:
        """Return the instant since which the longest waiting job can be claimed, of up to `limit` jobs of all queues.

        None if no job waits. The index may be out of date. Raises ValueError or KeyError for a damaged item.
        """

    def list_jobs(
        self,
        tenant: str,
        *,
        state: JobState | None,
        limit: int,
        cursor: str | None = None,
        newest_first: bool = False,
        consistent: bool = True,
    ) -> ResultPage[Job]:
        """Return a tenant's jobs, oldest first by default; `consistent` False permits jobs that are moments old."""

    def count_jobs(self, tenant: str, state: JobState, *, up_to: int) -> int:
        """Count a tenant's jobs in a state, at most `up_to` of them; the index may be out of date."""

    def due_timers(self, now: int, *, limit: int) -> list[str]:
        """Return the ids of jobs with a timer at or before `now`."""

    def due_retentions(self, now: int, *, limit: int) -> list[str]:
        """Return the ids of ended jobs whose `retention_at` is at or before `now`, the longest due first."""

    def unsettled(self, *, limit: int) -> list[str]:
        """Return the ids of elastic jobs that have not ended or whose seats have not ended, the oldest first."""

    def due_rules(self, now: int, *, limit: int) -> list[str]:
        """Return the ids of jobs whose rules are due, the longest due first."""

    def read(self, kind: type[R], job_id: str, number: int = 0) -> R | None:
        """Return the job's record of one kind and number."""

    def history(
        self, kind: type[R], job_id: str, *, limit: int, cursor: str | None = None, up_to: int | None = None
    ) -> ResultPage[R]:
        """Return a page of the job's records of one kind, in the kind's order. `up_to`: the highest number."""

    def commands(self, job_id: str, *, after: int = 0) -> list[CommandRecord]:
        """Return the stored commands of a job after seq `after`, oldest first."""

    def scaling(self, tenant: str, group: str) -> ScalingRecord | None:
        """Return the scaling record of a group."""

    def put(self, write: Put) -> None:
        """Store one record. Raises WriteConflict if the stored record does not satisfy the condition."""

    def members(self, tenant: str, group: str) -> dict[str, MemberRecord]:
        """Return the member records of the first MAX_MEMBERS jobs of a group, by job id."""

    def join(self, tenant: str, group: str, job_id: str, member: MemberRecord) -> None:
        """Store the member record of one job of a group."""

    def protect_checkpoint(self, job_id: str, step: int, until: int) -> CheckpointRecord | None:
        """Protect a checkpoint from retention until `until`; None if the checkpoint does not exist."""


class PackStore(Protocol):
    """References of jobs to packs. Each write changes a single item."""

    def get_many(self, tenant: str, digests: Iterable[str], *, consistent: bool = True) -> dict[str, PackRecord]:
        """Return the items of packs by digest; `consistent` False permits an eventually consistent read."""

    def add_references(self, tenant: str, job_id: str, sightings: Sequence[PackSnapshot]) -> bool:
        """Add references of the job to packs that are stored as declared, one write each, and clear suspicion.

        False if a write was refused (`packs.may_reference`): the caller reads again. The other references stay.
        """

    def mark_suspect(self, tenant: str, job_id: str, digests: Iterable[str]) -> None:
        """Mark packs that the job references, so that the next commit verifies the objects; skip other packs."""

    def remove_references(self, tenant: str, job_id: str, writes: Sequence[PackWrite]) -> set[str]:
        """Condemn and release packs, one write each. Return the refused digests (`packs.may_release`)."""


class SharedStore(Protocol):
    """Outputs of complete jobs for later jobs."""

    def get_many(self, tenant: str, shared_keys: Sequence[str]) -> dict[str, SharedRecord]:
        """Return the existing records by key."""

    def replace(self, record: SharedRecord, *, seen: SharedRecord | None) -> bool:
        """Replace `seen` with one write. False, and nothing written, if another record is stored."""


class LeaseStore(Protocol):
    """Leases of attempts."""

    def heartbeat(self, fence: Fence, progress: Progress | None, phase: str | None) -> Lease:
        """Renew the lease with one conditional write. None keeps the stored `progress` or `phase`.

        Raises FenceBroken with the stored lease.
        """

    def get(self, job_id: str) -> Lease | None: ...

    def get_many(self, job_ids: Sequence[str], *, consistent: bool = False) -> dict[str, Lease]:
        """Return existing leases, by default eventually consistent: the caller reads a lease again before acting."""

    def due_pages(self, now: int, *, size: int) -> Iterator[list[str]]:
        """Yield non-empty pages of up to `size` ids of jobs whose open lease may have expired by `now`.

        The pages are a superset, therefore the caller checks each lease. The store reads a page on demand.
        """

    def reclaim_watermark(self) -> ReclaimWatermark | None:
        """Return the reclaim watermark; None before the first sweep."""

    def save_reclaim_watermark(self, watch: ReclaimWatermark, *, seen: ReclaimWatermark | None) -> bool:
        """Replace `seen` by a newer watermark; False if another sweep has written."""


class TokenStore(Protocol):
    """API keys and transfer tokens."""

    def put_key(self, key: ApiKey) -> None:
        """Store a new key. Raises WriteConflict if the id is taken."""

    def get_key(self, key_id: str) -> ApiKey | None: ...

    def list_keys(self, tenant: str, *, limit: int, cursor: str | None = None) -> ResultPage[ApiKey]: ...

    def replace_key(self, key: ApiKey) -> None:
        """Overwrite a key. Raises WriteConflict for a missing key, or if the write would undo a revocation."""

    def put_grant(self, grant: TransferGrant) -> None: ...

    def get_grant(self, token_sha256: str) -> TransferGrant | None: ...

    def redeem(self, token_sha256: str, now: int) -> TransferGrant | None:
        """Return and delete a live download grant: exactly one caller receives the grant."""


class WebhookStore(Protocol):
    """Webhooks and the states of their deliveries."""

    def put(self, webhook: Webhook) -> None: ...

    def get(self, tenant: str, webhook_id: str) -> Webhook | None: ...

    def of_tenant(self, tenant: str) -> list[Webhook]:
        """Return all webhooks of a tenant, by id."""

    def delete(self, tenant: str, webhook_id: str) -> bool:
        """Delete a webhook; False for a missing webhook. Its delivery records expire."""

    def record(self, delivery: Delivery) -> None:
        """Store the state of a delivery in place of the state before."""

    def deliveries(self, webhook_id: str, *, limit: int, cursor: str | None = None) -> ResultPage[Delivery]:
        """Return deliveries of about the last 30 days, newest event first."""


class DeliveryQueue(Protocol):
    """Queue of deliveries, in order for each webhook and job or fleet."""

    def put(self, webhook: Webhook, event: JobEvent | PublishedFleetEvent, *, repetition: str = "") -> None:
        """Enqueue an event. A duplicate within minutes is ignored unless `repetition` differs.

        Raises StorageUnavailable.
        """


class RingStore(Protocol):
    """Rings and their records. Reads are strongly consistent. Every call may raise StorageUnavailable."""

    def make(self, ring: StoredRing) -> bool:
        """Store a new ring; False if the tenant has another ring of this name. Idempotent for the same id."""

    def get(self, tenant: str, name: str) -> StoredRing | None: ...

    def list(self, tenant: str, *, limit: int, cursor: str | None = None) -> ResultPage[StoredRing]:
        """Return a tenant's rings, by name."""

    def begin_removal(self, ring: StoredRing) -> bool:
        """Mark an existing ring as being removed; further calls for the ring are refused."""

    def forget(self, ring: StoredRing) -> None:
        """Delete a marked ring after its records; a newer ring of the same name stays."""

    def write(self, ring: StoredRing, key: str, data: bytes, *, version: str, seen: str | None) -> bool:
        """Write a record if its version is `seen` (None: no record); False otherwise.

        True also if the record has `version` already, so that a repeated write is idempotent.
        """

    def read(self, ring: StoredRing, keys: Sequence[str]) -> dict[str, RingRecord]:
        """Return the existing records."""

    def keys(self, ring: StoredRing, prefix: str, *, limit: int, cursor: str | None = None) -> ResultPage[str]:
        """Return the keys of records with a prefix, in order."""

    def delete(self, ring: StoredRing, keys: Sequence[str]) -> None:
        """Delete records; missing records are ignored."""


class RecipeStore(Protocol):
    """Recipes of tenants, each immutable."""

    def add(self, recipe: StoredRecipe) -> bool:
        """Store a recipe; False, and nothing written, if the tenant has this name and version."""

    def get(self, tenant: str, name: str, version: int) -> StoredRecipe | None: ...

    def list(self, tenant: str, *, limit: int, cursor: str | None = None) -> ResultPage[RecipeEntry]:
        """Return a tenant's recipes, in order of name and version."""


@dataclass(frozen=True)
class StoredObject:
    """Metadata of one object."""

    key: str
    size_bytes: int
    etag: str
    modified_at: int
    crc64nvme: str | None = None


@dataclass(frozen=True)
class StoredPart:
    """Part of an incomplete upload. `crc64nvme`: None for a part that was uploaded without a checksum."""

    number: int
    size_bytes: int
    etag: str
    crc64nvme: str | None = None


@dataclass(frozen=True)
class Presigned:
    """Presigned URL for one request; the headers are part of the signature."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


class ObjectStore(Protocol):
    """Objects of a tenant in the buckets: keys are without the tenant's prefix.

    `bucket` is the API's name, `training-data` or `training-checkpoints`.
    """

    def head(self, tenant: str, bucket: str, key: str) -> StoredObject | None: ...

    def head_many(self, tenant: str, bucket: str, keys: Iterable[str]) -> dict[str, StoredObject]:
        """Return the existing objects by key, read in parallel."""

    def list(
        self, tenant: str, bucket: str, prefix: str, *, limit: int, cursor: str | None = None, after: str | None = None
    ) -> ResultPage[StoredObject]: ...

    def read(self, tenant: str, bucket: str, key: str) -> bytes | None:
        """Return the bytes of a small object."""

    def read_many(self, tenant: str, bucket: str, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the bytes of the existing small objects by key, read in parallel."""

    def create(self, tenant: str, bucket: str, key: str, data: bytes) -> bool:
        """Store a small object; False, and nothing written, if the key exists."""

    def delete_many(self, tenant: str, bucket: str, keys: Sequence[str]) -> None: ...

    def presign_get(
        self, tenant: str, bucket: str, key: str, *, expires_s: int, content_type: str | None = None
    ) -> str:
        """Sign a GET. `content_type` replaces the stored content type in the answer."""

    def presign_put(
        self,
        tenant: str,
        bucket: str,
        key: str,
        *,
        expires_s: int,
        size_bytes: int | None = None,
        crc64nvme: str | None = None,
        create_only: bool = False,
        replace_etag: str | None = None,
        expiring: bool = False,
    ) -> Presigned:
        """Sign a PUT. `expiring`: the object has the tag by which the bucket's lifecycle may delete the object."""

    def create_multipart(self, tenant: str, bucket: str, key: str, *, checksummed: bool = False) -> str:
        """Begin an upload and return its id. `checksummed`: every part and the object have a CRC-64/NVME."""

    def put_part(self, tenant: str, bucket: str, key: str, upload_id: str, number: int, *, data: bytes) -> str | None:
        """Store one small part and return its ETag; None if the upload does not exist."""

    def presign_part(
        self,
        tenant: str,
        bucket: str,
        key: str,
        upload_id: str,
        part_number: int,
        *,
        expires_s: int,
        size_bytes: int | None = None,
        crc64nvme: str | None = None,
    ) -> Presigned: ...

    def multiparts(self, tenant: str, bucket: str, key: str) -> Sequence[str]:
        """Return the ids of the incomplete uploads of exactly this key, newest first."""

    def stored_parts(self, tenant: str, bucket: str, key: str, upload_id: str) -> Sequence[StoredPart] | None:
        """Return the stored parts of an upload by number; None if the upload does not exist."""

    def complete_multipart(
        self, tenant: str, bucket: str, key: str, upload_id: str, parts: Sequence[tuple[int, str]]
    ) -> str | None:
        """Complete an upload and return the ETag; None if the upload does not exist. No parts: the stored parts."""

    def complete_checksummed(
        self,
        tenant: str,
        bucket: str,
        key: str,
        upload_id: str,
        parts: Sequence[StoredPart],
        *,
        crc64nvme: str,
        create_only: bool = False,
        replace_etag: str | None = None,
    ) -> str | None:
        """Complete an upload whose checksum the store verifies, and return the ETag.

        None if the upload or a part does not exist any more, or if a write of the key broke the condition. Raises
        Refusal (`digest_mismatch`) if the parts have another checksum.
        """

    def abort_multipart(self, tenant: str, bucket: str, key: str, upload_id: str) -> bool: ...

    def delete(self, tenant: str, bucket: str, key: str) -> None: ...


class Clock(Protocol):
    """The server's clock: whole seconds since 1970."""

    def now(self) -> int: ...


class Randomness(Protocol):
    """Source of random values."""

    def token(self) -> str:
        """Return a new secret of 256 bits, URL-safe."""

    def job_id(self) -> str: ...

    def key_id(self) -> str: ...

    def below(self, bound: int) -> int:
        """Return a number from 0 to bound - 1."""
