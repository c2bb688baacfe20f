"""A provider of machines in virtual time, with a billing meter and injected faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.contract.fleets.fleet import FleetSpec
from functions.fleet.drivers.protocol import (
    AccountReport,
    Ambiguous,
    Created,
    CreateIntent,
    CreateResult,
    Leftover,
    NotCreated,
    ProviderUnavailable,
    RefusalKind,
    SshTarget,
)
from functions.fleet.records import Inventory, Offer, Sighting


@dataclass
class VirtualMachine:
    """A machine that bills from `created_at` until `ended_at`."""

    handle: str
    token: str
    usd_per_hour: float
    created_at: int
    host: str
    announced_usd_per_hour: float | None = None
    ended_at: int | None = None
    running: bool = True
    unknown_status: str = ""
    priced_at: int | None = None
    """Time of the last change of the price."""
    earlier_usd: float = 0.0
    """Bill until then."""

    def billed_usd(self, now: int) -> float:
        until = now if self.ended_at is None else self.ended_at
        since = self.created_at if self.priced_at is None else self.priced_at
        return self.earlier_usd + (until - since) / 3600 * self.usd_per_hour

    def reprice(self, usd_per_hour: float, now: int) -> None:
        """Change the price from now on."""
        self.earlier_usd, self.priced_at, self.usd_per_hour = self.billed_usd(now), now, usd_per_hour


@dataclass
class Faults:
    """Faults of the next calls; each counter falls by one at its use."""

    lost_answers: int = 0
    """Creates that take effect and whose answer is lost."""
    resets: int = 0
    """Creates without an effect and without an answer."""
    snatched: int = 0
    """Offers that are gone at the create."""
    incomplete: int = 0
    unreadable: int = 0
    ignored_destroys: int = 0
    """Destroys that the provider accepts and does not carry out."""
    hidden: int = 0
    """Inventories that do not list a machine yet; only machines younger than 90 s are ever hidden."""


@dataclass
class VirtualProvider:
    """A driver whose machines exist in memory. `now` is the virtual clock."""

    name: str = "loopback"
    price: float = 0.2
    slots: int = 100
    hides_hosts: bool = False
    repeatable: bool = False
    spot_slots: int = 0
    """The first offers, which are spot machines."""
    ends_at: int | None = None
    create_refusal: RefusalKind | None = None
    """Why each create is refused."""
    now: int = 0
    faults: Faults = field(default_factory=Faults)
    machines: list[VirtualMachine] = field(default_factory=list)
    min_interval_s: Mapping[str, float] = field(default_factory=dict)
    creates: list[CreateIntent] = field(default_factory=list)

    def _fault(self, name: str) -> bool:
        left = getattr(self.faults, name)
        if left:
            setattr(self.faults, name, left - 1)
        return bool(left)

    def alive(self) -> list[VirtualMachine]:
        return [one for one in self.machines if one.ended_at is None]

    def billed_usd(self) -> float:
        return sum(one.billed_usd(self.now) for one in self.machines)

    def vanish(self, machine: VirtualMachine) -> None:
        """End a machine without anybody's request."""
        machine.ended_at = self.now

    def quote(self, spec: FleetSpec) -> Sequence[Offer]:
        return [
            Offer(
                provider=self.name,
                ref=f"{self.name}-{self.now}-{at}",
                machine_ref=None if self.hides_hosts else f"host-{at}",
                gpu_model="RTX 4090",
                vram_gib=24,
                disk_gib=200,
                repeatable=self.repeatable,
                spot=at < self.spot_slots,
                ends_at=self.ends_at,
                usd_per_hour=self.price,
                boot_s=60,
            )
            for at in range(self.slots)
        ]

    def create(self, intent: CreateIntent) -> CreateResult:
        self.creates.append(intent)
        if self.create_refusal is not None:
            return NotCreated(reason="add credit", kind=self.create_refusal)
        if self._fault("snatched"):
            return NotCreated(reason="the offer is gone")
        if self._fault("resets"):
            return Ambiguous(reason="connection reset")
        machine = VirtualMachine(
            handle=f"{self.name}-{len(self.machines)}",
            token=intent.token,
            usd_per_hour=intent.offer.usd_per_hour,
            created_at=self.now,
            host=intent.offer.machine_ref or "",
        )
        self.machines.append(machine)
        if self._fault("lost_answers"):
            return Ambiguous(reason="timed out")
        return Created(handle=machine.handle)

    def inventory(self, prefix: str, now: int) -> Inventory:
        if self._fault("unreadable"):
            raise ProviderUnavailable("HTTP 502 with an HTML page")
        if self._fault("incomplete"):
            return Inventory(provider=self.name, at=now, complete=False)
        hides = self._fault("hidden")
        listed = [one for one in self.alive() if not (hides and now - one.created_at < 90)]
        return Inventory(
            provider=self.name,
            at=now,
            complete=True,
            sightings=[
                Sighting(
                    token=one.token,
                    handle=one.handle,
                    running=one.running,
                    unknown_status=one.unknown_status,
                    usd_per_hour=one.usd_per_hour,
                    announced_usd_per_hour=one.announced_usd_per_hour,
                    machine_ref=one.host,
                    created_at=one.created_at,
                )
                for one in listed
                if one.token.startswith(prefix)
            ],
        )

    def destroy(self, handle: str) -> bool:
        if not self._fault("ignored_destroys"):
            for one in self.alive():
                if one.handle == handle:
                    one.ended_at = self.now
        return True

    def accept_price(self, handle: str, usd_per_hour: float) -> None:
        machine = next(one for one in self.machines if one.handle == handle)
        machine.reprice(usd_per_hour, self.now)
        machine.announced_usd_per_hour = None

    def ssh_target(self, handle: str) -> SshTarget | None:
        return None

    def examine(self, prefix: str) -> AccountReport:
        return AccountReport(account=self.name)

    def remove_leftover(self, leftover: Leftover) -> None:
        raise AssertionError("this provider leaves nothing over")

    def logs(self, handle: str) -> str | None:
        return None

    def charged_usd(self, handle: str) -> float | None:
        return next((one.billed_usd(self.now) for one in self.machines if one.handle == handle), None)
