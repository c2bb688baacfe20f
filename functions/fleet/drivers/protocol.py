"""Define the interface of providers: pure data in and out, one HTTP attempt per mutating call, no sleeping inside.

Retries, waits and deadlines belong to the controller. Therefore a test drives a driver against a fake provider in
milliseconds, and a lost answer is visible to the controller as `Ambiguous`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.registries import RegistryLogin
from functions.fleet.records import Inventory, Offer, Sighting

LONGEST_STATUS = 60


class RefusalKind(StrEnum):
    """Reason for which a provider refuses an account, as a stable code."""

    KEY = "provider_key_refused"
    PERMISSION = "provider_permission_missing"
    CREDIT = "provider_credit_exhausted"
    QUOTA = "provider_quota_reached"
    IMAGE = "provider_image_refused"
    INVALID = "provider_request_refused"


class ProviderUnavailable(Exception):  # noqa: N818 - a transient condition, not a fault of the product
    """The provider did not answer a read, or throttled. Nothing follows about any machine."""


class ProviderThrottled(ProviderUnavailable):
    """The provider answered a read with 429: the call came too early."""


class ProviderRefused(Exception):  # noqa: N818 - a normal outcome: key, credit or quota of the account
    """The provider refuses the account. `remedy`: what was refused and what would be right, in one line."""

    def __init__(self, kind: RefusalKind, remedy: str) -> None:
        super().__init__(f"{kind}: {remedy}")
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class CreateIntent:
    """Create call, complete before the call is made."""

    token: str
    """Name or label of the machine, unique for ever."""
    offer: Offer
    image: str | None
    disk_gib: float
    environment: Mapping[str, str]
    max_usd_per_hour: float
    login: RegistryLogin | None = None
    """Login at the registry of the image; None for an image that everybody may pull."""
    port: int | None = None
    """TCP port of the machine that other machines must reach, where the provider can open one; None for no port."""


@dataclass(frozen=True, kw_only=True)
class Created:
    """The provider made the machine."""

    handle: str
    usd_per_hour: float | None = None


@dataclass(frozen=True, kw_only=True)
class NotCreated:
    """The provider says for certain that the call made no machine.

    handle: a remainder that must be destroyed. kind: set if the provider would refuse its other offers, too.
    """

    reason: str
    handle: str | None = None
    kind: RefusalKind | None = None


@dataclass(frozen=True, kw_only=True)
class Ambiguous:
    """The call may have made a machine: a time-out, a reset connection, a 5xx, an unreadable answer."""

    reason: str


CreateResult = Created | NotCreated | Ambiguous


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A thing of this deployment that is billed without being a machine: a disk, a volume, a stopped contract."""

    kind: str
    handle: str
    token: str
    usd_per_hour: float | None = None


@dataclass(frozen=True, kw_only=True)
class AccountReport:
    """State of the provider's account, for `baton fleet login` and `baton fleet doctor`."""

    account: str
    """Name of the account at the provider, never the key."""
    balance_usd: float | None = None
    """Prepaid credit that is left; None if the provider bills afterwards."""
    problems: Sequence[str] = ()
    """Permissions that the key lacks or should not have, limits that are reached; each with its remedy."""
    foreign: Sequence[Sighting] = ()
    """Machines of the same account that carry no token of this deployment; Baton never touches them."""
    leftovers: Sequence[Leftover] = ()


@dataclass(frozen=True, kw_only=True)
class SshTarget:
    """Address of a machine's shell, as OpenSSH takes it."""

    host: str
    port: int
    user: str


class Driver(Protocol):
    """Provider of machines."""

    name: str
    min_interval_s: Mapping[str, float]
    """Shortest time between two calls, by `create`, `destroy`, `quote`, `accept`; a list has none."""

    def quote(self, spec: FleetSpec) -> Sequence[Offer]:
        """Return the offers of the moment. Raises ProviderUnavailable or ProviderRefused."""

    def create(self, intent: CreateIntent) -> CreateResult:
        """Send exactly one create request. Every failure without a certain outcome is Ambiguous."""

    def inventory(self, prefix: str, now: int) -> Inventory:
        """List all machines whose token begins with `prefix`.

        A page that cannot be read makes the inventory incomplete. Raises ProviderUnavailable if nothing can be read.
        """

    def destroy(self, handle: str) -> bool:
        """Ask for the end of a machine; True if the provider accepted the request or knows no such machine.

        Idempotent. The machine counts as gone only after two inventories without the machine.
        """

    def accept_price(self, handle: str, usd_per_hour: float) -> None:
        """Accept the price that the provider announced for a machine (`Sighting.announced_usd_per_hour`)."""

    def logs(self, handle: str) -> str | None:
        """Return the last output of a machine; None if the provider has none yet."""

    def ssh_target(self, handle: str) -> SshTarget | None:
        """Return the address of the machine's shell; None if machines of the provider have none."""

    def examine(self, prefix: str) -> AccountReport:
        """Ask the provider about the account, without a change. Raises ProviderUnavailable or ProviderRefused."""

    def remove_leftover(self, leftover: Leftover) -> None:
        """Delete a thing that `examine` reported; idempotent."""

    def charged_usd(self, handle: str) -> float | None:
        """Return what the provider's own record charges for a machine; None if the provider has no record.

        Raises ProviderUnavailable or ProviderRefused.
        """


def quote_unknown(status: str, known: Container[str]) -> str:
    """Return a provider's status in quotes and in one short line if it is not known; empty for a known one."""
    return "" if status in known else repr(status)[:LONGEST_STATUS]


@runtime_checkable
class HostMover(Protocol):
    """Driver of a provider that chooses the hosts by itself, and moves a machine to another one on demand."""

    def reallocate(self, handle: str, machine_ref: str) -> None:
        """Ask once for another host in place of `machine_ref`; do nothing if the machine has left the host.

        Raises ProviderUnavailable or ProviderRefused; the call may have taken effect.
        """
