"""Jobs as users submit and see them."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from baton.contract.base import (
    MAX_KEY_BYTES,
    MAX_PARAMETERS_BYTES,
    MAX_PARAMETERS_DEPTH,
    AnswerModel,
    Epoch,
    EpochSeconds,
    JobId,
    JsonObject,
    KeyPrefix,
    MetricName,
    Metrics,
    NonFinite,
    QueueName,
    RelativePath,
    Step,
    TagName,
    TagValue,
    WireModel,
    checked_path,
    depth_of,
)
from baton.contract.elastic.nodes import NodesSpec
from baton.contract.jobs.command_variables import command_problem
from baton.contract.jobs.goodput import Goodput
from baton.contract.jobs.policy import Policy, Requirements
from baton.contract.jobs.rent import RentSpec
from baton.contract.jobs.rule_calls import DocumentFault
from baton.contract.names import MAX_RINGS, RING_NAME_PATTERN
from baton.contract.recipes.plan import RunPlan
from baton.contract.worker.control import EndedBy, RulesText


class JobState(StrEnum):
    """State of a job. `complete`, `failed` and `canceled` are terminal until a retry."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETE = "complete"
    FAILED = "failed"
    CANCELED = "canceled"

    @property
    def terminal(self) -> bool:
        """Return True if the job has ended; no worker can claim it before a retry."""
        return self in (JobState.COMPLETE, JobState.FAILED, JobState.CANCELED)


class AttemptEnd(StrEnum):
    """End of an attempt."""

    COMPLETE = "complete"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    RELEASED = "released"
    CANCELED = "canceled"


class FailureClass(StrEnum):
    """Cause for which a worker gave up a job. Node faults are counted apart from failures of the job."""

    SCRIPT_ERROR = "script_error"
    OUT_OF_MEMORY = "out_of_memory"
    SEGFAULT = "segfault"
    KILLED_BY_SIGNAL = "killed_by_signal"
    COMMAND_NOT_FOUND = "command_not_found"
    NO_PROGRESS = "no_progress"
    STOPPED_BY_RULE = "stopped_by_rule"
    BAD_INPUT = "bad_input"
    MISSING_OUTPUT = "missing_output"
    STEP_TIMEOUT = "step_timeout"
    RESTORE_FAILED = "restore_failed"
    DISK_FULL = "disk_full"
    NODE_FAULT = "node_fault"
    TRANSFER_FAILED = "transfer_failed"

    @property
    def node_fault(self) -> bool:
        """Return True if the machine caused the failure, not the job."""
        return self in (FailureClass.DISK_FULL, FailureClass.NODE_FAULT, FailureClass.TRANSFER_FAILED)


class ReasonCode(StrEnum):
    """Reason for which the control plane changed a job's state or ended an attempt."""

    LEASE_EXPIRED = "lease_expired"
    NOT_HANDED_OUT = "not_handed_out"
    CANCELED_BY_USER = "canceled_by_user"
    CANCELED_BY_RULE = "canceled_by_rule"
    PAUSED_BY_USER = "paused_by_user"
    DEADLINE = "deadline"
    MAX_RUNTIME = "max_runtime"
    FAILURE_CAP = "failure_cap"
    NODE_FAULT_CAP = "node_fault_cap"
    INTERRUPTION_CAP = "interruption_cap"
    FRUITLESS_INTERRUPTION_CAP = "fruitless_interruption_cap"
    ROLLED_BACK_BY_RULE = "rolled_back_by_rule"
    PAUSED_BY_RULE = "paused_by_rule"
    REQUEUED_BY_RULE = "requeued_by_rule"
    WORLD_ENDED = "world_ended"


class InputRef(WireModel):
    """Objects of the bucket `training-data` that the job reads.

    Every object below `prefix` is placed in the data directory under `into`, keeping its path below the prefix.
    Example: `{"prefix": "digits/", "into": "digits"}`
    """

    prefix: KeyPrefix
    into: Annotated[str, Field(max_length=MAX_KEY_BYTES)] = ""

    @field_validator("into")
    @classmethod
    def _into_is_relative(cls, into: str) -> str:
        return checked_path(into) if into else into


Priority = Annotated[int, Field(ge=0, le=100, description="Higher is handed out first")]
RecipeName = Annotated[
    str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}@[1-9][0-9]{0,5}$", examples=["dreambooth-lora-sdxl@1"])
]
Argument = Annotated[str, Field(max_length=4096)]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
Tags = Annotated[dict[TagName, TagValue], Field(max_length=50)]


class JobSubmit(WireModel):
    """A job to run: exactly one of `recipe` and `command`.

    Example: `{"recipe": "digits@1", "parameters": {"steps": 600}, "inputs": [{"prefix": "digits/"}]}`
    """

    recipe: RecipeName | None = None
    command: Annotated[list[Argument], Field(min_length=1, max_length=256)] | None = None
    name: Annotated[str, Field(max_length=128)] | None = None
    queue: QueueName = "default"
    priority: Priority = 50
    parameters: JsonObject = {}
    environment: Annotated[dict[EnvironmentName, Annotated[str, Field(max_length=4096)]], Field(max_length=64)] = {}
    inputs: Annotated[list[InputRef], Field(max_length=32)] = []
    outputs: Annotated[list[RelativePath], Field(max_length=64)] | None = None
    """Paths below the output directory that must exist at the end. Default: the outputs of the recipe."""
    requirements: Requirements = Requirements()
    policy: Policy = Policy()
    tags: Tags = {}
    webhook: Annotated[str, Field(pattern=r"^[a-z0-9]{8,32}$")] | None = None
    """Id of a webhook that receives this job's events, besides the webhooks that receive the events of every job."""
    rings: Annotated[list[Annotated[str, Field(pattern=RING_NAME_PATTERN)]], Field(max_length=MAX_RINGS)] = []
    """Rings of the control plane that the job's processes may use without an API key."""
    rules: RulesText | None = None
    """First revision of the job's rules (docs/rules.md), which watch and steer the training."""
    rent: RentSpec | None = None
    """Machine of the job's own, which ends with the job; excludes `queue`."""
    nodes: NodesSpec | None = None
    """Machines that train the job together (docs/elastic.md)."""

    @model_validator(mode="after")
    def _one_way_to_run(self) -> Self:
        if (self.recipe is None) == (self.command is None):
            raise ValueError("exactly one of 'recipe' and 'command' is needed")
        return self

    @field_validator("command")
    @classmethod
    def _command_has_a_program(cls, command: list[str] | None) -> list[str] | None:
        if command is not None and (not command[0].strip() or any("\0" in argument for argument in command)):
            raise ValueError("the first item names the program; no item may contain a NUL character")
        if problem := command_problem(command or []):
            raise ValueError(problem)
        return command

    @field_validator("environment")
    @classmethod
    def _environment_fits_a_process(cls, environment: dict[str, str]) -> dict[str, str]:
        for name, value in environment.items():
            if "\0" in value:
                raise ValueError(f"the value of {name} contains a NUL character")
        return environment

    @field_validator("parameters")
    @classmethod
    def _parameters_are_small(cls, parameters: JsonObject) -> JsonObject:
        if depth_of(parameters) > MAX_PARAMETERS_DEPTH:
            raise ValueError(f"are nested too deeply; at most {MAX_PARAMETERS_DEPTH} levels are allowed")
        try:
            # Without ASCII escapes, encode() fails for a lone surrogate, which JSON can express and UTF-8 cannot.
            size_bytes = len(json.dumps(parameters, allow_nan=False, ensure_ascii=False).encode())
        except (TypeError, ValueError) as error:
            raise ValueError(f"must be plain JSON with finite numbers and valid Unicode ({error})") from error
        if size_bytes > MAX_PARAMETERS_BYTES:
            raise ValueError(f"are {size_bytes} bytes; at most {MAX_PARAMETERS_BYTES} are allowed")
        return parameters


class JobChecked(AnswerModel):
    """A job that a submission would accept, completed with the requirements and outputs of its recipe.

    Example: `{"requirements": {"min_vram_gib": 24}, "outputs": ["model.safetensors"], "warnings": []}`
    """

    requirements: Requirements
    outputs: list[str]
    warnings: list[DocumentFault] = []
    """Warnings about the rules."""


class BatchSubmit(WireModel):
    """Several jobs at once: all are valid or none is accepted; a repeat with the same key is safe.

    Example: `{"jobs": [{"recipe": "digits@1"}, {"recipe": "digits@1", "priority": 90}]}`
    """

    jobs: Annotated[list[JobSubmit], Field(min_length=1, max_length=1000)]


class Reason(AnswerModel):
    """Reason of a state or an end. Example: `{"code": "lease_expired", "message": "no heartbeat for 92 s"}`"""

    code: Annotated[
        str, Field(description="A ReasonCode, a FailureClass, or the word with which a worker released the job")
    ]
    message: str = ""


class Progress(AnswerModel):
    """The newest progress report. Example: `{"step": 120, "total_steps": 500, "metrics": {"loss": 0.31}}`"""

    step: Step
    total_steps: Step | None = None
    metrics: Metrics = {}
    nonfinite: dict[MetricName, NonFinite] = {}
    """Metrics that were NaN or infinite at this step."""
    reported_at: EpochSeconds | None = None
    goodput: Goodput | None = None


class Artifact(AnswerModel):
    """A stored output. Example: `{"path": "model.safetensors", "key": "jobs/.../model.safetensors", ...}`

    `size_bytes` and `crc64nvme` are those of the stored object. `blake3` is what the worker declared:
    compare it with the bytes before you use them.
    """

    path: str
    bucket: str
    key: str
    size_bytes: int | None = None
    crc64nvme: str | None = None
    blake3: str | None = None


class JobCounters(AnswerModel):
    """Counters of the job's attempts by their end.

    Example: `{"attempts": 3, "failures": 1, "interruptions": 1, "node_faults": 0, "releases": 0, "runtime_s": 812}`
    """

    attempts: int = 0
    failures: int = 0
    interruptions: int = 0
    node_faults: int = 0
    releases: int = 0
    runtime_s: int = 0


class JobView(AnswerModel):
    """A job as the API shows it.

    Example: `{"id": "146683a1-...", "status": "running", "state": "running", "queue": "default", "epoch": 2, ...}`

    Jobs submitted in the original orchestrator's form carry its columns too (`instance_prompt`, ...).
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    id: JobId
    status: JobState
    state: JobState
    name: str | None = None
    queue: QueueName
    priority: int
    recipe: str | None = None
    command: list[str]
    plan: RunPlan | None = None
    """Steps rendered from the recipe."""
    parameters: JsonObject
    environment: dict[str, str]
    inputs: list[InputRef]
    outputs: list[str]
    requirements: Requirements
    policy: Policy
    tags: dict[str, str]
    webhook: str | None = None
    """Id of the webhook that the job names in `webhook`."""
    rings: list[str] = []
    rent: RentSpec | None = None
    nodes: NodesSpec | None = None
    """Machines that train the job together. Counters, cost and running time are the sums of all nodes."""
    copy_of: JobId | None = None
    """Job of which a rule made this copy; the event `job.submitted` names the rule."""
    epoch: Epoch
    counters: JobCounters
    reason: Reason | None = None
    """Reason for the present state: for the pause, the failure, the wait after a failure, ..."""
    ended_by: EndedBy | None = None
    """Rule or command that ended the training, or ended the last attempt if no later attempt has begun."""
    not_before: EpochSeconds | None = None
    created_at: EpochSeconds
    started_at: EpochSeconds | None = None
    completed_at: EpochSeconds | None = None
    failed_at: EpochSeconds | None = None
    canceled_at: EpochSeconds | None = None
    updated_at: EpochSeconds
    rev: int | None = None
    """Revision of the job: grows with each change, but not with progress."""
    checkpoint_step: Step | None = None
    progress: Progress | None = None
    artifacts: list[Artifact] = []
    checkpoint_bucket: str
    checkpoint_prefix: str
    machine_id: str | None = None
    lease_expires_at: EpochSeconds | None = None


class JobPage(AnswerModel):
    """Page of jobs. Example: `{"jobs": [], "next_cursor": null}`"""

    jobs: list[JobView]
    next_cursor: str | None = None
    counts: dict[JobState, int] | None = None
    """With `counts=true`: the tenant's jobs by state, at most 100 of each; 100 means 100 or more."""


class StopRequest(WireModel):
    """Optional body of stop and pause. Example: `{"message": "wrong prompt"}`"""

    message: Annotated[str, Field(max_length=512)] = ""


class RetryRequest(WireModel):
    """Run an ended job again under the same id. Example: `{"from_step": 400}`

    `from_step` names a committed checkpoint; 0 starts from nothing; unset means the newest checkpoint.
    """

    from_step: Step | None = None
    reset_counters: bool = True
