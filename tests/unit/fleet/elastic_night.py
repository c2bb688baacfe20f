"""Nights of elastic jobs: seats of one job train together, from the moment that `min` of them have machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from baton.contract.elastic.nodes import NodesSpec
from baton.contract.elastic.world import RoundReport
from baton.contract.jobs.job import JobState, Progress
from functions.domain.records import Job, Spec
from functions.domain.seat_records import Seat, SeatMark
from functions.domain.worlds.world_record import WorldNode, WorldRecord
from functions.fleet.records import Machine
from tests.kits.api.factories import make_job
from tests.twins.provider import VirtualProvider
from tests.unit.fleet.night import Night, Training
from tests.unit.fleet.test_fleet_nights import spec

ELASTIC = "job-elastic"


def make_seats(least: int, most: int, job: str = ELASTIC) -> list[Job]:
    """Make the waiting seats of an elastic job."""
    return [
        make_job(id=f"{job}-{place}", spec=Spec(command=["train"], seat=Seat(job=job, seat=place, min=least, max=most)))
        for place in range(most)
    ]


@dataclass
class ElasticNight(Night):
    """Night with one elastic job, whose seats are trainings."""

    nodes: NodesSpec = field(default_factory=lambda: NodesSpec(max=1))
    formed: bool = False
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens of each machine in a round, if not 1000."""
    rounds: int = 0
    checkpoint_step: int | None = None
    round_s: float = 60
    progress: Progress | None = None
    """Progress of the stored job, of attempts that have ended."""
    newest: Progress | None = None
    """Progress of the present attempts."""

    def submit_elastic(self, hours: float) -> None:
        """Submit the elastic job, which owns the only fleet."""
        for seat in make_seats(self.nodes.min, self.nodes.max):
            self.trainings.append(Training(seat, left_s=int(hours * 3600)))
        (fleet,) = self.store.fleets()
        self.store.put_fleet(fleet.model_copy(update={"job_id": ELASTIC, "version": 2}))

    @property
    def seats(self) -> list[Training]:
        return [one for one in self.trainings if one.job.spec.seat is not None]

    def read_world(self, job_id: str) -> WorldRecord | None:
        if not self.formed or job_id != ELASTIC:
            return None
        members = [
            WorldNode(
                node=f"{place}.1.{place:08x}",
                machine_id=one.on,
                joined_at=self.now,
                recent_tokens=[self.tokens.get(one.on or "", 1000)] * min(self.rounds, 8),
            )
            for place, one in enumerate(self.seats)
            if one.on is not None
        ]
        newest = range(max(0, self.rounds - 8), self.rounds)
        rounds = [RoundReport(round=one, epoch=1, contributors=len(members), round_s=self.round_s) for one in newest]
        return WorldRecord(version=1, epoch=1, round=self.rounds, members=members, rounds=rounds)

    def read_progress(self, job: Job) -> Job:
        return job.model_copy(update={"progress": self.newest or job.progress})

    def _read_jobs(self, job_ids: Any) -> list[Job]:
        found = super()._read_jobs(job_ids)
        if ELASTIC in job_ids:
            done = ELASTIC in self.canceled or any(one.left_s <= 0 for one in self.seats)
            state = JobState.COMPLETE if done else JobState.RUNNING
            marks = [SeatMark(epoch=1, running=one.on is not None) for one in self.seats]
            step = {"checkpoint_step": self.checkpoint_step, "progress": self.progress}
            spec = Spec(command=["train"], nodes=self.nodes)
            found.append(make_job(id=ELASTIC, spec=spec, state=state, seats=marks, **step))
        return found

    def work(self) -> None:
        held = [one for one in self.seats if one.on is not None]
        self.formed = (self.formed or len(held) >= self.nodes.min) and bool(held)
        self.rounds += self.formed
        super().work()
        if any(one.left_s <= 0 for one in self.seats):
            for one in self.seats:
                one.left_s, one.on = 0, None

    def _worker(self, machine: Machine, training: Training | None, *, booted: bool) -> Machine:
        if training is not None and training.job.spec.seat is not None and not self.formed:
            training.left_s += 60  # A node that waits for others trains nothing.
        return super()._worker(machine, training, booted=booted)


def make_elastic_night(least: int, most: int, hours: float = 1, **provider: Any) -> ElasticNight:
    night = ElasticNight(
        spec(name="rent-0badcafe", max=most, budget={"total_usd": 10}),
        {"loopback": VirtualProvider(**provider)},
        nodes=NodesSpec(min=least, max=most),
    )
    night.submit_elastic(hours)
    return night
