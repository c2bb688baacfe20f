"""What is stored: frozen values. State changes make new ones."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, ClassVar, Literal

from baton.contract.history import EventType
from baton.contract.jobs import (
    Artifact,
    AttemptEnd,
    FailureClass,
    InputRef,
    JobCounters,
    JobState,
    Policy,
    Progress,
    Reason,
    Requirements,
)
from baton.contract.recipes.plan import RunPlan
from baton.contract.steering import CommandKind, EndedBy, RolledBack, RuleStatus
from baton.contract.work import Directive
from functions.domain import keys
from functions.domain.record_base import Attribute, Record, TableRecord


class Spec(Record):
    """What the user asked for, resolved: never changes after submit."""

    name: str | None = None
    recipe: str | None = None
    command: list[str]
    plan: RunPlan | None = None
    """What the recipe has become; None for a bare command."""
    parameters: dict[str, Any] = {}
    environment: dict[str, str] = {}
    inputs: list[InputRef] = []
    outputs: list[str] = []
    requirements: Requirements = Requirements()
    policy: Policy = Policy()
    tags: dict[str, str] = {}
    webhook: str | None = None
    """Is told of the job's events, though it is not told of every job's."""
    rings: list[str] = []
    """Rings that its processes may use."""
    dreambooth: dict[str, Any] | None = None
    """The original orchestrator's columns, when the job was submitted in its form."""


class Branch(Record):
    """A retry from an older checkpoint. What attempts before `before` committed counts only up to that checkpoint."""

    step: int
    """-1 for a retry from nothing."""
    epoch: int
    before: int


class Job(TableRecord):
    """A job. `rev` rises with every write and is the condition of the next one."""

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
    reason: Reason | None = None
    not_before: int | None = None
    stale: bool = False
    """True when a machine was lost or left: handed out before jobs that have no sunk work."""
    pause_requested: bool = False
    avoid: dict[str, int] = {}
    """Machine id -> instant until which it is not given this job."""
    checkpoint_step: int | None = None
    checkpoint_epoch: int | None = None
    first_step: int | None = None
    """Of the first checkpoint of the history that the job continues, kept or not; None where none was committed, or an
    earlier version did."""
    lapsed_step: int | None = None
    """Highest step that the present attempt had committed before that turned out damaged; None if none did."""
    branches: list[Branch] = []
    """Oldest first: where the history turned off, see `in_history`. Retries that it does not go through are not here:
    each checkpoint keeps those of its own history, for whoever goes back to it."""
    progress: Progress | None = None
    artifacts: list[Artifact] = []
    rules_revision: int = 0
    """The newest one; 0 for none."""
    commands_seq: int = 0
    """Of the newest command; 0 for none."""
    commands_void: int = 0
    """What waits up to this one was meant for what ended before a retry."""
    decided: int = 0
    """Number of the last decision of the present attempt that is among the events."""
    rollbacks: list[RolledBack] = []
    """By rules, oldest first."""
    watched: bool = False
    """The control plane evaluates some of its newest rules. Others cost it nothing."""
    waiting_since: int | None = None
    """Since when the job can be claimed, or could last; only of jobs that are watched."""
    cost_usd: float = 0.0
    """Of ended attempts whose machine's price is known."""
    priced_s: int = 0
    """How much of `counters.runtime_s` that is for."""
    ends: int = 0
    """How often a rule or command has ended an attempt, as it was reported."""
    ended_by: EndedBy | None = None
    idempotency_digest: str | None = None
    copy_of: str | None = None
    """The job that a rule has copied to make this one."""
    leaving: bool = False
    """A rule has told its training to stop, to take the job out of its group."""
    left_epoch: int | None = None
    """The attempt that was told so. A later one may know nothing of it."""
    left_by: str | None = None
    """The last order that took it out: it does so once, also if the job is retried meanwhile."""
    created_at: int
    updated_at: int
    started_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    canceled_at: int | None = None
    retention_at: int | None = None
    """When the sweeper must let go of what an ended job does not keep; None where its worker's call has done so."""

    def attributes(self) -> Mapping[str, Attribute]:
        """Return the keys of indexes: `ready` only while claimable, `timers` only while something will be due."""
        found: dict[str, Attribute] = {
            "tenant": self.tenant,
            "state_pk": keys.state_pk(self.tenant, self.state),
            "created_sk": keys.created_sk(self.created_at, self.id),
        }
        if self.claimable:
            found |= {"ready_pk": keys.ready_pk(self.tenant, self.queue, self.shard), "ready_sk": self.ready_rank}
        if self.timer_at is not None:
            found |= {"timer_pk": keys.TIMER, "timer_at": self.timer_at}
        elif self.retention_at is not None:
            found |= {"timer_pk": keys.RETENTION, "timer_at": self.retention_at}
        return found

    @property
    def claimable(self) -> bool:
        """True exactly when the job belongs in the ready index."""
        return self.state is JobState.PENDING and self.not_before is None

    @property
    def attempt_step(self) -> int | None:
        """Newest step that the present attempt has committed; None if it has committed none.

        The attempt's own item is told at its end: a commit need not write it.
        """
        return self.checkpoint_step if self.checkpoint_epoch == self.epoch else self.lapsed_step

    def in_history(self, record: CheckpointRecord) -> bool:
        """True if the next attempt continues this checkpoint, directly or through later ones.

        False for those that a retry from an older checkpoint left behind: they lead somewhere else.
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
        """The branches once a retry goes on from `chosen`, or from nothing: those that `chosen` came by, and this one.

        Retries may have left `chosen` behind: then it came by branches that are not the job's any more. If it names
        none, it was committed before the first branch, or by an earlier version: then the job's own tell.
        """
        before = self.epoch + 1
        if chosen is None:
            return [Branch(step=-1, epoch=0, before=before)]
        came_by = chosen.branches or [branch for branch in self.branches if branch.before <= chosen.epoch]
        return [*came_by, Branch(step=chosen.step, epoch=chosen.epoch, before=before)]

    @property
    def timer_at(self) -> int | None:
        """When the sweeper must look at this job next; None for never."""
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
    """One worker holding the job."""

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
    """Newest step that it committed, once it has ended: until then `Job.attempt_step` says it."""
    progress: Progress | None = None


class Event(TableRecord):
    """One line of history."""

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
    committed_at: int
    num_files: int
    total_bytes: int
    new_bytes: int = 0
    metrics: dict[str, float] = {}
    manifest_key: str
    manifest_blake3: str | None = None
    legacy_key: str | None = None
    branches: list[Branch] = []
    """The job's when this was committed: with step and epoch they say which checkpoints are its history."""
    first_step: int | None = None
    """The job's when this was committed."""
    pinned: bool = False
    damaged: bool = False
    protected_until: int = 0
    """Somebody was given URLs to read it: retention leaves it alone until then."""
    tag: str = ""
    """By which a rule or command wanted it kept."""

    def identity(self) -> Mapping[str, Attribute]:
        """Return what tells this checkpoint from another one of the same step."""
        return {
            "epoch": self.epoch,
            "committed_at": self.committed_at,
            "damaged": self.damaged,
            "pinned": self.pinned,
        }

    def attributes(self) -> Mapping[str, Attribute]:
        """Return what the deletion of the record depends on."""
        return {**self.identity(), "protected_until": self.protected_until}


class RulesRecord(TableRecord):
    """One revision of a job's rules: written once."""

    KIND: ClassVar[str] = "RULES#"
    NUMBER: ClassVar[str | None] = "revision"
    NEWEST_FIRST: ClassVar[bool] = True

    revision: int
    text: str
    created_at: int
    created_by: str | None = None


class CommandRecord(TableRecord):
    """A command. Whether one that waits has expired is told by the clock."""

    KIND: ClassVar[str] = "COMMAND#"
    NUMBER: ClassVar[str | None] = "seq"

    seq: int
    kind: CommandKind
    arguments: dict[str, Any] = {}
    issued_at: int
    expires_at: int
    key_sha256: str | None = None
    """Of the Idempotency-Key that it was given with."""
    status: Literal["waiting", "applied", "rejected", "expired"] = "waiting"
    epoch: int = 0
    """The attempt that dealt with it."""
    step: int | None = None
    message: str = ""
    rule: str | None = None
    """The rule of the control plane that gave it, of `revision`; None for a user's."""
    revision: int = 0


class ControlRecord(TableRecord):
    """What a worker said last of the rules that it has."""

    KIND: ClassVar[str] = "CONTROL"

    revision: int
    epoch: int
    step: int | None = None
    at: int
    rejected: int | None = None
    reason: str = ""
    statuses: list[RuleStatus] = []


class MemberValue(Record):
    """A metric of a job of a group, by its name in rules; NaN and infinity as words."""

    metric: str
    step: int | None = None
    """At the first report at or after that step; None: the newest."""
    value: float | str | None = None


class MemberRecord(Record):
    """What is known of one job of a group. It stays when the job has ended, until `expires_at`."""

    values: list[MemberValue] = []
    expires_at: int = 0


class ScaleOrder(Record):
    """What one rule has decided on one group. It stands with the rule's job until it is carried out: as often as
    somebody begins it anew, it names the same jobs."""

    number: str
    """Of the job: no other order of it ever has the same."""
    rule: str
    revision: int
    """Of the rules that this one is of."""
    step: int
    group: str
    source: str | None = None
    """The job that is copied, if one is."""
    copies: int = 0
    leaving: list[str] = []
    """The jobs that are taken out."""

    def copy_ids(self, job_id: str) -> list[str]:
        """Of the jobs that it makes. `job_id`: of the rule's job."""
        return [_uuid(f"{job_id}\n{self.number}\n{index}") for index in range(self.copies)]


def _uuid(name: str) -> str:
    """As RFC 9562 has it for names, of a version that is its user's own (8)."""
    digits = sha256(f"baton copy\n{name}".encode()).hexdigest()
    return f"{digits[:8]}-{digits[8:12]}-8{digits[13:16]}-8{digits[17:20]}-{digits[20:32]}"


class RuleStateRecord(TableRecord):
    """How a job's rules stand that the control plane evaluates: everything that later decisions depend on.

    `version` rises by one with every write and is the condition of the next one: what two have decided at the same
    moment is written once, and the other one decides anew.
    """

    KIND: ClassVar[str] = "STANDING"
    VERSION: ClassVar[str | None] = "version"

    version: int
    revision: int = 0
    """Of the rules to which `state` belongs; 0: they were never checked."""
    state: str | None = None
    """The evaluator's, as `watching.packed` makes it: as it is, that of two rules would take two write units."""
    at: int | None = None
    """When they were checked last."""
    next_at: int | None = None
    """When the sweeper looks at them; None for never."""
    epoch: int = 0
    """Of the newest progress that was looked at."""
    step: int = 0
    """The same."""
    seen_at: int = 0
    """When that was reported."""
    errors: int = 0
    """How often these rules could not be checked."""
    member: MemberRecord = MemberRecord()
    """What the job's group is to know of it."""
    orders: list[ScaleOrder] = []
    """What rules have decided on groups and nobody has carried out to the end yet."""

    def attributes(self) -> Mapping[str, Attribute]:
        """Return the key of the index `timers`, where the sweeper is to look at the rules."""
        return {} if self.next_at is None else {"timer_pk": keys.RULES_DUE, "timer_at": self.next_at}


class ScalingRecord(TableRecord):
    """What rules have decided on a group, so that those who decide at the same moment count each other's jobs.

    `version` rises by one with every write and is the condition of the next one.
    """

    PARTITION: ClassVar[str] = "SCALING#"
    KIND: ClassVar[str] = "SCALING"
    VERSION: ClassVar[str | None] = "version"

    version: int
    tenant: str
    group: str
    copies: list[str] = []
    """Jobs that may not be written yet, or not seen in an index, and had not ended when this was written."""
    leaving: list[str] = []
    """Jobs that are being taken out by orders that nobody has carried out to the end yet."""
    expires_at: int = 0

    @property
    def owner(self) -> str:
        """What the record's partition is named after."""
        return scaling_owner(self.tenant, self.group)

    def attributes(self) -> Mapping[str, Attribute]:
        """Return when the record may be deleted."""
        return {"ttl": self.expires_at}


def scaling_owner(tenant: str, group: str) -> str:
    """Return what the partition of a group's record is named after."""
    return f"{tenant}#{group}"


class PackRecord(Record):
    """Who holds one pack, `packs/<blake3>`. It is held or condemned.

    Held: each of `jobs` has seen it stored, and it stays until the last of them lets it go. Condemned: nobody holds it,
    and whoever condemned it deletes the object. The item outlives that by a day, so that no commit that looked before
    can take the pack for untouched.
    """

    tenant: str
    blake3: str
    size_bytes: int
    crc64nvme: str
    jobs: frozenset[str] = frozenset()
    doubted: bool = False
    """A checkpoint of it did not verify: who names it next looks whether it is stored as declared."""
    condemned_at: int | None = None
    """None while somebody holds the pack."""
    version: str | None = None
    """Another one with each write but a doubt's, never one that was before. None in items of earlier versions."""


class Claimant(Record):
    """The client that claimed a job without a lease token."""

    key_id: str
    source_address: str
    progress_by: int
    """Heartbeats are refused from this instant on, unless `/progress` puts it off."""


class Lease(Record):
    """An attempt's right to write; the row of the heartbeats table."""

    job_id: str
    tenant: str
    epoch: int
    token_sha256: str | None = None
    """None for an original client, which has no lease token."""
    ring_token_sha256: str | None = None
    """None where the job names no rings."""
    rings: list[str] = []
    machine_id: str | None = None
    claimant: Claimant | None = None
    expires_at: int
    duration_s: int
    heartbeat_interval_s: int
    stop_at: int | None = None
    """When runtime or deadline is used up."""
    directive: Directive = Directive.CONTINUE
    directive_reason: str = ""
    progress: Progress | None = None
    phase: str | None = None
    rules_revision: int = 0
    """The newest one; 0 for none."""
    commands_seq: int = 0
    """Of the newest command."""
    rules_in_force: int = 0
    """What is written down of what the worker said."""
    rules_rejected: int = 0
    watched: bool = False
    """As `Job.watched`: whether a heartbeat is a reason to look at rules."""
    closed: Literal["", "complete", "failed", "interrupted", "released", "canceled", "paused"] = ""
    """How the attempt ended; empty while it lives."""


class TransferGrant(Record):
    """A download or upload token at rest: its SHA-256, and the one object it is good for."""

    token_sha256: str
    purpose: Literal["download", "upload"]
    tenant: str
    bucket: str
    key: str
    expires_at: int


class RecipeEntry(Record):
    """One version of a tenant's recipe, without its document. Never changes."""

    tenant: str
    name: str
    version: int
    description: str
    created_at: int

    @property
    def id(self) -> str:
        """`name@version`."""
        return f"{self.name}@{self.version}"


class StoredRecipe(RecipeEntry):
    """With the document, as it was pushed."""

    BESIDE: ClassVar[frozenset[str]] = frozenset(("document",))
    """Lists read entries only."""

    document: str

    @property
    def entry(self) -> RecipeEntry:
        """What lists show of it."""
        return RecipeEntry(**self.model_dump(exclude={"document"}))
