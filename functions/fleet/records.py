"""Define the stored values of a fleet. All are frozen; a change makes a new value."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from baton.contract.fleets.events import FleetEventType, PublishedFleetEvent
from baton.contract.fleets.fleet import MAX_FLEET_IN_TOKEN, FleetSpec, MachineMeasurements, MachineState, Receipt
from functions.domain.record_base import Record
from functions.fleet.machine_states import MAYBE_EXISTING

HIGHEST_PRICE = 1_000_000
Price = Annotated[float, Field(ge=0, le=HIGHEST_PRICE, allow_inf_nan=False)]
"""Price in USD. A driver that reads another number from its provider fails, because the number would spoil the
ledger."""
LONGEST_PAID_H = 10 * 365 * 24
MIN_ABSENCES_APART_S = 60
"""Time between the two complete inventories that prove an absence. One list can lag behind a create."""


class Offer(Record):
    """Machine that a provider sells, at the price of the moment. JSON has no NaN, therefore none reaches a record."""

    model_config = ConfigDict(allow_inf_nan=False)

    provider: str
    ref: str
    """The provider's id of the offer."""
    ask: str | None = None
    """The provider's id of what the offer sells, if `ref` does not identify the thing: a host sells one GPU on demand
    and to bids of any amount. None: `ref`."""
    machine_ref: str | None = None
    """The provider's id of the host, for reputation; None where the provider hides the host."""
    repeatable: bool = False
    """True for a kind of machine, of which the provider makes as many as it has; False for one host."""
    gpu_model: str | None = None
    gpus: int = 1
    vram_gib: float = 0
    disk_gib: float = 0
    driver: str | None = None
    """Version of the NVIDIA driver; None where the provider does not name the version."""
    download_mbit_s: float | None = None
    """Speed of the host's downloads; None where the provider does not name the speed."""
    spot: bool = False
    regions: list[str] = []
    """Names by which the document of a fleet may select the place of the machine: country, region."""
    ends_at: int | None = None
    """Time at which the provider ends the machine, whatever the machine does; None for no such time."""
    usd_per_hour: Price
    """Price of machine and disk together."""
    usd_per_gb: Price = 0
    """Price of one GB of traffic."""
    interruptions_per_hour: float = 0
    boot_s: float = 180

    @property
    def place(self) -> tuple[str, str] | None:
        """Return the place of the only machine that the offer sells, in any market; None for a repeatable offer."""
        return None if self.repeatable else (self.provider, self.ask or self.ref)


class Sighting(Record):
    """Entry of a provider's inventory."""

    token: str
    handle: str
    """The provider's id of the machine."""
    running: bool = True
    """False if the provider says that the machine has ended, failed or was outbid. Its disk can still be billed."""
    unknown_status: str = ""
    """Status by the provider that the driver does not know, quoted; empty for a known one. The machine then counts as
    running, because an unknown status proves no end, and a machine that is given up would cost money."""
    usd_per_hour: Price | None = None
    announced_usd_per_hour: Price | None = None
    """Price that the provider wants from now on and that nobody has accepted yet; None for no such wish."""
    machine_ref: str | None = None
    message: str = ""
    created_at: int = 0


class Inventory(Record):
    """All machines of this deployment at one provider, as of one moment."""

    provider: str
    at: int
    complete: bool
    """False if a page could not be read: then nothing follows from an absence."""
    unread: list[str] | None = None
    """Offers whose hosts could not be asked, where each host tells its own machines: an absence then says nothing about
    the machines of these offers only. None: an incomplete list says nothing about any machine."""
    sightings: list[Sighting] = []

    def covers(self, offer: Offer) -> bool:
        """Return True if an absence from the list is evidence for a machine of the offer."""
        return self.complete or (self.unread is not None and offer.ref not in self.unread)

    def of(self, token: str) -> list[Sighting]:
        """Return the sightings of one token, oldest first; a repeated create can make several."""
        return sorted(
            (one for one in self.sightings if one.token == token), key=lambda one: (one.created_at, one.handle)
        )


class Terms(Record):
    """Conditions of a machine's rent, by the document of its fleet at that time."""

    image: str | None = None
    disk_gib: float
    queues: list[str]
    """Queues from which the machine's key claims, as of the enrolment."""
    tags: dict[str, str] = {}
    """Tags of the only jobs that the machine's key claims, as of the enrolment."""
    port: int | None = None
    """Port that other machines must reach; None for a machine that was rented for jobs without nodes."""


class Machine(Record):
    """A rented machine. `version` rises with every write and is the condition of the next write."""

    id: str
    """The token: name or label of the machine at its provider."""
    tenant: str
    fleet: str
    version: int = 0
    state: MachineState = MachineState.PLANNED
    since: int
    """Time of the last transition."""
    reason: str = ""
    offer: Offer
    terms: Terms | None = None
    """None for a machine that was rented before terms were stored."""
    cap_usd_per_hour: float
    handle: str | None = None
    duplicates: list[str] = []
    """Further machines that the provider made for the same token; each is destroyed."""
    requested_at: int | None = None
    created_at: int | None = None
    enrolled_at: int | None = None
    measured: MachineMeasurements | None = None
    """Driver and speeds of the machine at its present host; None before the enrolment."""
    reallocated: list[str] = []
    """Quarantined hosts from which the provider was asked to move the machine away, the oldest first."""
    worker_key: str | None = None
    """Id of the machine's API key: the enrolment key, then the key of the worker. Revoked at the machine's end."""
    enrolment_key: str | None = None
    """Id of the key that enrolled the machine, which may enrol the same container again. Revoked at the end, too."""
    enrolment_sha256: str | None = None
    """Digest of the secret that the enrolled container made; None for a container without a secret."""
    seen_at: int | None = None
    """Time of the last call of the machine's worker."""
    job_id: str | None = None
    claimed_at: int | None = None
    """Time at which the machine last began a job."""
    lost_at: int | None = None
    """Time at which the machine counted as lost to its provider."""
    ends_by: int
    """Time at which the machine is drained, whatever the machine does: `lifecycle.end_of`."""
    usd_per_hour: float
    """Price that the provider last reported."""
    spent_usd: float = 0
    priced_until: int | None = None
    """Time up to which `spent_usd` counts; None before the machine can exist."""
    reserved_usd: float = 0
    """Part of the budget that the machine may still spend."""
    absences: list[int] = []
    """Times of complete inventories without the machine since the last sighting: the first one and the last one."""
    charged_usd: float | None = None
    """Charge by the provider's own record at the machine's end; None if the provider has no record."""
    charged_before_usd: float = 0
    """Part of that record which the receipt of an earlier record of the same machine names already."""
    watch_over: bool = False
    """True for a failed machine once a late arrival is no longer expected."""
    destroy_at: int | None = None
    """Time of the last destroy call."""
    told_since: int | None = None
    """Start time of the state that was last reported overdue; None before the first report."""

    @property
    def provider(self) -> str:
        """Name of the provider that rents the machine out."""
        return self.offer.provider

    @property
    def proves_identity(self) -> bool:
        """True if the provider signs who a container is: then the machine enrols by the proof, at each of its hosts."""
        return self.provider == "salad"

    @property
    def absence_proved(self) -> bool:
        """True after two complete inventories without the machine, far enough apart."""
        return len(self.absences) == 2 and self.absences[1] - self.absences[0] >= MIN_ABSENCES_APART_S

    @property
    def budget_until(self) -> int | None:
        """Time until which the reserved money pays for the machine; None if the machine cannot cost anything yet."""
        if self.priced_until is None or self.usd_per_hour <= 0:
            return None
        return self.priced_until + int(min(self.reserved_usd / self.usd_per_hour, LONGEST_PAID_H) * 3600)

    @property
    def watched(self) -> bool:
        """True if the tick must still look after the machine."""
        if self.state is MachineState.FAILED:
            return self.requested_at is not None and not self.watch_over
        return self.state is not MachineState.GONE

    @property
    def receipt(self) -> Receipt | None:
        """Return the proof of cost and end; None while the machine may exist."""
        if not self.state.ended:
            return None
        return Receipt(
            requested_at=self.requested_at,
            created_at=self.created_at,
            quoted_usd_per_hour=self.offer.usd_per_hour,
            observed_usd=round(self.spent_usd, 6),
            charged_usd=self.charged_usd,
            absent_at=self.absences,
        )

    @property
    def event(self) -> FleetEvent:
        """The transition to the present state, as a line in the history of the fleet."""
        type_ = f"machine.{self.state}"
        return FleetEvent(at=self.since, type=type_, machine=self.id, reason=self.reason, usd=self.spent_usd)

    @property
    def billed(self) -> bool:
        """True if the provider may bill the machine."""
        return self.state in MAYBE_EXISTING


def token_prefix(deployment: str, fleet: str) -> str:
    """Return the beginning of the ids of all machines of a fleet, and of fleets with a similar long name."""
    return f"{deployment}-{fleet[:MAX_FLEET_IN_TOKEN]}-"


class FleetEvent(Record):
    """Line in the history of a fleet."""

    at: int
    type: str
    machine: str | None = None
    reason: str = ""
    usd: float = 0
    """Money spent on the machine, or by the fleet, so far."""

    def published(self, tenant: str, fleet: str, number: int) -> PublishedFleetEvent:
        """Return the event for the bus and for webhooks. Raises ValueError for an unknown type."""
        return PublishedFleetEvent(
            id=f"fleet/{fleet}#{number}",
            type=FleetEventType(self.type),
            tenant=tenant,
            fleet=fleet,
            **self.model_dump(exclude={"type"}),
        )


class Quarantine(Record):
    """A host that is not rented until `until`."""

    host: str
    """`provider:machine_ref`."""
    until: int
    failures: int = 1
    reason: str = ""


class Reputation(Record):
    """History of the machines of one provider and GPU model."""

    kind: str
    """`provider:gpu_model`."""
    starts: int = 0
    hours: float = 0
    losses: int = 0
    """Machines that their provider took, or that became silent."""
    registered: int = 0
    """Machines whose workers enrolled."""
    register_s: float = 0
    """Sum of the times from the create to the enrolment in seconds."""


class OrphanMachine(Record):
    """A machine with a token of this deployment that no live record explains, until the tick adopts the machine."""

    provider: str
    handle: str
    token: str
    first_seen_at: int
    last_seen_at: int


STRAYS_TENANT, STRAYS_NAME = "", "strays"
"""Fleet of the deployment that pays for orphan machines whose fleet is unknown; stored while there are any."""


class StoredFleet(Record):
    """A fleet of a tenant. `stopped`: no machine is rented, and all are drained.

    job_id: the job that rents its own machines, with which the fleet ends; None for the fleet of a document. retired:
    the job has ended and no machine is left; the tick does not read the fleet any more.
    """

    tenant: str
    spec: FleetSpec
    version: int = 0
    stopped: bool = False
    stop_reason: str = ""
    """Why the fleet is stopped; empty if a user has stopped the fleet."""
    job_id: str | None = None
    retired: bool = False
    created_at: int
    updated_at: int
