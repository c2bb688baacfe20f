"""Correct the risk that an offer names by the history of its provider, GPU model and host. Pure.

Little history changes little: the offer's own numbers count like PRIOR_HOURS of rent and PRIOR_STARTS starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from functions.fleet.records import Machine, Offer, Quarantine, Reputation

PRIOR_HOURS = 48.0
PRIOR_STARTS = 3
HOST_FAILURES_COUNT_PER_HOUR = 1 / 24
"""Interruptions per hour that each recent failure of a host adds: one more loss a day."""
HostFailure = Literal["boot", "loss", "shortfall", "slow", "hardware"]
QUARANTINE_S: dict[HostFailure, int] = {
    "boot": 6 * 3600,
    "loss": 24 * 3600,
    "shortfall": 6 * 3600,
    "slow": 6 * 3600,
    "hardware": 30 * 24 * 3600,
}
"""First time in which a host is not rented: it did not boot, vanished with a job, measured less than its fleet asks
for, trained far less than the other nodes of a training, or has other hardware than offered. Each further failure
doubles the time."""
LONGEST_DOUBLED_S = 7 * 24 * 3600


def quarantine(
    machine: Machine, failure: HostFailure, earlier: Mapping[str, Quarantine], now: int
) -> Quarantine | None:
    """Return the quarantine of the machine's host after a failure; None where the provider hides its hosts.

    earlier: all quarantines by host, ended ones included.
    """
    if machine.offer.machine_ref is None:
        return None
    host = host_of(machine.offer)
    failures = earlier[host].failures + 1 if host in earlier else 1
    first_s = QUARANTINE_S[failure]
    lasts_s = max(first_s, min(first_s * 2 ** (failures - 1), LONGEST_DOUBLED_S))
    return Quarantine(host=host, until=now + lasts_s, failures=failures, reason=machine.reason)


def host_of(offer: Offer) -> str:
    """Return the key under which the failures of an offer's host are stored."""
    return f"{offer.provider}:{offer.machine_ref}"


def kind_of(offer: Offer) -> str:
    """Return the key under which the history of an offer's provider and GPU model is stored."""
    return f"{offer.provider}:{offer.gpu_model or 'none'}"


def after_end(before: Reputation | None, machine: Machine) -> Reputation:
    """Return the history after the end of a machine that existed."""
    known = before or Reputation(kind=kind_of(machine.offer))
    begun = machine.created_at or machine.requested_at or machine.since
    until = machine.absences[0] if machine.absences else machine.since
    booted_s = None if machine.enrolled_at is None else max(0, machine.enrolled_at - begun)
    return known.model_copy(
        update={
            "starts": known.starts + 1,
            "hours": known.hours + max(0, until - begun) / 3600,
            "losses": known.losses + (machine.lost_at is not None),
            "registered": known.registered + (booted_s is not None),
            "register_s": known.register_s + (booted_s or 0),
        }
    )


def weigh(
    offers: Sequence[Offer], history: Mapping[str, Reputation], failed_hosts: Mapping[str, Quarantine]
) -> list[Offer]:
    """Return the offers with the interruptions and boot times to expect.

    history: by `kind_of`. failed_hosts: recent quarantines by `provider:machine_ref`, ended ones included.
    """
    return [_weigh(one, history.get(kind_of(one)), failed_hosts.get(host_of(one))) for one in offers]


def _weigh(offer: Offer, known: Reputation | None, failed: Quarantine | None) -> Offer:
    if known is None and failed is None:
        return offer
    known = known or Reputation(kind=kind_of(offer))
    rate = (PRIOR_HOURS * offer.interruptions_per_hour + known.losses) / (PRIOR_HOURS + known.hours)
    boot_s = (PRIOR_STARTS * offer.boot_s + known.register_s) / (PRIOR_STARTS + known.registered)
    of_host = HOST_FAILURES_COUNT_PER_HOUR * failed.failures if failed else 0.0
    return offer.model_copy(update={"interruptions_per_hour": rate + of_host, "boot_s": boot_s})
