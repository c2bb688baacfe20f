"""Rent machines for one job: the fleet of the job, which the transaction of the job stores."""

from __future__ import annotations

from pydantic import ValidationError

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import CONTAINER_PROVIDERS, FleetSpec
from baton.contract.fleets.money import Budget
from baton.contract.jobs.job import JobSubmit
from baton.contract.jobs.rent import RentSpec, fleet_of
from functions.api.fleet.store import fleet_time, require_store
from functions.api.http.context import ApiCall, Context
from functions.domain.errors import Refusal
from functions.domain.jobs.transaction import PutFleet
from functions.domain.records import Job, Spec
from functions.fleet.records import StoredFleet

MAX_RENTING = 100
"""Jobs of a tenant that rent their own machines at a time. Each tick reads the fleets of all of them."""
DEFAULT_DISK_GIB = 40
GPU_VRAM_GIB = 1
"""VRAM of the smallest machine with a GPU."""
MAX_HOURS = 30 * 24
"""Longest life of one machine; the budget of the job ends nearly every machine before."""


def require_rentable(context: Context, call: ApiCall, bodies: list[JobSubmit]) -> None:
    """Refuse jobs that name a queue beside `rent`, and more renting jobs than a tenant may have."""
    renting = [body for body in bodies if body.rent is not None]
    if any("queue" in body.model_fields_set for body in renting):
        detail = "A job with a queue beside rent waits for nobody: a job that rents its machine has a queue of its own."
        raise Refusal(ErrorCode.INVALID_VALUE, detail, field="queue")
    now = [fleet for fleet in require_store(context).fleets(call.tenant) if fleet.job_id and not fleet.stopped]
    if len(now) + len(renting) > MAX_RENTING:
        detail = (
            f"The tenant would have {len(now) + len(renting)} jobs that rent their own machines, at most {MAX_RENTING} "
            "are allowed; one fleet with max machines serves many jobs."
        )
        raise Refusal(ErrorCode.CONFLICT, detail, field="rent")


def plan_fleet(context: Context, call: ApiCall, job: Job, rent: RentSpec) -> PutFleet:
    """Return the write of a new job's fleet. Refuses a job that no rented machine can run."""
    name, now = fleet_of(job.id), fleet_time(context, call)
    other = require_store(context).fleet(call.tenant, name)
    if other is not None and other.job_id != job.id:
        raise Refusal(ErrorCode.CONFLICT, f"The fleet {name} belongs to another job; submit the job again.")
    fleet = StoredFleet(
        tenant=call.tenant,
        spec=_build_fleet(job.spec, rent, name),
        version=1,
        job_id=job.id,
        created_at=now,
        updated_at=now,
    )
    return _put(fleet)


def reopen_fleet(context: Context, call: ApiCall, job: Job) -> PutFleet:
    """Return the write that lets the fleet of a job rent again, within what is left of the budget."""
    name = fleet_of(job.id)
    fleet = require_store(context).fleet(call.tenant, name)
    if fleet is None:
        raise RuntimeError(f"job {job.id} rents machines and has no fleet {name}")
    updates = {"version": fleet.version + 1, "stopped": False, "stop_reason": "", "retired": False}
    return _put(fleet.model_copy(update={**updates, "updated_at": fleet_time(context, call)}))


def _put(fleet: StoredFleet) -> PutFleet:
    return PutFleet(tenant=fleet.tenant, name=fleet.spec.name, version=fleet.version, record=fleet)


def _build_fleet(spec: Spec, rent: RentSpec, name: str) -> FleetSpec:
    """Return the document of a fleet whose every machine meets the requirements of the job."""
    needs = spec.requirements
    if (needs.min_gpus or 0) > 1:
        detail = f"The job needs {needs.min_gpus} GPUs; a rented machine has one GPU for sure."
        raise Refusal(ErrorCode.INVALID_VALUE, detail, field="requirements.min_gpus")
    containers = [one for one in rent.providers if one in CONTAINER_PROVIDERS]
    if containers and needs.image is None:
        detail = f"Machines of {', '.join(containers)} start a container, therefore image is required."
        remedy = "Set requirements.image in the job file."
        raise Refusal(ErrorCode.INVALID_VALUE, detail, field="requirements.image", remedy=remedy)
    try:
        return FleetSpec(
            name=name,
            providers=rent.providers,
            gpu_models=needs.gpu_models,
            min_vram_gib=needs.min_vram_gib or (GPU_VRAM_GIB if needs.min_gpus else 0),
            disk_gib=max(1, needs.min_disk_gib or DEFAULT_DISK_GIB),
            image=needs.image,
            queues=[name],
            max=spec.nodes.max if spec.nodes is not None else 1,
            max_usd_per_hour=rent.max_usd_per_hour or rent.budget_usd,
            max_hours=MAX_HOURS,
            budget=Budget(total_usd=rent.budget_usd),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        detail = f"No machine can be rented for the requirements of the job: {place}: {first['msg']}."
        raise Refusal(ErrorCode.INVALID_VALUE, detail, field="requirements") from None
