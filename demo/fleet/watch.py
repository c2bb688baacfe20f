"""Follow a fleet and its job through the API; tell each event at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.contract.fleets.fleet import FleetView
from baton.contract.jobs.history import AttemptView
from baton.contract.jobs.job import JobView
from demo.failure import DemoError
from demo.fleet.timeline import FleetHistory, JobMoment, Money, describe, describe_job, moment_of
from gpu_client.transport.api.client import BatonClient

POLL_S = 0.3


@dataclass(frozen=True)
class FleetStatus:
    """A fleet, its job and the job's attempts at one moment."""

    fleet: FleetView
    job: JobView
    attempts: list[AttemptView]

    @property
    def step(self) -> int:
        """Return the newest step that the newest attempt reported; 0 before its first report."""
        newest = self.attempts[-1].progress if self.attempts else None
        return newest.step if newest else 0


class FleetWatch:
    """Polls a fleet and its job into `history`. tell: receives the time and a sentence for each event."""

    def __init__(
        self,
        client: BatonClient,
        fleet: str,
        job_id: str,
        history: FleetHistory,
        tell: Callable[[int, str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._fleet, self._job_id = client, fleet, job_id
        self._history, self.tell = history, tell
        self._clock, self._sleep = clock, sleep

    def until(
        self,
        condition: Callable[[FleetStatus], bool],
        event: str,
        deadline_s: float,
        show: Callable[[FleetStatus], None] = lambda _: None,
    ) -> FleetStatus:
        """Poll until `condition` holds. Raises DemoError after `deadline_s`, or once the job has failed."""
        deadline = self._clock() + deadline_s
        while True:
            status = self.look()
            show(status)
            if condition(status):
                return status
            if status.job.failed_at is not None:
                reason = status.job.reason
                raise DemoError(
                    f"the job has failed, before {event}: {reason.message if reason else 'no reason given'}"
                )
            if self._clock() > deadline:
                waits = f"; the fleet waits: {status.fleet.waits}" if status.fleet.waits else ""
                raise DemoError(f"{event} took more than {deadline_s:.0f} s{waits}")
            self._sleep(POLL_S)

    def look(self) -> FleetStatus:
        """Read the fleet and the job once, and tell what is new."""
        status = FleetStatus(
            self._client.fleet(self._fleet),
            self._client.get_job(self._job_id),
            self._client.attempts(self._job_id).attempts,
        )
        at, history = status.fleet.at, self._history
        (bound,) = status.fleet.bounds
        if history.money and history.money[-1].at == at:
            history.money.pop()
        history.money.append(Money(at, bound.spent_usd, bound.reserved_usd))
        self._tell_events()
        machines = {one.epoch: history.name(one.machine_id) for one in status.attempts}
        now = moment_of(at, status.job, status.attempts)
        before: JobMoment | None = history.job[-1] if history.job else None
        history.job.append(now)
        for sentence in describe_job(before, now, machines):
            self.tell(at, sentence)
        return status

    def _tell_events(self) -> None:
        known = {(one.at, one.type, one.machine) for one in self._history.events}
        for event in reversed(self._client.fleet_events(self._fleet, limit=1000)):
            if (event.at, event.type, event.machine) not in known:
                self._history.events.append(event)
                self.tell(event.at, describe(event, self._history.name(event.machine)))
