"""Define fleets: documents that permit renting, the machines that follow from them, and receipts.

functions/fleet rents and returns the machines; docs/fleet.md is the reference for users.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from baton.contract.base import (
    AnswerModel,
    EpochSeconds,
    FleetName,
    JobId,
    PageLimit,
    QueueName,
    TagName,
    TagValue,
    WireModel,
)
from baton.contract.fleets.money import Budget, Usd
from baton.contract.names import ProviderName

MAX_FLEET_MACHINES = 1000
MAX_FLEET_IN_TOKEN = 28
"""Characters of the fleet's name within the name of a machine."""
MAX_INSTANCE_CHARACTERS = 128

CONTAINER_PROVIDERS = frozenset({"vast", "salad", "runpod", "ec2"})
"""Providers that start the container image of a fleet; the others start the agent that is installed on the machine."""


class MachineState(StrEnum):
    """State of a rented machine. A machine is billed from `requested` on, until `gone` proves its absence."""

    PLANNED = "planned"
    REQUESTED = "requested"
    AMBIGUOUS = "ambiguous"
    BOOTING = "booting"
    REGISTERED = "registered"
    READY = "ready"
    BUSY = "busy"
    DRAINING = "draining"
    LOST = "lost"
    TERMINATING = "terminating"
    GONE = "gone"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """True if no machine exists any more: absence is proved, or the machine never existed."""
        return self in (MachineState.GONE, MachineState.FAILED)


class FleetSpec(WireModel):
    """Machines that may be rented, for which jobs, at which price.

    Example: `{"name": "nights", "providers": ["loopback"], "max_usd_per_hour": 0.5, "budget": {"total_usd": 20}}`
    """

    name: FleetName
    providers: Annotated[list[ProviderName], Field(min_length=1, max_length=8)]
    choose: Literal["price", "order"] = "price"
    """`price`: the lowest expected total of all providers; `order`: the first provider that has an offer."""
    gpu_models: Annotated[list[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=32)] = []
    min_vram_gib: Annotated[float, Field(ge=0, le=4096)] = 0
    disk_gib: Annotated[float, Field(ge=1, le=100_000)] = 40
    min_driver: Annotated[int, Field(ge=300, le=9999)] | None = None
    """Oldest branch of the NVIDIA driver, the number before the first point; None: what the image's CUDA needs."""
    min_disk_write_mb_s: Annotated[float, Field(ge=0, le=100_000)] = 20
    min_download_mbit_s: Annotated[float, Field(ge=0, le=1_000_000)] = 20
    """Least speeds, as each machine measures its disk and its download before it enrols."""
    market: Literal["spot", "on-demand", "either"] = "either"
    regions: Annotated[list[Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{2,32}$")]], Field(max_length=64)] = []
    """Countries (two letters) or regions of the provider (`us-east-1`) in which machines may stand; empty: any."""
    image: Annotated[
        Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")] | None,
        Field(validate_default=True),
    ] = None
    """Container image of the machines."""
    queues: Annotated[list[QueueName], Field(min_length=1, max_length=10)] = ["default"]
    tags: Annotated[dict[TagName, TagValue], Field(max_length=8)] = {}
    """Tags that a job of these queues must have, with these values; empty: the machines take any job of the queues."""
    min: Annotated[int, Field(ge=0, le=MAX_FLEET_MACHINES)] = 0
    max: Annotated[int, Field(ge=1, le=MAX_FLEET_MACHINES)] = 1
    idle_timeout_s: Annotated[int, Field(ge=0, le=86_400)] = 300
    max_usd_per_hour: Usd
    """Price cap of one machine."""
    max_hours: Annotated[float, Field(gt=0, le=24 * 365)] = 24
    """Longest life of one machine."""
    budget: Budget

    @field_validator("providers")
    @classmethod
    def _names_no_provider_twice(cls, providers: list[str]) -> list[str]:
        if len(set(providers)) < len(providers):
            raise ValueError("names a provider twice")
        return providers

    @field_validator("image")
    @classmethod
    def _is_given_for_containers(cls, image: str | None, info: ValidationInfo) -> str | None:
        containers = [name for name in info.data.get("providers", []) if name in CONTAINER_PROVIDERS]
        if containers and image is None:
            raise ValueError(f"machines of {', '.join(containers)} start a container, therefore image is required")
        return image

    @field_validator("max")
    @classmethod
    def _is_not_below_min(cls, most: int, info: ValidationInfo) -> int:
        least = info.data.get("min", 0)
        if most < least:
            raise ValueError(f"is {most}, less than min ({least})")
        return most

    @field_validator("budget")
    @classmethod
    def _pays_for_min(cls, budget: Budget, info: ValidationInfo) -> Budget:
        least, price = info.data.get("min", 0), info.data.get("max_usd_per_hour", 0)
        if budget.total_usd is not None and least * price > budget.total_usd:
            raise ValueError(
                f"total_usd ({budget.total_usd:g}) does not pay for an hour of min ({least}) machines at "
                f"max_usd_per_hour ({price:g})"
            )
        return budget


class FleetQuery(WireModel):
    """Query of the lists of one fleet. Example: `?limit=100`"""

    limit: PageLimit = 100


class BoundView(AnswerModel):
    """Bound of a budget, with the money that counts against the bound.

    Example: `{"name": "per_day_usd", "period": "2026-11-25", "cap_usd": 5, "spent_usd": 1.2, "reserved_usd": 0.4}`
    """

    name: Literal["total_usd", "per_day_usd", "per_month_usd"]
    scope: Literal["fleet", "deployment"] = "fleet"
    """`deployment`: the bound holds for all fleets of the deployment together."""
    period: str = ""
    cap_usd: float
    spent_usd: float
    reserved_usd: float


class Receipt(AnswerModel):
    """Proof of the cost and of the end of one machine.

    Example: `{"quoted_usd_per_hour": 0.2, "observed_usd": 0.31, "absent_at": [1700000000, 1700000060], ...}`
    """

    requested_at: EpochSeconds | None = None
    created_at: EpochSeconds | None = None
    quoted_usd_per_hour: float
    observed_usd: float
    """Integral of the observed price over the life of the machine."""
    charged_usd: float | None = None
    """Charge by the provider's own record; None if the provider has no record."""
    absent_at: list[EpochSeconds] = []
    """Times of the two complete inventories without the machine; empty if the machine never existed."""


class MachineMeasurements(WireModel):
    """Driver and speeds of a machine, as its worker finds them before the machine enrols.

    Example: `{"driver": "580.65.06", "cuda": "13.0.1", "disk_write_mb_s": 850.2, "download_mbit_s": 412}`
    """

    driver: Annotated[str, Field(pattern=r"^\d{1,5}(\.\d{1,5}){0,3}$")] | None = None
    """Version of the NVIDIA driver; None for a machine without one."""
    cuda: Annotated[str, Field(pattern=r"^\d{1,5}(\.\d{1,5}){0,3}$")] | None = None
    """Version of CUDA in the container image; None for an image that names none."""
    disk_write_mb_s: Annotated[float, Field(ge=0, le=1_000_000)]
    download_mbit_s: Annotated[float, Field(ge=0, le=1_000_000)]


class MachineView(AnswerModel):
    """Rented machine.

    Example: `{"id": "a1b2c3d4-nights-1-9f8e7d", "fleet": "nights", "state": "busy", "provider": "loopback", ...}`
    """

    id: str
    fleet: str
    state: MachineState
    provider: str
    provider_id: str | None = None
    gpu_model: str | None = None
    usd_per_hour: float
    spent_usd: float
    job_id: JobId | None = None
    since: EpochSeconds
    """Time of the last transition."""
    reason: str = ""
    measured: MachineMeasurements | None = None
    """Set once the machine has enrolled."""
    receipt: Receipt | None = None
    """Set once the machine is `gone` or `failed`."""


class ReplacedDocument(AnswerModel):
    """Earlier document of a fleet, and what its replacement means.

    Example: `{"spec": {"name": "nights", ...}, "stopped": false, "spent_usd": 0.58, "given_back": []}`
    """

    spec: FleetSpec
    stopped: bool
    spent_usd: float
    """Money that the fleet has spent so far, which counts against the new budget."""
    given_back: list[str] = []
    """Machines that the new document would not rent: each is given back, after a checkpoint of its job."""


class FleetView(AnswerModel):
    """A fleet with its money and its machines that have not ended.

    Example: `{"stopped": false, "bounds": [], "machines": [], "waits": "", "at": 1700000000, ...}`
    """

    spec: FleetSpec
    stopped: bool = False
    job_id: JobId | None = None
    """Job that rents its own machines, with which the fleet ends; None for the fleet of a document."""
    spent_usd: float = 0
    """Money that the fleet has spent since its first document: boots, jobs and idle time of all its machines."""
    bounds: list[BoundView] = []
    machines: list[MachineView] = []
    waits: str = ""
    """Why the last tick did not start a machine that the fleet lacks; empty if the fleet lacks none."""
    warnings: list[str] = []
    """Providers from which the fleet cannot rent, each with the remedy; only in the answer to a stored document."""
    replaced: ReplacedDocument | None = None
    """The document before, if one was stored; only in the answer to a stored document."""
    created_at: EpochSeconds
    updated_at: EpochSeconds
    at: EpochSeconds
    """Time of this answer by the fleets' clock."""


class FleetPage(AnswerModel):
    """All fleets of a tenant.

    Example: `{"fleets": []}`
    """

    fleets: list[FleetView]
    damaged: list[str] = []
    """Lines, each of which names a fleet that the answer leaves out, because a record of the fleet cannot be read."""


class MachinePage(AnswerModel):
    """Machines of a fleet that have ended, with their receipts, the newest first.

    Example: `{"machines": []}`
    """

    machines: list[MachineView]


class MachineLog(AnswerModel):
    """Last output of a machine, as its provider has it; keys of Baton are removed.

    Example: `{"text": "INFO baton.agent: enrolled", "job_id": null}`
    """

    text: str | None = None
    """None if the provider has no output yet, or keeps none."""
    job_id: JobId | None = None
    """Job that the machine runs; the job has a log of its own."""


class MachineShell(AnswerModel):
    """Address of a machine's shell, as OpenSSH takes it. The provider decides which keys the shell accepts.

    Example: `{"host": "203.0.113.7", "port": 22, "user": "root"}`
    """

    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9:][A-Za-z0-9.:_%-]{0,255}$")]
    port: Annotated[int, Field(ge=1, le=65_535)]
    user: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._@-]{0,63}$")]


class FleetEventView(AnswerModel):
    """Line in the history of a fleet.

    Example: `{"at": 1700000000, "type": "machine.booting", "machine": "a1b2c3d4-nights-9f8e7d", "usd": 0}`
    """

    at: EpochSeconds
    type: str
    machine: str | None = None
    reason: str = ""
    usd: float = 0


class FleetEventPage(AnswerModel):
    """The newest events of a fleet, the newest first.

    Example: `{"events": []}`
    """

    events: list[FleetEventView]


class PreflightDownload(AnswerModel):
    """Object of 16 MiB whose download a machine times before it enrols.

    Example: `{"url": "https://..."}`
    """

    url: str


class EnrollRequest(WireModel):
    """Enrolment of a rented machine's worker, with the enrolment token as API key: the hardware that the machine has.

    Example: `{"gpu_model": "NVIDIA GeForce RTX 4090", "gpus": 1, "vram_gib": 24, "disk_gib": 80}`
    """

    gpu_model: Annotated[str, Field(max_length=64)] | None = None
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    vram_gib: Annotated[float, Field(ge=0, le=4096)] = 0
    disk_gib: Annotated[float, Field(ge=0, le=10**6)] = 0
    measured: MachineMeasurements | None = None
    """None from an agent of a version that measures nothing."""
    instance: Annotated[str, Field(min_length=1, max_length=MAX_INSTANCE_CHARACTERS)] | None = None
    """Id of the container at its provider, where the container knows the id (Vast.ai, RunPod)."""
    identity: Annotated[str, Field(max_length=2048, pattern=r"^[\w-]+\.[\w-]+\.[\w-]+$")] | None = None
    """Token that the provider signs for the machine's container (JWT), where a provider does so."""
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Secret that the container made and keeps in its work directory: with the same secret a container that lost its
    key may enrol again, and its former key is revoked."""


class EnrollAnswer(AnswerModel):
    """Identity of the machine, and the API key of its worker. The key ends with the machine.

    Example: `{"machine_id": "a1b2c3d4-nights-9f8e7d", "api_key": "baton_...", "queues": ["default"], ...}`
    """

    machine_id: str
    api_key: str
    queues: list[QueueName]
    usd_per_hour: float
    """Price that the worker reports in its claims, for an hour of the server's clock, by which attempts last."""
    heartbeat_interval_s: int
    gpu_model: str | None = None
    """Hardware and image as rented, which the worker declares in its claims; None: as the worker finds them."""
    vram_gib: float | None = None
    disk_gib: float | None = None
    image: str | None = None


class MachineHeartbeat(WireModel):
    """Sign of life of a machine's worker: the job that the worker holds.

    Example: `{"job_id": "146683a1-cb76-4702-9fef-fcccd32594f1"}`
    """

    job_id: JobId | None = None


class MachineOrders(AnswerModel):
    """Answer to a machine's heartbeat.

    Example: `{"state": "busy", "drain": false, "reason": "", "alone_s": 900, "heartbeat_interval_s": 60}`
    """

    state: MachineState
    drain: bool
    """True if the worker must commit a checkpoint, give its job back and end."""
    reason: str = ""
    alone_s: int
    """Time without an answer of the control plane after which the worker ends itself, although nobody asked."""
    heartbeat_interval_s: int
