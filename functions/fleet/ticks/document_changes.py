"""Find the machines that the present document of their fleet would not rent any more. Pure.

Each returned reason begins with BY_DOCUMENT, because a machine that ends so did nothing wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.fleet import MachineState as State
from functions.fleet.breaker import BY_DOCUMENT
from functions.fleet.machine_states import STARTING, USABLE
from functions.fleet.offers.measurements import find_shortfall
from functions.fleet.offers.offer_ranking import mismatch
from functions.fleet.records import Machine


def outdated(machine: Machine, spec: FleetSpec) -> str:
    """Return how the machine differs from what the document asks for; empty if it does not.

    The price is no difference: `lifecycle.advance` compares the price of the moment with the cap.
    """
    if machine.provider not in spec.providers:
        return f"{BY_DOCUMENT} no longer names the provider {machine.provider}"
    problem = mismatch(machine.offer, spec) or find_shortfall(machine.measured, spec) or _differs(machine, spec)
    return f"{BY_DOCUMENT} has changed: the machine {problem}" if problem else ""


def _differs(machine: Machine, spec: FleetSpec) -> str:
    terms = machine.terms
    if terms is None:
        return ""
    if terms.image != spec.image:
        return f"runs the image {terms.image or 'of the deployment'}"
    if terms.disk_gib < spec.disk_gib:
        return f"has {terms.disk_gib:g} GiB disk, disk_gib is {spec.disk_gib:g}"
    if machine.enrolled_at is None:
        # The key of the worker will name the queues and tags of the document at that time.
        return ""
    removed = [queue for queue in terms.queues if queue not in spec.queues]
    if removed:
        return f"serves the queue {removed[0]}, which the document no longer names"
    narrower = spec.tags.items() - terms.tags.items()
    if narrower:
        return f"serves jobs without the tag {'='.join(min(narrower))}"
    wider = terms.tags.items() - spec.tags.items()
    added = [queue for queue in spec.queues if queue not in terms.queues]
    # A machine with a job finishes the job first, because the job is of a queue that the document names.
    if added and machine.state is not State.BUSY:
        return f"does not serve the queue {added[0]}"
    if wider and machine.state is not State.BUSY:
        return f"serves only jobs with the tag {'='.join(min(wider))}"
    return ""


def surplus(machines: Sequence[Machine], most: int) -> frozenset[str]:
    """Return the ids of the machines to give back so that `most` are left: idle, then starting, then busy ones.

    Machines on their way out do not count, because their end is decided.
    """
    staying = [one for one in machines if one.state in STARTING | USABLE]
    if len(staying) <= most:
        return frozenset()

    def turn(machine: Machine) -> tuple[int, int, str]:
        busy = 2 if machine.state is State.BUSY else 0 if machine.state is State.READY else 1
        # The newest first: the job of an older machine has done more work, an older boot is nearer to its end.
        return busy, -(machine.claimed_at or machine.since), machine.id

    return frozenset(one.id for one in sorted(staying, key=turn)[: len(staying) - most])


def given_back(machines: Sequence[Machine], spec: FleetSpec) -> list[str]:
    """Return the ids of the machines that would stay if `spec` did not replace the document of their fleet."""
    staying = [one for one in machines if one.state in STARTING | USABLE]
    over = surplus(staying, spec.max)
    return [
        one.id for one in staying if one.id in over or one.usd_per_hour > spec.max_usd_per_hour or outdated(one, spec)
    ]


EXCEEDS_MAX = f"{BY_DOCUMENT} permits fewer machines"
