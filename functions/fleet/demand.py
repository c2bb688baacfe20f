"""Decide how many machines a fleet starts, from its waiting jobs and its machines.

A fleet grows at once and shrinks by the idle timeout of each machine (`lifecycle.advance`), therefore a queue that is
empty for a moment gives no machine back.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.contract.fleet import FleetSpec
from baton.contract.fleet import MachineState as State
from functions.domain.jobs.job_selection import names_model, same_image
from functions.domain.ports import JobStore
from functions.domain.records import Job
from functions.fleet.machine_states import STARTING
from functions.fleet.records import Machine, StoredFleet

MAX_WAITING = 500
"""Waiting jobs of a fleet that one tick reads; the next tick reads the jobs that still wait."""


def waiting_jobs(jobs: JobStore, fleet: StoredFleet, *, shards: int) -> list[Job]:
    """Return claimable jobs of the fleet's queues, at most about MAX_WAITING.

    Each queue and shard gets an equal part, so that a long queue does not hide a short one. shards: partitions of each
    queue's waiting jobs.
    """
    # A document may name a queue twice; each job is counted once.
    places = [(queue, shard) for queue in dict.fromkeys(fleet.spec.queues) for shard in range(shards)]
    limit = max(1, MAX_WAITING // len(places))
    return [job for queue, shard in places for job in jobs.ready(fleet.tenant, queue, shard, limit=limit).items]


def unservable(job: Job, spec: FleetSpec) -> str | None:
    """Return why machines of the fleet can never run the job; None if they can."""
    needs = job.spec.requirements
    if job.queue not in spec.queues:
        return f"the job's queue {job.queue} is not among the queues of fleet {spec.name}"
    if needs.min_vram_gib and needs.min_vram_gib > spec.min_vram_gib:
        return f"needs {needs.min_vram_gib:g} GiB VRAM, fleet {spec.name} guarantees {spec.min_vram_gib:g}"
    if needs.min_disk_gib and needs.min_disk_gib > spec.disk_gib:
        return f"needs {needs.min_disk_gib:g} GiB disk, fleet {spec.name} rents {spec.disk_gib:g}"
    gpus = 1 if spec.gpu_models or spec.min_vram_gib else 0
    if needs.min_gpus and needs.min_gpus > gpus:
        plural = "" if needs.min_gpus == 1 else "s"
        return f"needs {needs.min_gpus} GPU{plural}, fleet {spec.name} guarantees {gpus}"
    if needs.gpu_models and not (
        spec.gpu_models and all(any(names_model(w, model) for w in needs.gpu_models) for model in spec.gpu_models)
    ):
        return f"needs one of {', '.join(needs.gpu_models)}, fleet {spec.name} may rent other GPU models"
    if needs.image and not same_image(needs.image, spec.image or ""):
        return f"needs the image {needs.image}, fleet {spec.name} starts {spec.image or 'the default image'}"
    return None


def missing_machines(spec: FleetSpec, machines: Sequence[Machine], waiting: Sequence[Job]) -> int:
    """Return the number of machines to start now; 0 for none.

    machines: every machine of the fleet that has not ended. waiting: claimable jobs of the fleet's queues.
    """
    alive = [machine for machine in machines if not machine.state.ended]
    free = sum(machine.state in STARTING or machine.state is State.READY for machine in alive)
    busy = sum(machine.state is State.BUSY for machine in alive)
    demand = sum(unservable(job, spec) is None for job in waiting)
    wanted = max(spec.min, busy + demand)
    return max(0, min(wanted - busy - free, spec.max - len(alive)))
