"""Decide how many machines a fleet starts, from its waiting jobs and its machines.

A fleet grows at once and shrinks by the idle timeout of each machine (`lifecycle.advance`), therefore a queue that is
empty for a moment gives no machine back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.fleet import MachineState as State
from baton.contract.jobs.job import JobState
from functions.domain.jobs.job_selection import names_model, same_image
from functions.domain.ports import JobStore
from functions.domain.records import Job
from functions.fleet.machine_states import STARTING
from functions.fleet.records import Machine, StoredFleet

MAX_WAITING = 500
"""Waiting jobs of a fleet that one tick reads; the next tick reads the jobs that still wait."""

HISTORY = 100
"""Newest completed jobs of a tenant that are read."""


def waiting_jobs(jobs: JobStore, fleet: StoredFleet, *, shards: int) -> list[Job]:
    """Return claimable jobs of the fleet's queues, at most about MAX_WAITING.

    Each queue and shard gets an equal part, so that a long queue does not hide a short one. shards: partitions of each
    queue's waiting jobs.
    """
    # A document may name a queue twice; each job is counted once.
    places = [(queue, shard) for queue in dict.fromkeys(fleet.spec.queues) for shard in range(shards)]
    limit = max(1, MAX_WAITING // len(places))
    return [job for queue, shard in places for job in jobs.ready(fleet.tenant, queue, shard, limit=limit).items]


def completed_jobs(jobs: JobStore, tenant: str) -> Sequence[Job]:
    """Return the tenant's newest completed jobs, from which the running times of recipes are taken."""
    return jobs.list_jobs(tenant, state=JobState.COMPLETE, limit=HISTORY, newest_first=True).items


def unservable(job: Job, spec: FleetSpec) -> str | None:
    """Return why machines of the fleet can never run the job, with the field of the document; None if they can."""
    needs = job.spec.requirements
    if job.queue not in spec.queues:
        return f"the job's queue {job.queue} is not among the queues of fleet {spec.name}"
    lacking = spec.tags.items() - job.spec.tags.items()
    if lacking:
        return f"lacks the tag {'='.join(min(lacking))}, fleet {spec.name} serves only jobs with the tag (tags)"
    if needs.min_vram_gib and needs.min_vram_gib > spec.min_vram_gib:
        return (
            f"needs {needs.min_vram_gib:g} GiB VRAM, fleet {spec.name} guarantees {spec.min_vram_gib:g} (min_vram_gib)"
        )
    if needs.min_disk_gib and needs.min_disk_gib > spec.disk_gib:
        return f"needs {needs.min_disk_gib:g} GiB disk, fleet {spec.name} rents {spec.disk_gib:g} (disk_gib)"
    gpus = 1 if spec.gpu_models or spec.min_vram_gib else 0
    if needs.min_gpus and needs.min_gpus > gpus:
        plural, field = ("", " (min_vram_gib, gpu_models)") if needs.min_gpus == 1 else ("s", "")
        return f"needs {needs.min_gpus} GPU{plural}, fleet {spec.name} guarantees {gpus}{field}"
    if needs.gpu_models and not (
        spec.gpu_models and all(any(names_model(w, model) for w in needs.gpu_models) for model in spec.gpu_models)
    ):
        return f"needs one of {', '.join(needs.gpu_models)}, fleet {spec.name} may rent other GPU models (gpu_models)"
    if needs.image and not same_image(needs.image, spec.image or ""):
        return f"needs the image {needs.image}, fleet {spec.name} starts {spec.image or 'the default image'} (image)"
    return None


def without_fleet(waiting: Sequence[Job], specs: Sequence[FleetSpec]) -> str:
    """Return how many waiting jobs no fleet can run, and why the first fleet cannot run one; empty if each has a fleet.

    specs: all fleets of the tenant, the one whose jobs wait first.
    """
    left = [job for job in waiting if all(unservable(job, spec) is not None for spec in specs)]
    if not left:
        return ""
    many = "1 waiting job, which" if len(left) == 1 else f"{len(left)} waiting jobs, the first"
    return f"no fleet can run {many} {unservable(left[0], specs[0])}"


FleetMachines = tuple[FleetSpec, Sequence[Machine]]
"""A fleet's document with the fleet's machines."""


def missing_machines(
    spec: FleetSpec, machines: Sequence[Machine], waiting: Sequence[Job], others: Sequence[FleetMachines] = ()
) -> int:
    """Return the number of machines to start now; 0 for none.

    machines: every machine of the fleet that has not ended. waiting: claimable jobs of the fleet's queues. others: the
    other fleets of the tenant, whose free machines will take those jobs that they can run.
    """
    alive = [machine for machine in machines if not machine.state.ended]
    busy = sum(machine.state is State.BUSY for machine in alive)
    below_min = spec.min - busy - _free(alive)
    return max(0, min(max(unserved(waiting, spec, alive, others), below_min), spec.max - len(alive)))


def unserved(
    waiting: Sequence[Job], spec: FleetSpec, machines: Sequence[Machine], others: Sequence[FleetMachines] = ()
) -> int:
    """Count the jobs that machines of the fleet can run and no free machine takes."""
    jobs = [job for job in waiting if unservable(job, spec) is None]
    return len(jobs) - _served(jobs, [(spec, machines), *others])


def _free(machines: Sequence[Machine]) -> int:
    """Count the machines that will take a job without another start."""
    return sum(machine.state in STARTING or machine.state is State.READY for machine in machines)


def _pools(jobs: Sequence[Job], fleets: Sequence[FleetMachines]) -> Iterator[FleetMachines]:
    """Yield the machines of each fleet: those that a job avoids one by one, all others together."""
    avoided = {machine for job in jobs for machine in job.avoid}
    for spec, machines in fleets:
        yield spec, [machine for machine in machines if machine.id not in avoided]
        yield from ((spec, [machine]) for machine in machines if machine.id in avoided)


def _served(jobs: Sequence[Job], fleets: Sequence[FleetMachines]) -> int:
    """Count the jobs that free machines can run, each machine one job: a maximum matching, by augmenting paths."""
    pools = list(_pools(jobs, fleets))
    room = [_free(machines) for _, machines in pools]
    options = [
        [
            at
            for at, (spec, machines) in enumerate(pools)
            if room[at] and unservable(job, spec) is None and not any(one.id in job.avoid for one in machines)
        ]
        for job in jobs
    ]
    held: list[list[int]] = [[] for _ in pools]

    def place(job: int, seen: set[int]) -> bool:
        for at in options[job]:
            if at in seen:
                continue
            seen.add(at)
            if len(held[at]) < room[at]:
                held[at].append(job)
                return True
            for other in held[at]:
                if place(other, seen):
                    held[at][held[at].index(other)] = job
                    return True
        return False

    return sum(place(job, set()) for job in range(len(jobs)))
