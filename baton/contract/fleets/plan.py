"""Define the calls that show offers and a fleet's next steps before money is spent: `offers` and `plan`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton.contract.base import AnswerModel, EpochSeconds, WireModel
from baton.contract.elastic.nodes import NodeCount
from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.money import Usd
from baton.contract.jobs.job import JobSubmit
from baton.contract.names import ProviderName

MAX_OFFERS = 200
"""Most offers of one answer."""

Hours = Annotated[float, Field(gt=0, le=24 * 365)]
Gigabytes = Annotated[float, Field(ge=0, le=1_000_000)]


class OffersRequest(WireModel):
    """Offers that a person wants to compare. The fields have the meaning of the same fields of a fleet.

    Example: `{"gpu_models": ["RTX 4090"], "min_vram_gib": 24, "market": "spot", "hours": 3}`
    """

    providers: Annotated[list[ProviderName], Field(max_length=8)] = []
    """Empty: all providers of which the deployment has an account."""
    gpu_models: Annotated[list[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=32)] = []
    min_vram_gib: Annotated[float, Field(ge=0, le=4096)] = 0
    disk_gib: Annotated[float, Field(ge=1, le=100_000)] = 40
    market: Literal["spot", "on-demand", "either"] = "either"
    regions: Annotated[list[Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{2,32}$")]], Field(max_length=64)] = []
    max_usd_per_hour: Usd = 1_000_000
    hours: Hours = 1
    """Length of the work for the expected total."""
    nodes: NodeCount | None = None
    """Nodes of an elastic job: the answer tells by `taken` which offers would serve them; None for no choice."""
    limit: Annotated[int, Field(ge=1, le=MAX_OFFERS)] = 50


class PlanRequest(WireModel):
    """Document of a fleet that is not stored, and a job that is not submitted.

    Example: `{"fleet": {"name": "a", "providers": ["loopback"], "max_usd_per_hour": 1, "budget": {"total_usd": 9}}}`
    """

    fleet: FleetSpec
    job: JobSubmit | None = None
    """Job that is planned beside the waiting jobs."""
    hours: Hours | None = None
    """Length of each job from its first step; unset: from its progress, from the history of its recipe, or 1."""
    input_gb: Gigabytes = 0
    """Size of the inputs of `job`, which a machine downloads at each start."""


class ExpectedUsd(AnswerModel):
    """Expected total of one workload on one offer, by cause.

    Example: `{"total": 0.42, "machine": 0.35, "traffic": 0.02, "boot": 0.01, "lost": 0.04, "hours": 3.2}`
    """

    total: float
    machine: float
    """GPU and disk for the hours of the work."""
    traffic: float
    boot: float
    lost: float
    """GPU and disk for the work that interruptions destroy."""
    hours: float
    """Expected hours of rent."""


class OfferView(AnswerModel):
    """Offer of a provider, with its expected total.

    Example: `{"provider": "loopback", "ref": "loopback-1", "gpu_model": "RTX 4090", "usd_per_hour": 0.2, ...}`
    """

    provider: str
    ref: str
    gpu_model: str | None = None
    gpus: int = 1
    vram_gib: float = 0
    disk_gib: float = 0
    spot: bool = False
    regions: list[str] = []
    ends_at: EpochSeconds | None = None
    usd_per_hour: float
    usd_per_gb: float = 0
    interruptions_per_hour: float = 0
    boot_s: float = 0
    expected: ExpectedUsd
    taken: int = 0
    """Machines that the plan starts on this offer, or nodes of the request."""
    rejected: str = ""
    """Why the fleet does not take the offer; empty if the fleet may."""


class SilentProvider(AnswerModel):
    """Provider without an answer.

    Example: `{"provider": "vast", "reason": "HTTP 502"}`
    """

    provider: str
    reason: str


class OfferPage(AnswerModel):
    """Offers in the order in which a fleet takes them, the rejected ones last.

    Example: `{"offers": [], "omitted": 0, "silent": []}`
    """

    offers: list[OfferView]
    omitted: int = 0
    """Number of further offers."""
    silent: list[SilentProvider] = []


class SpanView(AnswerModel):
    """Range of a number, and its expectation. More than 80 % of runs end within the range.

    Example: `{"low": 0.62, "expected": 0.7, "high": 0.91}`
    """

    low: float
    expected: float
    high: float


class PlannedWork(AnswerModel):
    """Estimated work of one job that the fleet can run.

    Example: `{"job": "146683a1-cb76-4702-9fef-fcccd32594f1", "hours": 3, "hours_from": "history"}`
    """

    job: str | None = None
    """Id of the waiting job; None for the job of the request."""
    name: str | None = None
    nodes: int | None = None
    """Waiting nodes of an elastic job; None for another job."""
    hours: float
    """Length of the job; of an elastic job, that of each node."""
    hours_from: Literal["given", "progress", "history", "assumed"]


class UnservableJob(AnswerModel):
    """Waiting job that no machine of the fleet can run.

    Example: `{"job": "146683a1-cb76-4702-9fef-fcccd32594f1", "reason": "needs 48 GiB VRAM, ..."}`
    """

    job: str | None = None
    """Id of the waiting job; None for the job of the request."""
    reason: str


class FleetPlan(AnswerModel):
    """Machines that a fleet would rent now. The call stores nothing and rents nothing.

    Example: `{"start": 2, "why": "max is 2", "alive": 0, "works": [], "offers": [], "at": 1700000000, ...}`
    """

    start: int
    """Machines that the next tick would start."""
    why: str
    """Reason that the next tick starts no further machine."""
    waits: str = ""
    """Why the last tick did not start a machine that the stored fleet of this name lacks; empty if it lacks none."""
    alive: int
    """Machines that the fleet has already."""
    works: list[PlannedWork]
    unservable: list[UnservableJob] = []
    room_usd: float
    """Money that the budget has left, reservations subtracted."""
    room_bound: str
    """The bound with the least room: `per_day_usd`, or `per_day_usd of the deployment`."""
    paid_hours: float | None = None
    """Hours of one machine at the price of the first offer that `room_usd` pays for; None without an offer."""
    usd: SpanView | None = None
    """Forecast of the cost until the last machine is given back; None if no machine would start."""
    hours: SpanView | None = None
    """Forecast of the time until the last job ends."""
    offers: list[OfferView]
    omitted: int = 0
    """Number of further offers."""
    silent: list[SilentProvider] = []
    at: EpochSeconds
    """Time of this answer by the fleets' clock."""
