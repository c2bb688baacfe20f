"""Define the stored values. All are frozen; a change makes a new value."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, ClassVar, Literal

from baton.contract.elastic.nodes import NodesSpec
from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import (
    Artifact,
    AttemptEnd,
    FailureClass,
    InputRef,
    JobCounters,
    JobState,
    Progress,
    Reason,
)
from baton.contract.jobs.policy import Policy, Requirements
from baton.contract.jobs.rent import RentSpec
from baton.contract.recipes.plan import RunPlan
from baton.contract.worker.control import CommandKind, Directive, EndedBy, RolledBack, RuleStatus
from functions.domain import table_keys
from functions.domain.record_base import Attribute, Record, TableRecord
from functions.domain.seat_records import Seat, SeatMark


class Spec(Record):
    """Resolved request of the user; immutable after submit."""

    name: str | None = None
    recipe: str | None = None
    command: list[str]
    plan: RunPlan | None = None
    """Rendered recipe; None for a command."""
    parameters: dict[str, Any] = {}
    environment: dict[str, str] = {}
    inputs: list[InputRef] = []
    outputs: list[str] = []
    requirements: Requirements = Requirements()
    policy: Policy = Policy()
    tags: dict[str, str] = {}
    webhook: str | None = None
    """Webhook that receives the job's events, also without a subscription to the events of every job."""
    rings: list[str] = []
    """Rings that the job's processes may use."""
    rent: RentSpec | None = None
    """Machine of the job's own; None for a job that waits in the queue of other workers."""
    nodes: NodesSpec | None = None
    """Machines of an elastic job, which has seats instead of attempts."""
    seat: Seat | None = None
    """Seat of an elastic job; None for a job that a user has submitted."""
    dreambooth: dict[str, Any] | None = None
    """Columns of the original orchestrator; None for a job that was not submitted in the original form."""


class Branch(Record):
    """Retry from an older checkpoint. Commits of attempts before `before` count only up to that checkpoint."""

    step: int
    """-1 for a retry from nothing."""
    epoch: int
    before: int


class Job(TableRecord):
    """Job. `rev` rises with every write and is the condition of the next write."""

    KIND: ClassVar[str] = "META"
    VERSION: ClassVar[str | None] = "rev"

    id: str
    tenant: str
    rev: int = 0
    state: JobState = JobState.PENDING
    queue: str = "default"
    shard: int = 0
    priority: int = 50
    spec: Spec
    epoch: int = 0
    event_seq: int = 0
    counters: JobCounters = JobCounters()
    fruitless_interruptions: int = 0
    fruitless_failures: int = 0
    fruitless_node_faults: int = 0
    """Failures of an elastic job's nodes since its newest commit."""
    reason: Reason | None = None
    not_before: int | None = None
    stale: bool = False
    """True after a lost machine or a release: the job is claimed before jobs without sunk work."""
    pause_requested: bool = False
    avoid: dict[str, int] = {}
    """Machine id -> instant until which the machine may not claim the job."""
    checkpoint_step: int | None = None
    checkpoint_epoch: int | None = None
    first_step: int | None = None
    """Step of the first checkpoint of the job's history, kept or not; None before the first commit."""
    lapsed_step: int | None = None
    """Highest step of the present attempt whose checkpoint turned out damaged; None for none."""
    branches: list[Branch] = []
    """Branches of the job's history, oldest first. Each checkpoint keeps the branches of its own history,
    for a retry from that checkpoint."""
    progress: Progress | None = None
    artifacts: list[Artifact] = []
    rules_revision: int = 0
    """Newest revision; 0 for none."""
    commands_seq: int = 0
    """Seq of the newest command; 0 for none."""
    commands_void: int = 0
    """Seq up to which waiting commands are void, because a retry followed their submission."""
    decided: int = 0
    """Number of the last decision of the present attempt that is among the events."""
    rollbacks: list[RolledBack] = []
    """Rollbacks by rules, oldest first."""
    watched: bool = False
    """True if the control plane evaluates some of the newest rules."""
    waiting_since: int | None = None
    """Instant since which the job can be claimed, or could be claimed last; set for watched jobs only."""
    cost_usd: float = 0.0
    """Cost of ended attempts whose price is known."""
    priced_s: int = 0
    """Part of `counters.runtime_s` that `cost_usd` covers."""
    ends: int = 0
    """Number of reported ends of attempts by a rule or command."""
    ended_by: EndedBy | None = None
    idempotency_digest: str | None = None
    copy_of: str | None = None
    """Job of which a rule has made this copy."""
    leaving: bool = False
    """True if a rule has ordered the training to stop, to remove the job from its group."""
    left_epoch: int | None = None
    """Attempt that received the stop; a later attempt may not have received the stop."""
    left_by: str | None = None
    """Last order that removed the job; an order removes a job once, even if the job is retried meanwhile."""
    generation: int = 0
    """Number of retries of an elastic job; of a seat: the number that the seat has followed."""
    keeps_counters: bool = False
    """True if the last retry of an elastic job kept the counters of its seats."""
    seats: list[SeatMark] = []
    """Attempts at the seats of an elastic job, by seat, as far as the job's history shows them."""
    settled: bool = False
    """True for an ended elastic job all of whose seats have ended."""
    created_at: int
    updated_at: int
    started_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    canceled_at: int | None = None
    retention_at: int | None = None
    """Instant at which the sweeper runs retention for an ended job; None if a call of the worker ran retention."""

    def attributes(self) -> Mapping[str, Attribute]:
        """Return the keys of indexes: `ready` only while claimable, `timers` only while something will be due.

        The lists of jobs do not contain seats.
        """
        found: dict[str, Attribute] = {"tenant": self.tenant}
        if self.spec.seat is None:
            found["state_pk"] = table_keys.state_pk(self.tenant, self.state)
            found["created_sk"] = table_keys.created_sk(self.created_at, self.id)
        if self.claimable:
            found |= {"ready_pk": table_keys.ready_pk(self.tenant, self.queue, self.shard), "ready_sk": self.ready_rank}
        if self.spec.nodes is not None and not self.settled:
            found |= {"timer_pk": table_keys.SEATS, "timer_at": self.created_at}
        elif self.timer_at is not None:
            found |= {"timer_pk": table_keys.TIMER, "timer_at": self.timer_at}
        elif self.retention_at is not None:
            found |= {"timer_pk": table_keys.RETENTION, "timer_at": self.retention_at}
        return found

    @property
    def claimable(self) -> bool:
        """True exactly when the job belongs in the ready index. Workers claim the seats of an elastic job."""
        return self.state is JobState.PENDING and self.not_before is None and self.spec.nodes is None

    @property
    def attempt_step(self) -> int | None:
        """Newest step that the present attempt has committed; None before its first commit.

        A commit does not write the attempt's item, which is written at the end of the attempt.
        """
        return self.checkpoint_step if self.checkpoint_epoch == self.epoch else self.lapsed_step

    def in_history(self, record: CheckpointRecord) -> bool:
        """Return True if the next attempt continues this checkpoint, directly or through later checkpoints.

        False for checkpoints that a retry from an older checkpoint left behind.
        """
        if self.checkpoint_step is None or record.step > self.checkpoint_step:
            return False
        for branch in self.branches:
            if record.epoch <= branch.epoch:
                return record.step <= branch.step
            if record.epoch < branch.before:
                return False
        return True

    def branches_from(self, chosen: CheckpointRecord | None) -> list[Branch]:
        """Return the branches after a retry from `chosen`, or from nothing: the branches of `chosen` and a new one.

        A checkpoint that a retry left behind has branches that the job no longer has. A checkpoint without branches
        was committed before the first branch; then the job's own branches apply.
        """
        before = self.epoch + 1
        if chosen is None:
            return [Branch(step=-1, epoch=0, before=before)]
        came_by = chosen.branches or [branch for branch in self.branches if branch.before <= chosen.epoch]
        return [*came_by, Branch(step=chosen.step, epoch=chosen.epoch, before=before)]

    @property
    def timer_at(self) -> int | None:
        """Return when the sweeper must run the job's timer; None for never."""
        if self.state.terminal:
            return None
        instants = [self.spec.policy.deadline_at]
        if self.state is JobState.PENDING:
            instants.append(self.not_before)
        return min((instant for instant in instants if instant is not None), default=None)

    @property
    def ready_rank(self) -> str:
        """Sort key of the ready index: stale first, then priority, then age."""
        return f"{0 if self.stale else 1}#{100 - self.priority:03d}#{self.created_at:011d}#{self.id}"


class Attempt(TableRecord):
    """Attempt at a job: one worker holds the job from the claim to the end."""

    KIND: ClassVar[str] = "ATTEMPT#"
    NUMBER: ClassVar[str | None] = "epoch"

    epoch: int
    machine_id: str | None = None
    container_group_id: str | None = None
    provider: str | None = None
    worker_id: str | None = None
    gpu_model: str | None = None
    price_usd_per_hour: float | None = None
    key_id: str | None = None
    started_at: int
    ended_at: int | None = None
    end: AttemptEnd | None = None
    reason: Reason | None = None
    failure_class: FailureClass | None = None
    exit_code: int | None = None
    signal: int | None = None
    log_tail: list[str] = []
    resumed_step: int | None = None
    checkpoint_step: int | None = None
    """Newest committed step of an ended attempt; before the end `Job.attempt_step` has the step."""
    progress: Progress | None = None


class Event(TableRecord):
    """Event of a job's history."""

    KIND: ClassVar[str] = "EVENT#"
    NUMBER: ClassVar[str | None] = "seq"

    seq: int
    type: EventType
    at: int
    epoch: int
    data: dict[str, Any] = {}


class CheckpointRecord(TableRecord):
    """A committed checkpoint. `legacy_key` marks a zip of an original client instead of a manifest."""

    KIND: ClassVar[str] = "CHECKPOINT#"
    NUMBER: ClassVar[str | None] = "step"
    DIGITS: ClassVar[int] = 13
    NEWEST_FIRST: ClassVar[bool] = True
    BESIDE: ClassVar[frozenset[str]] = frozenset(("protected_until",))

    step: int
    epoch: int
    manifest_epoch: int | None = None
    """Epoch that the manifest names; None for `epoch`. A seat's manifest names the number of its attempt."""
    committed_at: int
    num_files: int
    total_bytes: int
    new_bytes: int = 0
    metrics: dict[str, float] = {}
    manifest_key: str
    manifest_blake3: str | None = None
    legacy_key: str | None = None
    branches: list[Branch] = []
    """Branches of the job at the commit. Step, epoch and branches define the checkpoint's history."""
    first_step: int | None = None
    """`Job.first_step` at the commit."""
    pinned: bool = False
    damaged: bool = False
    protected_until: int = 0
    """Instant until which signed URLs may read the checkpoint; retention keeps the checkpoint until then."""
    tag: str = ""
    """Tag with which a rule or command keeps the checkpoint."""

    @property
    def named_epoch(self) -> int:
        """Return the epoch that the manifest names."""
        return self.epoch if self.manifest_epoch is None else self.manifest_epoch

    def identity(self) -> Mapping[str, Attribute]:
        """Return the attributes that distinguish this checkpoint from another of the same step."""
        return {
            "epoch": self.epoch,
            "committed_at": self.committed_at,
            "damaged": self.damaged,
            "pinned": self.pinned,
        }

    def attributes(self) -> Mapping[str, Attribute]:
        """Return the attributes that the deletion of the record requires."""
        return {**self.identity(), "protected_until": self.protected_until}


class RulesRecord(TableRecord):
    """Revision of a job's rules, immutable."""

    KIND: ClassVar[str] = "RULES#"
    NUMBER: ClassVar[str | None] = "revision"
    NEWEST_FIRST: ClassVar[bool] = True

    revision: int
    text: str
    created_at: int
    created_by: str | None = None


class CommandRecord(TableRecord):
    """Command for a training. The clock decides if a waiting command has expired."""

    KIND: ClassVar[str] = "COMMAND#"
    NUMBER: ClassVar[str | None] = "seq"

    seq: int
    kind: CommandKind
    arguments: dict[str, Any] = {}
    issued_at: int
    expires_at: int
    key_sha256: str | None = None
    """SHA-256 of the Idempotency-Key."""
    status: Literal["waiting", "applied", "rejected", "expired"] = "waiting"
    epoch: int = 0
    """Attempt that executed the command."""
    step: int | None = None
    message: str = ""
    rule: str | None = None
    """Rule of the control plane, of `revision`, that gave the command; None for a user's command."""
    revision: int = 0


class ControlRecord(TableRecord):
    """Newest report of a worker about its rules."""

    KIND: ClassVar[str] = "CONTROL"

    revision: int
    epoch: int
    step: int | None = None
    at: int
    rejected: int | None = None
    reason: str = ""
    statuses: list[RuleStatus] = []


class MemberValue(Record):
    """Metric of a job of a group, by its name in rules; NaN and infinity as words."""

    metric: str
    step: int | None = None
    """The value is from the first report at or after this step; None: from the newest report."""
    value: float | str | None = None


class MemberRecord(Record):
    """Metrics of one job of a group. The record stays after the end of the job, until `expires_at`."""

    values: list[MemberValue] = []
    expires_at: int = 0


class ScaleOrder(Record):
    """Decision of one rule on one group, kept with the rule's job until its execution, which is idempotent."""

    number: str
    """Number, unique among the orders of the job."""
    rule: str
    revision: int
    """Revision of the rules."""
    step: int
    group: str
    source: str | None = None
    """Job that is copied."""
    copies: int = 0
    leaving: list[str] = []
    """Jobs that are removed."""

    def copy_ids(self, job_id: str) -> list[str]:
        """Return the ids of the copies. `job_id`: the job of the rule."""
        return [derive_id("copy", f"{job_id}\n{self.number}\n{index}") for index in range(self.copies)]


def derive_id(purpose: str, name: str) -> str:
    """Return a UUID of version 8 (RFC 9562) from a name that is unique within its purpose."""
    digits = sha256(f"baton {purpose}\n{name}".encode()).hexdigest()
    return f"{digits[:8]}-{digits[8:12]}-8{digits[13:16]}-8{digits[17:20]}-{digits[20:32]}"


class RuleStateRecord(TableRecord):
    """State of the rules that the control plane evaluates for a job.

    `version` rises by one with every write, and each write is a compare-and-swap: of two concurrent evaluations the
    store accepts one, and the other evaluates again.
    """

    KIND: ClassVar[str] = "STANDING"
    VERSION: ClassVar[str | None] = "version"

    version: int
    revision: int = 0
    """Revision of the rules of `state`; 0: never evaluated."""
    state: str | None = None
    """Evaluator state of `rule_evaluation.pack_state`, compressed: uncompressed two rules take two write units."""
    at: int | None = None
    """Instant of the last evaluation."""
    next_at: int | None = None
    """Instant of the next evaluation by the sweeper; None for never."""
    epoch: int = 0
    """Attempt of the newest evaluated progress."""
    step: int = 0
    """Step of the newest evaluated progress."""
    seen_at: int = 0
    """Instant of the report of the newest evaluated progress."""
    errors: int = 0
    """Failed evaluations of this revision."""
    member: MemberRecord = MemberRecord()
    """Metrics of the job for its group."""
    orders: list[ScaleOrder] = []
    """Orders on groups that are not executed completely."""

    def attributes(self) -> Mapping[str, Attribute]:
        """Return the key of the index `timers` for the next evaluation."""
        return {} if self.next_at is None else {"timer_pk": table_keys.RULES_DUE, "timer_at": self.next_at}


class ScalingRecord(TableRecord):
    """Decisions of rules on a group, so that concurrent decisions count each other's jobs.

    `version` rises by one with every write, and each write is a compare-and-swap.
    """

    PARTITION: ClassVar[str] = "SCALING#"
    KIND: ClassVar[str] = "SCALING"
    VERSION: ClassVar[str | None] = "version"

    version: int
    tenant: str
    group: str
    copies: list[str] = []
    """Copies that had not ended at the last write; some may not be created yet or not be in an index."""
    leaving: list[str] = []
    """Jobs that orders remove whose execution is not complete."""
    expires_at: int = 0

    @property
    def owner(self) -> str:
        """Return the name of the record's partition."""
        return scaling_owner(self.tenant, self.group)

    def attributes(self) -> Mapping[str, Attribute]:
        """Return when the record may be deleted."""
        return {"ttl": self.expires_at}


def scaling_owner(tenant: str, group: str) -> str:
    """Return the name of the partition of a group's record."""
    return f"{tenant}#{group}"


class PackRecord(Record):
    """References of jobs to one pack, `packs/<blake3>`, which is referenced or condemned.

    Referenced: each of `jobs` has verified the pack, and the pack stays until the last reference is removed. Condemned:
    no reference is left, and the function that condemned the pack deletes the object. The item stays a day longer, so
    that a commit that read the item before detects the change.
    """

    tenant: str
    blake3: str
    size_bytes: int
    crc64nvme: str
    jobs: frozenset[str] = frozenset()
    doubted: bool = False
    """True if a checkpoint with the pack did not verify: the next commit verifies the object."""
    condemned_at: int | None = None
    """None while the pack has references."""
    version: str | None = None
    """New and unique with each write, except the write that marks the pack as suspect."""


class Claimant(Record):
    """The client that claimed a job without a lease token."""

    key_id: str
    source_address: str
    progress_by: int
    """Instant from which heartbeats are refused; `/progress` postpones the instant."""


class Lease(Record):
    """Right of an attempt to write, stored in the heartbeats table."""

    job_id: str
    tenant: str
    epoch: int
    token_sha256: str | None = None
    """None for an original client, which has no lease token."""
    ring_token_sha256: str | None = None
    """None for a job without rings."""
    rings: list[str] = []
    machine_id: str | None = None
    claimant: Claimant | None = None
    expires_at: int
    duration_s: int
    heartbeat_interval_s: int
    stop_at: int | None = None
    """Instant at which runtime or deadline is used up."""
    directive: Directive = Directive.CONTINUE
    directive_reason: str = ""
    progress: Progress | None = None
    phase: str | None = None
    rules_revision: int = 0
    """Newest revision of the rules; 0 for none."""
    commands_seq: int = 0
    """Seq of the newest command; 0 for none."""
    rules_in_force: int = 0
    """Stored revision that the worker has reported in force."""
    rules_rejected: int = 0
    watched: bool = False
    """`Job.watched`: True if a heartbeat causes an evaluation of rules."""
    closed: Literal["", "complete", "failed", "interrupted", "released", "canceled", "paused"] = ""
    """End of the attempt; empty while the lease is live."""


class TransferGrant(Record):
    """Download or upload token at rest: its SHA-256 and its one object."""

    token_sha256: str
    purpose: Literal["download", "upload"]
    tenant: str
    bucket: str
    key: str
    expires_at: int


class RecipeEntry(Record):
    """Version of a tenant's recipe, without its document; immutable."""

    tenant: str
    name: str
    version: int
    description: str
    created_at: int

    @property
    def id(self) -> str:
        """Return `name@version`."""
        return f"{self.name}@{self.version}"


class StoredRecipe(RecipeEntry):
    """Recipe with its document, as pushed."""

    BESIDE: ClassVar[frozenset[str]] = frozenset(("document",))
    """Lists read entries without the document."""

    document: str

    @property
    def entry(self) -> RecipeEntry:
        """Return the entry for lists."""
        return RecipeEntry(**self.model_dump(exclude={"document"}))
