"""Define the interface of providers: pure data in and out, one HTTP attempt per mutating call, no sleeping inside.

Retries, waits and deadlines belong to the controller. Therefore a test drives a driver against a fake provider in
milliseconds, and a lost answer is visible to the controller as `Ambiguous`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.contract.fleet import FleetSpec
from functions.fleet.records import Inventory, Offer


class ProviderUnavailable(Exception):  # noqa: N818 - a transient condition, not a fault of the product
    """The provider did not answer a read, or throttled. Nothing follows about any machine."""


class ProviderRefused(Exception):  # noqa: N818 - a normal outcome: key, credit or quota of the account
    """The provider refuses the account: the key, the credit or a quota. The message names the remedy."""


@dataclass(frozen=True, kw_only=True)
class CreateIntent:
    """Create call, complete before the call is made."""

    token: str
    """Name or label of the machine, unique for ever."""
    offer: Offer
    image: str | None
    environment: Mapping[str, str]
    max_usd_per_hour: float


@dataclass(frozen=True, kw_only=True)
class Created:
    """The provider made the machine."""

    handle: str
    usd_per_hour: float | None = None


@dataclass(frozen=True, kw_only=True)
class NotCreated:
    """The provider says for certain that the call made no machine. `handle`: a remainder that must be destroyed."""

    reason: str
    handle: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ambiguous:
    """The call may have made a machine: a time-out, a reset connection, a 5xx, an unreadable answer."""

    reason: str


CreateResult = Created | NotCreated | Ambiguous


class Driver(Protocol):
    """Provider of machines."""

    name: str
    min_interval_s: Mapping[str, float]
    """Shortest time between two calls, by `create`, `destroy`, `inventory`, `quote`."""

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

    def logs(self, handle: str) -> str | None:
        """Return the last output of a machine; None if the provider has none yet."""

    def charged_usd(self, handle: str) -> float | None:
        """Return what the provider's own record charges for a machine; None if the provider has no record.

        Raises ProviderUnavailable or ProviderRefused.
        """
