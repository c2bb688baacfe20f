"""What the rules need from the outside: stores, a clock, randomness. Storage implements them; tests have twins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from baton.contract.events import JobEvent
from baton.contract.jobs import JobState, Progress
from functions.domain.access.api_keys import ApiKey
from functions.domain.access.webhooks import Delivery, Webhook
from functions.domain.checkpoints.packs import PackSnapshot, PackWrite
from functions.domain.checkpoints.shared_outputs import SharedRecord
from functions.domain.jobs.lease_expiry import ReclaimWatermark
from functions.domain.jobs.leases import Fence
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

if TYPE_CHECKING:
    # Only the function that serves rings loads their records.
    from functions.domain.access.rings import RingRecord, StoredRing

T = TypeVar("T")
R = TypeVar("R", bound=TableRecord)

MAX_MEMBERS = 1000
"""Of a group whose values are compared."""


@dataclass(frozen=True)
class ResultPage(Generic[T]):
    """Some items, and where to go on; `cursor` is None at the end. Cursors are opaque and bound to their list."""

    items: Sequence[T]
    cursor: str | None = None


class JobStore(Protocol):
    """Jobs with their attempts, events and checkpoints. Reads by id are strongly consistent; index reads are hints.

    Every call of every store may raise StorageUnavailable. A cursor that is damaged or of another list raises
    Refusal(INVALID_CURSOR); a value too large for an item raises Refusal(PAYLOAD_TOO_LARGE).
    """

    def get(self, job_id: str) -> Job | None: ...

    def get_many(self, job_ids: Sequence[str]) -> list[Job]:
        """Those that exist, in the order asked for, each once."""

    def apply(self, transaction: Transaction) -> None:
        """Do all writes of the transaction or none.

        Raises WriteConflict if a record is not the one that its write requires (above all the job's `rev`),
        FenceBroken if the lease does not satisfy the guard of its write.
        """

    def ready(self, tenant: str, queue: str, shard: int, *, limit: int, cursor: str | None = None) -> ResultPage[Job]:
        """Claimable jobs as the index shows them, in rank order. May be out of date."""

    def longest_waiting(self, *, limit: int) -> int | None:
        """Since when the job that waits longest can be claimed, of up to `limit` claimable ones of all queues.

        None if none waits. May be out of date, as `ready` may. Raises ValueError or KeyError for a damaged item.
        """

    def list_jobs(
        self,
        tenant: str,
        *,
        state: JobState | None,
        limit: int,
        cursor: str | None = None,
        newest_first: bool = False,
    ) -> ResultPage[Job]:
        """A tenant's jobs, oldest first unless said otherwise."""

    def due_timers(self, now: int, *, limit: int) -> list[str]:
        """Ids of jobs with a timer at or before `now`."""

    def due_retentions(self, now: int, *, limit: int) -> list[str]:
        """Ids of ended jobs whose `retention_at` is at or before `now`, the longest due first."""

    def due_rules(self, now: int, *, limit: int) -> list[str]:
        """Ids of jobs whose rules are to be looked at, the longest due first."""

    def read(self, kind: type[R], job_id: str, number: int = 0) -> R | None:
        """Return the job's record of one kind and number."""

    def history(
        self, kind: type[R], job_id: str, *, limit: int, cursor: str | None = None, up_to: int | None = None
    ) -> ResultPage[R]:
        """Return a page of the job's records of one kind, in the kind's order. `up_to`: the highest number."""

    def commands(self, job_id: str, *, after: int = 0) -> list[CommandRecord]:
        """Return the commands that are kept of a job, beyond seq `after`, oldest first."""

    def scaling(self, tenant: str, group: str) -> ScalingRecord | None:
        """Return what rules have decided on a group."""

    def put(self, write: Put) -> None:
        """Store one record alone. Raises WriteConflict if its condition is not met."""

    def members(self, tenant: str, group: str) -> dict[str, MemberRecord]:
        """Return what is known of the jobs of a group, by their ids: of the first MAX_MEMBERS."""

    def join(self, tenant: str, group: str, job_id: str, member: MemberRecord) -> None:
        """Store what is known of one job of a group."""

    def protect_checkpoint(self, job_id: str, step: int, until: int) -> CheckpointRecord | None:
        """Keep a checkpoint from retention at least until then; None if it does not exist."""


class PackStore(Protocol):
    """Who holds which pack. Each write is one of a single item."""

    def get_many(self, tenant: str, digests: Iterable[str], *, consistent: bool = True) -> dict[str, PackRecord]:
        """Those of the packs that have an item, by digest; as they were moments ago if that is good enough."""

    def add_references(self, tenant: str, job_id: str, sightings: Sequence[PackSnapshot]) -> bool:
        """Add the job to who holds these packs, which were seen to be stored as declared: one write each, no doubt
        left. False if any of them was refused (`packs.may_reference`): look again. The others are held then."""

    def mark_suspect(self, tenant: str, job_id: str, digests: Iterable[str]) -> None:
        """Let whoever names these packs next look at the objects; what the job does not hold is left alone."""

    def remove_references(self, tenant: str, job_id: str, writes: Sequence[PackWrite]) -> set[str]:
        """Condemn and release, one write each. Answers with the digests of those that were refused
        (`packs.may_release`)."""


class SharedStore(Protocol):
    """What complete jobs have left for later ones."""

    def get_many(self, tenant: str, shared_keys: Sequence[str]) -> dict[str, SharedRecord]:
        """What there is, by key."""

    def replace(self, record: SharedRecord, *, seen: SharedRecord | None) -> bool:
        """Store it in place of what was seen: one write. False, and nothing written, if there is something else now."""


class LeaseStore(Protocol):
    """The lease rows."""

    def heartbeat(self, fence: Fence, progress: Progress | None, phase: str | None) -> Lease:
        """Prolong the lease: one conditional write. None leaves `progress` and `phase` as they are.

        Raises FenceBroken, which carries the lease that was found.
        """

    def get(self, job_id: str) -> Lease | None: ...

    def get_many(self, job_ids: Sequence[str]) -> dict[str, Lease]:
        """Those that exist, as they are or were moments ago: who acts upon one looks at it once more."""

    def due_pages(self, now: int, *, size: int) -> Iterator[list[str]]:
        """Yield the ids of jobs whose open lease may have run out by `now`, `size` at a time, none of them empty.

        The pages are a superset: look at the lease. Each page is read when the caller asks for it.
        """

    def reclaim_watermark(self) -> ReclaimWatermark | None:
        """The watch over leases that ran out; None before the first one."""

    def save_reclaim_watermark(self, watch: ReclaimWatermark, *, seen: ReclaimWatermark | None) -> bool:
        """Store the watch if it is still the one that was seen; False if somebody else was faster."""


class TokenStore(Protocol):
    """API keys and transfer tokens."""

    def put_key(self, key: ApiKey) -> None:
        """Store a new key. Raises WriteConflict if the id is taken."""

    def get_key(self, key_id: str) -> ApiKey | None: ...

    def list_keys(self, tenant: str, *, limit: int, cursor: str | None = None) -> ResultPage[ApiKey]: ...

    def replace_key(self, key: ApiKey) -> None:
        """Overwrite an existing key. Raises WriteConflict if it is gone, or if this would undo its revocation."""

    def put_grant(self, grant: TransferGrant) -> None: ...

    def get_grant(self, token_sha256: str) -> TransferGrant | None: ...

    def redeem(self, token_sha256: str, now: int) -> TransferGrant | None:
        """Take a live download grant away: exactly one caller gets it."""


class WebhookStore(Protocol):
    """Webhooks, and how their deliveries stand."""

    def put(self, webhook: Webhook) -> None: ...

    def get(self, tenant: str, webhook_id: str) -> Webhook | None: ...

    def of_tenant(self, tenant: str) -> list[Webhook]:
        """All of them, by id."""

    def delete(self, tenant: str, webhook_id: str) -> bool:
        """False if there is none. What is known of its deliveries goes with time."""

    def record(self, delivery: Delivery) -> None:
        """Note how a delivery stands, in place of what was noted of it before."""

    def deliveries(self, webhook_id: str, *, limit: int, cursor: str | None = None) -> ResultPage[Delivery]:
        """Newest event first, of the last 30 days or so."""


class DeliveryQueue(Protocol):
    """What is to be delivered: in order for each webhook and job."""

    def put(self, webhook: Webhook, event: JobEvent, *, repetition: str = "") -> None:
        """Put an event in line. The same again within minutes is ignored, unless `repetition` is another.

        Raises StorageUnavailable.
        """


class RingStore(Protocol):
    """Rings and their records. Reads are strongly consistent. Every call may raise StorageUnavailable."""

    def make(self, ring: StoredRing) -> bool:
        """Store a new ring; False if its tenant has another of that name. Again with the same id changes nothing."""

    def get(self, tenant: str, name: str) -> StoredRing | None: ...

    def list(self, tenant: str, *, limit: int, cursor: str | None = None) -> ResultPage[StoredRing]:
        """A tenant's, by name."""

    def begin_removal(self, ring: StoredRing) -> bool:
        """Mark it, if it is still there: from then on nobody is let in."""

    def forget(self, ring: StoredRing) -> None:
        """Remove the ring itself, last of all, if it is marked. Another one of its name is left alone."""

    def write(self, ring: StoredRing, key: str, data: bytes, *, version: str, seen: str | None) -> bool:
        """Write a record if its version is `seen` (None: there is none); False if it is not.

        True also if the record has `version` already: then this very write was done before.
        """

    def read(self, ring: StoredRing, keys: Sequence[str]) -> dict[str, RingRecord]:
        """Those that are there."""

    def keys(self, ring: StoredRing, prefix: str, *, limit: int, cursor: str | None = None) -> ResultPage[str]:
        """Keys of records that begin with the prefix, in their order."""

    def delete(self, ring: StoredRing, keys: Sequence[str]) -> None:
        """Forget records; those that are not there are passed over."""


class RecipeStore(Protocol):
    """Tenants' recipes. Each is written once and never changes."""

    def add(self, recipe: StoredRecipe) -> bool:
        """Store it; False, and nothing written, if the tenant has this name and version."""

    def get(self, tenant: str, name: str, version: int) -> StoredRecipe | None: ...

    def list(self, tenant: str, *, limit: int, cursor: str | None = None) -> ResultPage[RecipeEntry]:
        """A tenant's, in order of name and version."""


@dataclass(frozen=True)
class StoredObject:
    """What the object store knows of one object."""

    key: str
    size_bytes: int
    etag: str
    modified_at: int
    crc64nvme: str | None = None


@dataclass(frozen=True)
class StoredPart:
    """One part of an upload that is not complete. `crc64nvme` where it was uploaded with it."""

    number: int
    size_bytes: int
    etag: str
    crc64nvme: str | None = None


@dataclass(frozen=True)
class Presigned:
    """A URL that carries the right to one request; the headers are part of the signature."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


class ObjectStore(Protocol):
    """One bucket namespace of S3, seen by a tenant: keys are without the tenant's prefix.

    `bucket` is the API's name, `training-data` or `training-checkpoints`.
    """

    def head(self, tenant: str, bucket: str, key: str) -> StoredObject | None: ...

    def head_many(self, tenant: str, bucket: str, keys: Iterable[str]) -> dict[str, StoredObject]:
        """Those of the keys that exist; asked in parallel."""

    def list(
        self, tenant: str, bucket: str, prefix: str, *, limit: int, cursor: str | None = None, after: str | None = None
    ) -> ResultPage[StoredObject]: ...

    def read(self, tenant: str, bucket: str, key: str) -> bytes | None:
        """The bytes of a small object."""

    def create(self, tenant: str, bucket: str, key: str, data: bytes) -> bool:
        """Store a small object unless the key exists; False if it does."""

    def delete_many(self, tenant: str, bucket: str, keys: Sequence[str]) -> None: ...

    def presign_get(
        self, tenant: str, bucket: str, key: str, *, expires_s: int, content_type: str | None = None
    ) -> str:
        """`content_type`: what the answer says that it is, in place of what the object was stored as."""

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
        """`expiring`: stored with the tag by which a bucket's lifecycle may delete it some day."""

    def create_multipart(self, tenant: str, bucket: str, key: str, *, checksummed: bool = False) -> str:
        """The upload's id. `checksummed`: every part is sent with its CRC-64/NVME, and the object will have one."""

    def put_part(self, tenant: str, bucket: str, key: str, upload_id: str, number: int, *, data: bytes) -> str | None:
        """Store one small part; its ETag, or None if no such upload is under way."""

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
        """Ids of the uploads of exactly this key that are under way, the newest first."""

    def stored_parts(self, tenant: str, bucket: str, key: str, upload_id: str) -> Sequence[StoredPart] | None:
        """The parts of an upload that are stored, by number; None if there is no such upload."""

    def complete_multipart(
        self, tenant: str, bucket: str, key: str, upload_id: str, parts: Sequence[tuple[int, str]]
    ) -> str | None:
        """The object's ETag; None if there is no such upload. Without parts, those that are stored are used."""

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
        """The object's ETag, once the store has compared the checksum of the whole.

        None if that cannot be now: the upload or one of the parts is not there any more, or the key was written
        meanwhile against the condition. Raises Refusal (`digest_mismatch`) if the parts are another object.
        """

    def abort_multipart(self, tenant: str, bucket: str, key: str, upload_id: str) -> bool: ...

    def delete(self, tenant: str, bucket: str, key: str) -> None: ...


class Clock(Protocol):
    """The server's clock: whole seconds since 1970."""

    def now(self) -> int: ...


class Randomness(Protocol):
    """Everything drawn by chance."""

    def token(self) -> str:
        """A fresh secret: 256 bits, URL-safe."""

    def job_id(self) -> str: ...

    def key_id(self) -> str: ...

    def below(self, bound: int) -> int:
        """A number from 0 to bound - 1."""
