"""Rules and commands for a running training, and the worker's reports about them.

Heartbeats carry both. The answer has the rules that are newer than the worker's revision, and the commands after the
last one that the worker received. The next request reports the results of commands and the decisions of rules. A
decision has a number within its attempt, so that the control plane records a repeated decision once.
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
"""Largest rule document. One line of the channel carries the document, and one item stores it."""
MAX_COMMANDS = 100
"""Stored commands of one job; the oldest completed commands are removed first."""
MAX_DECISIONS = 10
"""Decisions in one heartbeat; one transaction writes their events."""
MAX_RESULTS = 20
MAX_STATUSES = 200
MAX_STATUS_CHARS = 200
MAX_OPERAND_CHARS = 2000
"""Longest text of an operand: the longest expression."""
MAX_OPERANDS_BYTES = 72_000
"""JSON size of all operands of one decision: 32 of the longest operands. One transaction writes ten decisions; DynamoDB
allows 4 MB for a transaction."""
MAX_PLACE_CHARS = 512
"""Longest place of a ring, and longest key of an object in a ring."""
MAX_REVISION = 10**6
MAX_SEQUENCE = 10**6
MAX_ROLLBACKS = 200
"""Rollbacks of one job by all rules together. The job keeps each rollback, because each resumed attempt applies it."""


def _small(text: str) -> str:
    if len(text.encode()) > MAX_RULES_BYTES:
        raise ValueError(f"has {len(text.encode())} bytes; at most {MAX_RULES_BYTES} are allowed")
    return text


RulesText = Annotated[str, AfterValidator(_small), Field(max_length=MAX_RULES_BYTES)]
"""Rule document in YAML or JSON (docs/rules.md); empty for no rules."""
Revision = Annotated[int, Field(ge=0, le=MAX_REVISION)]
"""Revision of a job's rules, from 1; 0 for no rules. A revision never changes."""
Sequence = Annotated[int, Field(ge=0, le=MAX_SEQUENCE)]
"""Number of a job's command, from 1; 0 for no command."""
RuleName = Annotated[str, Field(max_length=64, pattern=r"^[a-z0-9][a-z0-9_-]*$")]
MessageText = Annotated[str, Field(max_length=1024)]


class Directive(StrEnum):
    """Directive of the control plane in the answer to a heartbeat."""

    CONTINUE = "continue"
    CANCEL = "cancel"
    PAUSE = "pause"
    CHECKPOINT = "checkpoint"


class RulesInForce(AnswerModel):
    """Rules that a worker is to go by. Example: `{"revision": 2, "text": "rules: []"}`"""

    revision: Revision
    text: str


class RuleStatus(WireModel):
    """State of a rule, also in words.

    Example: `{"rule": "spike", "state": "pending", "said": "3 of 5, last value 2.31, next check step 1200",
    "fires": 0}`
    """

    rule: RuleName
    state: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    said: Annotated[str, Field(max_length=MAX_STATUS_CHARS)] = ""
    fires: Annotated[int, Field(ge=0)] = 0


class CommandKind(StrEnum):
    """Command to a running training."""

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
    """For `stop`: the state of the job afterwards; `complete` by default."""
    save: bool | None = None
    """For `stop`: True to take a last checkpoint, which is the default."""
    tag: Annotated[str, Field(max_length=64)] | None = None
    """For `save`: the tag of the checkpoint."""
    knob: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$")] | None = None
    value: float | None = None
    factor: Annotated[float, Field(gt=0)] | None = None
    """For `set`: the new `value`, or the `factor` that multiplies the present value."""
    expires_in_s: Annotated[int, Field(ge=1, le=7 * 86_400)] = 3600
    """Seconds after which the training no longer carries out the command."""

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
        """Return the arguments that were given."""
        return self.model_dump(exclude={"kind", "expires_in_s"}, exclude_none=True)


class CommandResult(WireModel):
    """Outcome of a command. Example: `{"seq": 3, "status": "applied", "step": 120, "message": ""}`"""

    seq: Annotated[int, Field(ge=1, le=10**6)]
    status: Literal["applied", "rejected", "expired"]
    step: Step | None = None
    message: MessageText = ""


class Command(AnswerModel):
    """Command that was given to a job.

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
    """Rule of the control plane that issued the command; None for a user's command."""


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
    """Decision or action of a rule or a command; or an object of a ring that the job's processes found damaged, and do
    without. It becomes an event of the job.

    Example: `{"number": 1, "type": "rule.fired", "rule": "spike", "revision": 2, "step": 120, "at": 1790000000,
    "operands": {"loss": 7.25}, "actions": ["rollback"]}`
    """

    number: Annotated[int, Field(ge=1, le=10**9)]
    """Number within the attempt, without a gap."""
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
    """Rule that decided; None for a command or a quarantined object."""
    command: Annotated[int, Field(ge=1)] | None = None
    """`seq` of the command that decided."""
    revision: Revision = 0
    step: Step
    training_epoch: float | None = None
    """Pass over the data, not the epoch of the attempt."""
    rank: Annotated[int, Field(ge=0)] = 0
    at: EpochSeconds
    severity: Literal["info", "warning", "error"] = "warning"
    dry_run: bool = False
    operands: Annotated[dict[_OperandText, _OperandValue], AfterValidator(_fitting), Field(max_length=32)] = {}
    """Values of the operands by their text; NaN and infinity as texts."""
    actions: Annotated[list[Identity], Field(max_length=16)] = []
    ring: Annotated[str, Field(min_length=1, max_length=MAX_PLACE_CHARS)] | None = None
    """For `ring.quarantined`: the place of the ring."""
    object: Annotated[str, Field(min_length=1, max_length=MAX_PLACE_CHARS)] | None = None
    """For `ring.quarantined`: the key of the object in the ring."""
    objects: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """For `ring.quarantined`: objects quarantined in the attempt so far. After many, not each object is reported."""
    message: MessageText = ""

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        given = sum(value is not None for value in (self.ring, self.object, self.objects))
        if given != (3 if self.type == "ring.quarantined" else 0):
            raise ValueError("'ring', 'object' and 'objects' are given with type 'ring.quarantined', and only then")
        return self


class ControlReport(WireModel):
    """Report of a worker about rules and commands, in a heartbeat.

    Example: `{"rules_revision": 2, "commands_seq": 3, "results": [{"seq": 3, "status": "applied", "step": 120}]}`
    """

    rules_revision: Revision
    """Newest revision that the worker has received."""
    commands_seq: Sequence
    """Last command such that the worker has received every command up to it."""
    step: Step | None = None
    """Step from which `rules_revision` is in force; None if it is not in force yet, or was rejected."""
    rejected: Revision | None = None
    """Rejected revision. Every report repeats it, so that the control plane does not send the revision again."""
    reason: MessageText = ""
    results: Annotated[list[CommandResult], Field(max_length=MAX_RESULTS)] = []
    decisions: Annotated[list[Decision], Field(max_length=MAX_DECISIONS)] = []
    statuses: Annotated[list[RuleStatus], Field(max_length=MAX_STATUSES)] | None = None
    """States of the rules; None if unchanged since the last report."""
    nonfinite: Annotated[dict[MetricName, NonFinite], Field(max_length=64)] | None = None
    """Metrics of the heartbeat's step that are NaN or infinite; `metrics` omits them."""

    @property
    def has_records(self) -> bool:
        """Return True if the control plane has to store results, decisions or statuses of this report."""
        return bool(self.results or self.decisions or self.statuses is not None)


class EndedBy(WireModel):
    """The rule or command that ended a training, or the present attempt at it.

    Example: `{"rule": "spike", "revision": 2, "step": 120, "message": "zscore(loss, 100) = 7.1"}`
    """

    rule: RuleName | None = None
    command: Annotated[int, Field(ge=1)] | None = None
    revision: Revision = 0
    step: Step
    message: MessageText = ""


class Rollback(WireModel):
    """Going back to a checkpoint, as a rule wants it.

    Example: `{"to": "best", "before_step": 120, "skip": 10, "lr_factor": 0.5, "budget": 2}`
    """

    to: Literal["last", "best"] = "last"
    """`best`: the best checkpoint by the retention's metric, or else by the lowest `eval.loss`, or else `loss`."""
    before_step: Step
    """Step at which the trouble began; the checkpoint must be earlier."""
    skip: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Batches that the training skips after the restore."""
    lr_factor: Annotated[float, Field(gt=0, le=100)] = 1.0
    budget: Annotated[int, Field(ge=1, le=1000)] = 3
    """Largest number of rollbacks by this rule in the job's life."""


class RolledBack(AnswerModel):
    """Command that was applied; a resuming worker applies the commands that its checkpoint does not contain yet.

    Example: `{"number": 1, "rule": "spike", "step": 120, "to_step": 100, "skip": 10, "lr_factor": 0.5}`
    """

    number: Annotated[int, Field(ge=1)]
    """Number within the job's life."""
    rule: str
    step: Step
    to_step: Step
    """Step of the restored checkpoint; 0 for the beginning."""
    skip: int = 0
    lr_factor: float = 1.0
    commands_seq: Sequence = 0
    """The rollback undid the commands up to this one that were applied after `to_step`; they are not repeated."""


class Control(AnswerModel):
    """Rules and commands that a worker needs at the beginning of an attempt.

    Example: `{"rules": {"revision": 1, "text": "rules: []"}, "commands": [], "rollbacks": [], "ends": 0, "ran_s": 0}`
    """

    rules: RulesInForce | None = None
    commands: list[Command] = []
    """Waiting commands, and every applied `set`, oldest first. A training that resumes before the step of a `set`
    applies the `set` again."""
    commands_seq: Sequence = 0
    """Last command that the worker has received by this answer: every earlier command is in `commands`, or cannot be
    carried out any more."""
    rollbacks: list[RolledBack] = []
    ends: int = 0
    """Number of attempts that a rule or command has ended in the job's life. A checkpoint records this number with a
    pending exit; if the number is unchanged, no attempt has carried out the exit yet."""
    ran_s: int = 0
    """Running time of all earlier attempts."""


class LeaveByRule(WireModel):
    """Decision of a rule for which a worker hands a job back.

    `rollback`: the job resumes an earlier checkpoint. `pause`: the job waits until a user resumes the job. `requeue`:
    another machine resumes the job.
    Example: `{"kind": "rollback", "ended_by": {"rule": "spike", "step": 120}, "rollback": {"before_step": 120}}`
    """

    kind: Literal["rollback", "pause", "requeue"]
    ended_by: EndedBy
    rollback: Rollback | None = None
    exclude_host: bool = False
    """For `requeue`: True to exclude the present machine."""

    @model_validator(mode="after")
    def _rollback_is_described(self) -> Self:
        if (self.kind == "rollback") != (self.rollback is not None):
            raise ValueError("'rollback' is given with kind 'rollback', and only then")
        if self.rollback is not None and self.ended_by.rule is None:
            raise ValueError("a rollback is a rule's: 'ended_by.rule' is needed")
        return self
