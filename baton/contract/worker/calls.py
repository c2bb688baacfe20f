"""The worker's calls: claim, heartbeat, progress, complete, fail, release."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from baton.contract.base import (
    AnswerModel,
    Blake3,
    Crc64,
    Epoch,
    EpochSeconds,
    Identity,
    JobId,
    JsonObject,
    Metrics,
    ObjectKey,
    QueueName,
    RelativePath,
    Step,
    WireModel,
)
from baton.contract.checkpoints.calls import CheckpointRef
from baton.contract.elastic.world import WorldSeat
from baton.contract.jobs.goodput import Goodput
from baton.contract.jobs.job import FailureClass, InputRef
from baton.contract.objects.parts import LargeSizeBytes, Parts, require_fitting
from baton.contract.recipes.plan import RunPlan
from baton.contract.worker.control import (
    Command,
    Control,
    ControlReport,
    Directive,
    EndedBy,
    LeaveByRule,
    RulesInForce,
    Sequence,
)


class SaladIdentity(WireModel):
    """Place of the worker, in the fields of the original orchestrator's clients; every field is optional.

    Example: `{"organization_name": "acme", "container_group_id": "cg-1", "machine_id": "m-1"}`
    """

    organization_name: Identity | None = None
    project_name: Identity | None = None
    container_group_name: Identity | None = None
    container_group_id: Identity | None = None
    machine_id: Identity | None = None


class WorkQuery(SaladIdentity):
    """Query of `GET /work`: which queue, and what this worker has.

    Example: `?queue=default&machine_id=m-1&provider=salad&vram_gib=24&disk_gib=80&gpu_model=RTX%204090`
    """

    queue: QueueName = "default"
    provider: Identity | None = None
    worker_id: Identity | None = None
    vram_gib: Annotated[float, Field(ge=0, le=4096)] | None = None
    disk_gib: Annotated[float, Field(ge=0, le=10**6)] | None = None
    gpus: Annotated[int, Field(ge=0, le=64)] | None = None
    gpu_model: Annotated[str, Field(max_length=64)] | None = None
    price_usd_per_hour: Annotated[float, Field(ge=0, le=10**6, allow_inf_nan=False)] | None = None
    """Price of this machine, for rules about cost; None if the price is unknown."""
    image: Annotated[str, Field(max_length=256, pattern=r"^[\x21-\x7e]*$")] | None = None
    """The container image that the worker runs in."""
    runs_plans: bool | None = None
    """True if the worker runs the steps of a `plan`. Other workers receive only jobs that `command` describes fully."""
    runs_nodes: bool | None = None
    """True if the worker runs nodes of elastic jobs. Other workers would train a model of their own."""


class WorkItem(AnswerModel):
    """A claimed job, as a lease-aware worker receives it (`GET /work` answers a list of none or one).

    `resume` lists committed checkpoints, newest first: use the first whose bytes verify.
    Example: `{"id": "146683a1-...", "epoch": 2, "lease_token": "...", "lease_duration_s": 90, "resume": [], ...}`
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    id: JobId
    status: Literal["running"] = "running"
    epoch: Epoch
    lease_token: str
    lease_duration_s: int
    lease_expires_at: EpochSeconds
    heartbeat_interval_s: int
    server_time: EpochSeconds
    recipe: str | None = None
    command: list[str]
    """Program of the only step, for workers that do not run plans."""
    plan: RunPlan | None = None
    """The steps to run in order; None for a bare command."""
    parameters: JsonObject
    environment: dict[str, str]
    inputs: list[InputRef]
    outputs: list[str]
    data_bucket: str
    checkpoint_bucket: str
    checkpoint_prefix: str
    resume: list[CheckpointRef]
    last_step: Step | None = None
    """Last step that any attempt reported. The steps between the resumed step and this one are repeated."""
    no_progress_timeout_s: int | None = None
    restart_on_stall: bool = False
    """True if the worker ends a training that stands still: once for a restart, then for another machine."""
    stop_grace_s: int = 30
    checkpoint_every: Literal["auto"] | int | None = None
    """Interval in seconds; see Policy."""
    runtime_s: int = 0
    """Running time of all earlier attempts."""
    interruptions: int = 0
    control: Control | None = None
    """Rules and commands of the job; None if the job has had neither."""
    rings: list[str] = []
    """Rings of the control plane that the job's processes may use, with the ring token derived from the lease token."""
    world: WorldSeat | None = None
    """Seat of an elastic training; None for a job of one machine."""
    quarantines: bool = False
    """True if a report may contain decisions of type `ring.quarantined`; a control plane without this field refuses
    them, and the heartbeat with them."""

    @property
    def checkpoint_job(self) -> str:
        """Return the id of the job to which the checkpoints belong: of a seat, the elastic job."""
        return self.id if self.world is None else self.world.job

    @property
    def checkpoint_epoch(self) -> int:
        """Return the epoch that manifests of this attempt name."""
        return self.epoch if self.world is None else self.world.epoch


class HeartbeatRequest(SaladIdentity):
    """Body of `POST /heartbeat/{id}`; may be empty.

    Example: `{"step": 120, "total_steps": 500, "metrics": {"loss": 0.31}, "phase": "training"}`
    """

    goodput: Goodput | None = None

    step: Step | None = None
    total_steps: Step | None = None
    metrics: Metrics | None = None
    phase: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")] | None = None
    control: ControlReport | None = None
    """Report of a worker that supports rules and commands."""


def _or_continue(word: object) -> object:
    """Replace an unknown directive by CONTINUE, so that a newer control plane does not end a worker's heartbeats."""
    return word if isinstance(word, str) and word in set(Directive) else Directive.CONTINUE


class HeartbeatAnswer(AnswerModel):
    """Example: `{"status": "ok", "directive": "continue", "lease_expires_at": 1790000090, ...}`"""

    status: Literal["ok"] = "ok"
    directive: Annotated[Directive, BeforeValidator(_or_continue)] = Directive.CONTINUE
    reason: str = ""
    epoch: Epoch
    lease_expires_at: EpochSeconds
    lease_duration_s: int
    heartbeat_interval_s: int
    server_time: EpochSeconds
    rules: RulesInForce | None = None
    """Rules, if the control plane has a newer revision than the worker reported."""
    commands: list[Command] = []
    """Unexpired commands after the last command that the worker reported as received."""
    commands_seq: Sequence | None = None
    """Value of `commands_seq` for the next report: every command up to it is in `commands` or has expired. None if the
    worker's value is unchanged."""


class ProgressRequest(SaladIdentity):
    """Body of `POST /progress`: the original's "a checkpoint was uploaded to this key".

    Lease-aware workers commit checkpoints instead; here the object is registered if it is stored.
    Example: `{"job_id": "146683a1-cb76-4702-9fef-fcccd32594f1", "bucket_name": "training-checkpoints",
    "key": "jobs/146683a1-cb76-4702-9fef-fcccd32594f1/attempt-1/checkpoint-50.zip"}`
    """

    job_id: JobId
    bucket_name: Annotated[str, Field(min_length=1, max_length=64)]
    key: ObjectKey


class DeclaredArtifact(WireModel):
    """An output that the worker says is stored.

    The control plane compares `size_bytes` and `crc64nvme` with what the object store computed. `blake3` is the
    worker's own statement, which each reader but the console compares with the received bytes; a download in the
    console compares `crc64nvme`.
    Example: `{"path": "model.safetensors", "size_bytes": 1024, "crc64nvme": "UvieJR3alJI=",
    "blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"}`
    """

    path: RelativePath
    size_bytes: LargeSizeBytes
    crc64nvme: Crc64
    blake3: Blake3
    parts: Parts | None = None
    """Parts of a large file to be uploaded; None for a single PUT. `complete` does not need them."""

    @model_validator(mode="after")
    def _parts_fit(self) -> DeclaredArtifact:
        require_fitting(self.parts, self.size_bytes)
        return self


MAX_ARTIFACTS = 500
MAX_ARTIFACT_PATHS_BYTES = 32 * 1024
"""Total length of all paths; a finished job stores the paths of its artifacts in one item of the jobs table."""


def _storable(artifacts: list[DeclaredArtifact]) -> list[DeclaredArtifact]:
    paths = [artifact.path for artifact in artifacts]
    if len(set(paths)) != len(paths):
        raise ValueError("name a path twice")
    size_bytes = sum(len(path.encode()) for path in paths)
    if size_bytes > MAX_ARTIFACT_PATHS_BYTES:
        raise ValueError(f"have paths of {size_bytes} bytes in total; at most {MAX_ARTIFACT_PATHS_BYTES} are allowed")
    return artifacts


DeclaredArtifacts = Annotated[list[DeclaredArtifact], AfterValidator(_storable), Field(max_length=MAX_ARTIFACTS)]


class ArtifactsRequest(WireModel):
    """Body of `POST /job/{id}/artifacts`: what will be uploaded; the answer has URLs for what is missing.

    Those with `parts` have to be declared again when their parts are stored: that makes an object of them.

    Example: `{"artifacts": [{"path": "model.safetensors", "size_bytes": 1024, "crc64nvme": "UvieJR3alJI=",
    "blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"}]}`
    """

    artifacts: Annotated[DeclaredArtifacts, Field(min_length=1)]


class PresignedPut(AnswerModel):
    """Target of the PUT of one file, or of one part of a file; the headers must be sent exactly as given.

    412 means that the file is already there.

    Example: `{"name": "model.safetensors", "url": "https://...", "headers": {"if-none-match": "*"}}`
    """

    name: str
    """Path of the artifact."""
    url: str
    headers: dict[str, str]
    part: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Number of the part, from 1; None for the whole file."""


class ArtifactsAnswer(AnswerModel):
    """Example: `{"missing": [{"name": "model.safetensors", "url": "https://...", "headers": {}}]}`"""

    missing: list[PresignedPut]
    pending: list[str] = []
    """Artifacts in parts that are not stored yet. `missing` has URLs for some of them; declare the rest again."""


class CompleteRequest(SaladIdentity):
    """Body of `POST /complete`: `artifacts` from lease-aware workers, `bucket_name` and `key` from the original's.

    Example: `{"job_id": "146683a1-cb76-4702-9fef-fcccd32594f1", "artifacts": [
    {"path": "model.safetensors", "size_bytes": 1024, "crc64nvme": "UvieJR3alJI=",
    "blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"}]}`
    """

    job_id: JobId
    bucket_name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    key: ObjectKey | None = None
    artifacts: DeclaredArtifacts = []
    step: Step | None = None
    metrics: Metrics | None = None
    goodput: Goodput | None = None
    control: ControlReport | None = None
    ended_by: EndedBy | None = None
    """Rule or command that ended the training before its last step."""


class FailRequest(SaladIdentity):
    """Body of `POST /fail`.

    Example: `{"job_id": "146683a1-cb76-4702-9fef-fcccd32594f1", "failure_class": "out_of_memory", "exit_code": 1,
    "log_tail": ["torch.OutOfMemoryError: CUDA out of memory."]}`
    """

    job_id: JobId
    bucket_name: Annotated[str, Field(max_length=64)] | None = None
    key: Annotated[str, Field(max_length=1024)] | None = None
    failure_class: FailureClass = FailureClass.SCRIPT_ERROR
    exit_code: Annotated[int, Field(ge=-(2**31), le=2**32)] | None = None
    signal: Annotated[int, Field(ge=1, le=64)] | None = None
    message: Annotated[str, Field(max_length=1024)] = ""
    log_tail: Annotated[list[Annotated[str, Field(max_length=2000)]], Field(max_length=100)] = []
    goodput: Goodput | None = None
    control: ControlReport | None = None
    ended_by: EndedBy | None = None


AGENT_CRASHED = "agent_crashed"
"""Reason of a release by an agent that restarted after a crash; the release counts as an interruption."""


class ReleaseRequest(SaladIdentity):
    """Body of `POST /release`: the worker is going away; hand the job to another one now.

    Example: `{"job_id": "146683a1-cb76-4702-9fef-fcccd32594f1", "reason": "sigterm"}`
    """

    job_id: JobId
    reason: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")] = "sigterm"
    message: Annotated[str, Field(max_length=512)] = ""
    goodput: Goodput | None = None
    control: ControlReport | None = None
    by_rule: LeaveByRule | None = None


class StatusAnswer(AnswerModel):
    """Answer of the original's calls. Example: `{"status": "ok"}`"""

    status: Literal["ok"] = "ok"


class TransitionAnswer(AnswerModel):
    """Example: `{"status": "ok", "state": "pending", "not_before": 1790000015}`"""

    status: Literal["ok"] = "ok"
    state: str
    not_before: EpochSeconds | None = None


class InputObject(AnswerModel):
    """Input file with its URL, which is valid until `expires_at` of the page.

    Example: `{"key": "digits/3/1.png", "path": "digits/3/1.png", "size_bytes": 301, "etag": "9b2c...", ...}`
    """

    key: str
    path: str
    """Path below the data directory."""
    size_bytes: int
    etag: str
    url: str
    blake3: str | None = None
    """Digest, if the control plane knows it."""
    shared: bool = False
    """True for a file from an earlier job or attempt; the worker continues without it if the download fails."""


class PushManifest(AnswerModel):
    """Manifest of a pushed folder with its URL, which is valid until `expires_at` of the page.

    Example: `{"key": "digits/.baton/dataset.json", "url": "https://..."}`
    """

    key: str
    url: str


class InputPage(AnswerModel):
    """Page of a job's inputs. Example: `{"inputs": [], "next_cursor": null, "expires_at": 1790000900}`"""

    inputs: list[InputObject]
    manifests: list[PushManifest] = []
    """On the first page: manifests of pushed folders of which an input is a part. `inputs` lists other manifests."""
    next_cursor: str | None = None
    expires_at: EpochSeconds
