"""Pause the creates of a fleet at a provider whose machines end one after another before they begin a job. Pure.

An image that crashes, or a network that blocks the API, ends every machine. Quarantines of hosts end such a loop only
at providers that name their hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from baton.contract.fleets.fleet import MachineState as State
from functions.domain.record_base import Record
from functions.fleet.machine_states import STARTING
from functions.fleet.records import Machine, StoredFleet

CODE = "machines_do_not_start"
"""Stable code of the pause, in the reason for which a fleet waits."""
FAILURES = 3
"""Machines that end without a job before the fleet pauses."""
FIRST_PAUSE_S = 900
LONGEST_PAUSE_S = 4 * 3600
FORGOTTEN_S = 24 * 3600
"""Time after which a training whose machines went back begins anew with the shortest pause."""
CONTRACT_ENDS = "the provider ends the machine soon"
LACKS_JOBS = frozenset({"no job for idle_timeout_s", "max_hours is over", CONTRACT_ENDS, "the budget is spent"})
"""Reasons for the end of a machine that worked well and found no job."""
UNEXPLAINED = "no record explained the machine"
"""Reason of a machine that was found at its provider: the fleet did not rent the machine now."""
BY_DOCUMENT = "the document"
"""Beginning of the reasons for the end of a machine that the document of its fleet no longer permits."""


class Breaker(Record):
    """Machines of a fleet at one provider that ended in a row before they began a job, and the pause that follows."""

    failures: int = 0
    failed_at: int = 0
    reason: str = ""
    """Why the last of the machines ended."""
    machine: str = ""
    """Id of that machine."""
    pause_s: int = 0
    paused_until: int = 0

    def after(self, machines: Iterable[Machine], begun: int) -> Breaker:
        """Return the breaker after those of `machines` that are on their way out without having held a job.

        begun: the last time at which a machine began a job, or the document changed; earlier failures do not count.
        """
        before = Breaker() if begun > self.failed_at else self
        failed = [one for one in machines if one.since >= begun and _failed(one)]
        if not failed:
            return before
        last = max(failed, key=lambda one: one.since)
        failures = before.failures + len(failed)
        if last.since < before.failed_at:
            return before.model_copy(update={"failures": failures})
        updates = {"failures": failures, "failed_at": last.since, "reason": last.reason, "machine": last.id}
        # A failure during a pause is of a machine that was rented before the pause.
        if failures >= FAILURES and last.since >= before.paused_until:
            pause_s = min(2 * before.pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
            updates |= {"pause_s": pause_s, "paused_until": last.since + pause_s}
        return before.model_copy(update=updates)

    def waits(self, machines: Iterable[Machine], now: int) -> str:
        """Return why no machine may start now; empty if one may."""
        if self.failures < FAILURES:
            return ""
        told = f"{CODE}: {self.failures} machines in a row ended before they began a job, the last: {self.reason}"
        told = f"{told}; its output: baton fleet logs {self.machine}"
        if now < self.paused_until:
            return f"{told}; next try at {datetime.fromtimestamp(self.paused_until, UTC):%H:%M} UTC"
        tries = any(one.state in STARTING or one.state is State.READY for one in machines)
        return f"{told}; one machine tries again" if tries else ""


class FormingPause(Record):
    """Pause after the machines of a training went back that waited for nodes; twice as long after each further try.

    A provider may offer machines that it does not have. Without a pause the other machines would wait, and be billed,
    again and again.
    """

    reason: str
    since: int
    pause_s: int

    def waits(self, fleet: StoredFleet, now: int) -> str:
        """Return why no machine may start for the training now; empty if one may."""
        until = self.since + self.pause_s
        if now >= until or fleet.updated_at > self.since:
            return ""
        return f"{self.reason}; next try at {datetime.fromtimestamp(until, UTC):%H:%M} UTC"


def pause_forming(
    before: Mapping[str, FormingPause], fleet: StoredFleet, job_id: str, reason: str, now: int
) -> dict[str, FormingPause]:
    """Return the pauses by elastic job after the machines of one went back; old ones are dropped."""
    kept = {key: one for key, one in before.items() if fleet.updated_at <= one.since and now < one.since + FORGOTTEN_S}
    pause_s = min(2 * kept[job_id].pause_s, LONGEST_PAUSE_S) if job_id in kept else FIRST_PAUSE_S
    return {**kept, job_id: FormingPause(reason=reason, since=now, pause_s=pause_s)}


def count_failure(
    before: Mapping[str, Breaker], fleet: StoredFleet, machine: Machine, group: Sequence[Machine]
) -> dict[str, Breaker]:
    """Return the breakers by provider after a machine that is gone. group: machines of the fleet."""
    breaker = before.get(machine.provider, Breaker())
    return {**before, machine.provider: breaker.after([machine], _last_begin(fleet, _at(machine.provider, group)))}


def find_pause(
    before: Mapping[str, Breaker], fleet: StoredFleet, provider: str, group: Sequence[Machine], now: int
) -> str:
    """Return why no machine of the provider may start now; empty if one may. group: machines of the fleet."""
    machines = _at(provider, group)
    return before.get(provider, Breaker()).after(machines, _last_begin(fleet, machines)).waits(machines, now)


def _at(provider: str, group: Sequence[Machine]) -> list[Machine]:
    return [one for one in group if one.provider == provider]


def _last_begin(fleet: StoredFleet, machines: Iterable[Machine]) -> int:
    """Return the last time at which one of the machines began a job, or the fleet's document changed."""
    return max([fleet.updated_at, *(one.claimed_at or 0 for one in machines)])


def _failed(machine: Machine) -> bool:
    """Return True for a machine on its way out that was rented in vain, whatever the demand."""
    if machine.state not in (State.LOST, State.TERMINATING) or machine.claimed_at is not None:
        return False
    if machine.reason == UNEXPLAINED or machine.reason.startswith(BY_DOCUMENT):
        return False
    return machine.enrolled_at is None or machine.reason not in LACKS_JOBS
