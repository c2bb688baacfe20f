"""What users tell a running training, by rules and commands, and what it answers.

Both travel with heartbeats: the reply has rules newer than those that the worker names and commands after the last one
it has dealt with; the next request says what became of them, and what rules decided. Decisions are numbered within
the attempt, so that one that is sent twice is written down once.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from baton.contract.base import (
    AnswerModel,
    EpochSeconds,
    Identity,
    JsonObject,
    MetricName,
    NonFinite,
    Step,
    WireModel,
)

MAX_RULES_BYTES = 32 * 1024
"""A rule document: it travels in one line of the channel, and is stored in one item."""
MAX_COMMANDS = 100
"""Of one job that are kept; the oldest that were dealt with go first."""
MAX_DECISIONS = 10
"""In one heartbeat: they become events in one transaction."""
MAX_RESULTS = 20
MAX_STATUSES = 200
MAX_STATUS_CHARS = 200
MAX_OPERAND_CHARS = 2000
"""Of an operand's text: as long as an expression may be."""
MAX_OPERANDS_BYTES = 72_000
"""Of one decision's operands together, as JSON: 32 of the longest that rules can have. Ten decisions are written in one
transaction, which DynamoDB allows 4 MB."""
MAX_PLACE_CHARS = 512
"""Of a ring's place, and of the key of an object in it."""
MAX_REVISION = 10**6
MAX_SEQUENCE = 10**6
MAX_ROLLBACKS = 200
"""Of one job, by all rules together: each is kept for whoever resumes."""


def _small(text: str) -> str:
    if len(text.encode()) > MAX_RULES_BYTES:
        raise ValueError(f"has {len(text.encode())} bytes; at most {MAX_RULES_BYTES} are allowed")
    return text


RulesText = Annotated[str, AfterValidator(_small), Field(max_length=MAX_RULES_BYTES)]
"""YAML or JSON, as docs/rules.md has it. Empty: no rules."""
Revision = Annotated[int, Field(ge=0, le=MAX_REVISION)]
"""Of a job's rules, from 1; 0 stands for none. A revision never changes."""
Sequence = Annotated[int, Field(ge=0, le=MAX_SEQUENCE)]
"""Of a job's commands, from 1; 0 stands for none."""
RuleName = Annotated[str, Field(max_length=64, pattern=r"^[a-z0-9][a-z0-9_-]*$")]
Said = Annotated[str, Field(max_length=1024)]


class RulesInForce(AnswerModel):
    """Rules that a worker is to go by. Example: `{"revision": 2, "text": "rules: []"}`"""

    revision: Revision
    text: str


class RuleStatus(WireModel):
    """How a rule stands, in words and as a state.

    Example: `{"rule": "spike", "state": "pending", "said": "3 of 5, last value 2.31, next check step 1200",
    "fires": 0}`
    """

    rule: RuleName
    state: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    said: Annotated[str, Field(max_length=MAX_STATUS_CHARS)] = ""
    fires: Annotated[int, Field(ge=0)] = 0


class CommandKind(StrEnum):
    """What can be asked of a running training."""

    STOP = "stop"
    SAVE = "save"
    EVALUATE = "evaluate"
    SET = "set"
    PAUSE = "pause"


class CommandRequest(WireModel):
    """Body of `POST /job/{id}/commands`.

    Example: `{"kind": "set", "knob": "lr", "factor": 0.5, "expires_in_s": 600}`
    """

    kind: CommandKind
    outcome: Literal["complete", "failed"] | None = None
    """Of `stop`: what the job is then; `complete` unless said."""
    save: bool | None = None
    """Of `stop`: with a last checkpoint; yes unless said."""
    tag: Annotated[str, Field(max_length=64)] | None = None
    """Of `save`."""
    knob: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$")] | None = None
    value: float | None = None
    factor: Annotated[float, Field(gt=0)] | None = None
    """Of `set`: to that value, or by that factor."""
    expires_in_s: Annotated[int, Field(ge=1, le=7 * 86_400)] = 3600
    """What was not carried out by then never will be."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        allowed = {
            CommandKind.STOP: {"outcome", "save"},
            CommandKind.SAVE: {"tag"},
            CommandKind.SET: {"knob", "value", "factor"},
        }.get(self.kind, set())
        given = {
            name for name in ("outcome", "save", "tag", "knob", "value", "factor") if getattr(self, name) is not None
        }
        if given - allowed:
            raise ValueError(f"{self.kind} has no {', '.join(sorted(given - allowed))}")
        if self.kind is CommandKind.SET and (self.knob is None or (self.value is None) == (self.factor is None)):
            raise ValueError("set needs 'knob' and exactly one of 'value' and 'factor'")
        return self

    @property
    def arguments(self) -> JsonObject:
        """Those that were given."""
        return self.model_dump(exclude={"kind", "expires_in_s"}, exclude_none=True)


class CommandResult(WireModel):
    """What became of a command. Example: `{"seq": 3, "status": "applied", "step": 120, "message": ""}`"""

    seq: Annotated[int, Field(ge=1, le=10**6)]
    status: Literal["applied", "rejected", "expired"]
    step: Step | None = None
    message: Said = ""


class Command(AnswerModel):
    """One that was given to a job.

    Example: `{"seq": 3, "kind": "set", "arguments": {"knob": "lr", "factor": 0.5}, "issued_at": 1790000000,
    "expires_at": 1790003600, "status": "waiting"}`
    """

    seq: Annotated[int, Field(ge=1, le=10**6)]
    kind: CommandKind
    arguments: JsonObject = {}
    issued_at: EpochSeconds
    expires_at: EpochSeconds
    status: Literal["waiting", "applied", "rejected", "expired"] = "waiting"
    step: Step | None = None
    message: str = ""
    rule: str | None = None
    """The rule of the control plane that gave it; None for a user's."""


class CommandList(AnswerModel):
    """Newest first. Example: `{"commands": []}`"""

    commands: list[Command]


_OperandText = Annotated[str, Field(max_length=MAX_OPERAND_CHARS)]
_OperandValue = bool | float | Annotated[str, Field(max_length=64)] | None


def _fitting(operands: dict[str, bool | float | str | None]) -> dict[str, bool | float | str | None]:
    size_bytes = len(json.dumps(operands, ensure_ascii=False).encode(errors="replace"))
    if size_bytes > MAX_OPERANDS_BYTES:
        raise ValueError(f"take {size_bytes} bytes together; at most {MAX_OPERANDS_BYTES} are allowed")
    return operands


class Decision(WireModel):
    """What a rule, or a command, decided or did; or an object of a ring that the job's processes found damaged, and do
    without. It becomes an event of the job.

    Example: `{"number": 1, "type": "rule.fired", "rule": "spike", "revision": 2, "step": 120, "at": 1790000000,
    "operands": {"loss": 7.25}, "actions": ["rollback"]}`
    """

    number: Annotated[int, Field(ge=1, le=10**9)]
    """Within the attempt, without a gap."""
    type: Literal[
        "rule.fired",
        "rule.cleared",
        "rule.error",
        "rule.updated",
        "rule.unevaluable",
        "action.applied",
        "action.failed",
        "action.rejected",
        "ring.quarantined",
    ]
    rule: RuleName | None = None
    """None where a command is meant, or neither."""
    command: Annotated[int, Field(ge=1)] | None = None
    """Its seq."""
    revision: Revision = 0
    step: Step
    training_epoch: float | None = None
    """Pass over the data; not the attempt's."""
    rank: Annotated[int, Field(ge=0)] = 0
    at: EpochSeconds
    severity: Literal["info", "warning", "error"] = "warning"
    dry_run: bool = False
    operands: Annotated[dict[_OperandText, _OperandValue], AfterValidator(_fitting), Field(max_length=32)] = {}
    """By their text; NaN and infinity as texts."""
    actions: Annotated[list[Identity], Field(max_length=16)] = []
    ring: Annotated[str, Field(min_length=1, max_length=MAX_PLACE_CHARS)] | None = None
    """Of `ring.quarantined`: where it lies."""
    object: Annotated[str, Field(min_length=1, max_length=MAX_PLACE_CHARS)] | None = None
    """Of `ring.quarantined`: its key in the ring."""
    objects: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Of `ring.quarantined`: how many there were in the attempt by then. After many not each is told."""
    message: Said = ""

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        given = sum(one is not None for one in (self.ring, self.object, self.objects))
        if given != (3 if self.type == "ring.quarantined" else 0):
            raise ValueError("'ring', 'object' and 'objects' are given with type 'ring.quarantined', and only then")
        return self


class ControlReport(WireModel):
    """What a worker says of rules and commands, in a heartbeat.

    Example: `{"rules_revision": 2, "commands_seq": 3, "results": [{"seq": 3, "status": "applied", "step": 120}]}`
    """

    rules_revision: Revision
    """The newest that the worker has received."""
    commands_seq: Sequence
    """All up to this one have been received."""
    step: Step | None = None
    """At which that revision came into force; None while it has not, or was rejected."""
    rejected: Revision | None = None
    """Newer than the one in force, and refused there: said again with every report, so that it is not sent again."""
    reason: Said = ""
    results: Annotated[list[CommandResult], Field(max_length=MAX_RESULTS)] = []
    decisions: Annotated[list[Decision], Field(max_length=MAX_DECISIONS)] = []
    statuses: Annotated[list[RuleStatus], Field(max_length=MAX_STATUSES)] | None = None
    """None: as they were."""
    nonfinite: Annotated[dict[MetricName, NonFinite], Field(max_length=64)] | None = None
    """Metrics of the heartbeat's step that are NaN or infinite: its `metrics` have none of them."""

    @property
    def tells(self) -> bool:
        """Whether there is anything to write down, whatever revision is in force or was rejected."""
        return bool(self.results or self.decisions or self.statuses is not None)


class EndedBy(WireModel):
    """The rule or command that ended a training, or the present attempt at it.

    Example: `{"rule": "spike", "revision": 2, "step": 120, "message": "zscore(loss, 100) = 7.1"}`
    """

    rule: RuleName | None = None
    command: Annotated[int, Field(ge=1)] | None = None
    revision: Revision = 0
    step: Step
    message: Said = ""


class Rollback(WireModel):
    """Going back to a checkpoint, as a rule wants it.

    Example: `{"to": "best", "before_step": 120, "skip": 10, "lr_factor": 0.5, "budget": 2}`
    """

    to: Literal["last", "best"] = "last"
    """`best`: by the retention's metric, else by eval.loss, else by loss, lowest first."""
    before_step: Step
    """Only to a checkpoint before this one: there the trouble began."""
    skip: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Batches that the training passes over when it goes on."""
    lr_factor: Annotated[float, Field(gt=0, le=100)] = 1.0
    budget: Annotated[int, Field(ge=1, le=1000)] = 3
    """How often that rule may do this in the job's life."""


class RolledBack(AnswerModel):
    """One that was done; whoever resumes applies those that its checkpoint does not know of yet.

    Example: `{"number": 1, "rule": "spike", "step": 120, "to_step": 100, "skip": 10, "lr_factor": 0.5}`
    """

    number: Annotated[int, Field(ge=1)]
    """In the job's life."""
    rule: str
    step: Step
    to_step: Step
    """0: the beginning."""
    skip: int = 0
    lr_factor: float = 1.0
    commands_seq: Sequence = 0
    """Commands up to this one that were applied after `to_step` are undone by it: nobody does them again."""


class Control(AnswerModel):
    """What a worker needs of all this at the beginning of an attempt.

    Example: `{"rules": {"revision": 1, "text": "rules: []"}, "commands": [], "rollbacks": [], "ends": 0, "ran_s": 0}`
    """

    rules: RulesInForce | None = None
    commands: list[Command] = []
    """Those that wait; and, with status `applied`, every `set`, oldest first: a training that resumes before the step
    of one does it again."""
    commands_seq: Sequence = 0
    """All commands up to this one are here, or will never be: what the worker has received."""
    rollbacks: list[RolledBack] = []
    ends: int = 0
    """How often a rule or command has ended an attempt in the job's life: one that a checkpoint says was decided when
    there had been as many, and that nobody carried out, is still to come."""
    ran_s: int = 0
    """By all earlier attempts."""


class LeaveByRule(WireModel):
    """Why a worker hands a job back that no machine has failed: a rule wants it.

    `rollback`: to go on from an earlier checkpoint. `pause`: until somebody resumes it. `requeue`: on another machine.
    Example: `{"kind": "rollback", "ended_by": {"rule": "spike", "step": 120}, "rollback": {"before_step": 120}}`
    """

    kind: Literal["rollback", "pause", "requeue"]
    ended_by: EndedBy
    rollback: Rollback | None = None
    exclude_host: bool = False
    """Of `requeue`."""

    @model_validator(mode="after")
    def _rollback_is_described(self) -> Self:
        if (self.kind == "rollback") != (self.rollback is not None):
            raise ValueError("'rollback' is given with kind 'rollback', and only then")
        if self.rollback is not None and self.ended_by.rule is None:
            raise ValueError("a rollback is a rule's: 'ended_by.rule' is needed")
        return self
