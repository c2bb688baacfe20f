"""The calls of the workers on rented machines: enrolment and signs of life."""

from __future__ import annotations

from collections.abc import Sequence

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import EnrollAnswer, EnrollRequest, MachineHeartbeat, MachineOrders
from baton.contract.fleets.fleet import MachineState as State
from baton.contract.names import Scope
from functions.api.admin.keys import generate_key
from functions.api.fleet.store import fleet_clock, fleet_time, require_store
from functions.api.http.context import ApiCall, Context
from functions.api.machines.enrolment_keys import keep_key, revoke_key
from functions.api.machines.preflight import find_problem, rented_disk_gib
from functions.api.machines.workload_identity import require_identity
from functions.domain.access.api_keys import token_digest
from functions.domain.errors import Refusal, WriteConflict
from functions.fleet import lifecycle
from functions.fleet.machine_states import STARTING
from functions.fleet.records import Machine, Quarantine, StoredFleet, Terms

HEARTBEAT_S = 60
"""Interval between two signs of life of a worker, by the fleets' clock."""
SEEN_EVERY_S = 45
"""Shortest time between two stored signs of life without another change; heartbeats come a little early or late."""
ALONE_S = 900
"""Time without an answer after which a worker ends itself, by the fleets' clock."""
KEY_MARGIN_S = 3600
"""Life of a worker's key after the latest end of its machine."""
QUARANTINE_S = 30 * 86_400
"""Time in which a host whose hardware differs from its offer is not rented."""

MOVED = "the provider moved the machine to another host"

_WORKING = (State.REGISTERED, State.READY, State.BUSY, State.DRAINING)
_ENDING = (State.DRAINING, State.LOST, State.TERMINATING, State.GONE, State.FAILED)


def enroll(context: Context, call: ApiCall) -> EnrollAnswer:
    """Enrol a machine: compare its hardware with the offer, issue the API key of its worker."""
    body: EnrollRequest = call.body
    machine, now = _require_machine(context, call), fleet_time(context, call)
    fleet = require_store(context).fleet(machine.tenant, machine.fleet)
    if machine.state in STARTING - {State.BOOTING, State.REGISTERED}:
        raise Refusal(ErrorCode.CONFLICT, f"The create of {machine.id} is not recorded yet.", field="x-api-key")
    if machine.proves_identity:
        host = require_identity(context, machine, body.identity, call.now)
        machine = machine.model_copy(update={"offer": machine.offer.model_copy(update={"machine_ref": host})})
    if machine.enrolled_at is not None:
        return _enroll_again(context, call, machine, fleet)
    if machine.state is not State.BOOTING or fleet is None:
        raise _unknown(machine)
    registered = lifecycle.enrolled(machine, now)
    checked = lifecycle.checked(registered, find_problem(body, machine.offer, fleet.spec), now)
    _require_ready(context, machine, registered, checked)
    return _issue(context, call, machine, fleet, registered, checked)


def _require_ready(context: Context, before: Machine, *steps: Machine) -> None:
    """Store the end of a machine whose hardware is not as offered, and quarantine its host. Raises Refusal then."""
    ended = steps[-1]
    if ended.state is State.TERMINATING:
        _save(context, before, ended, steps)
        _quarantine(context, ended, ended.since)
        raise Refusal(ErrorCode.PREFLIGHT_FAILED, f"The machine {before.id}: {ended.reason}.")


def _enroll_again(context: Context, call: ApiCall, machine: Machine, fleet: StoredFleet | None) -> EnrollAnswer:
    """Enrol a container again that proves to be the enrolled one: its answer was lost, or its agent started anew.

    The hardware of the same container is not compared again, because its data fill a part of its disk by now. With the
    provider's proof of identity a new container is the machine, too: the provider has moved it to another host.
    """
    body: EnrollRequest = call.body
    same = body.nonce is not None and machine.enrolment_sha256 == token_digest(body.nonce)
    if not same and not machine.proves_identity:
        raise Refusal(ErrorCode.ENROLMENT_USED, f"The machine {machine.id} is {machine.state}.", field="x-api-key")
    # A new container has no checkpoint to save, therefore none that drains enrols.
    if machine.state not in _WORKING or fleet is None or (machine.state is State.DRAINING and not same):
        raise _unknown(machine)
    if machine.worker_key is not None:
        revoke_key(context.tokens, machine.worker_key, call.now)
    now = fleet_time(context, call)
    if same:
        return _issue(context, call, machine, fleet, machine.model_copy(update={"seen_at": now}))
    free = [lifecycle.released(machine, now).model_copy(update={"reason": MOVED})] if machine.job_id else []
    problem = find_problem(body, machine.offer, fleet.spec)
    if problem:
        _require_ready(context, machine, *free, lifecycle.checked(free[-1] if free else machine, problem, now))
    return _issue(context, call, machine, fleet, *(free or [machine.model_copy(update={"seen_at": now})]))


def _issue(context: Context, call: ApiCall, before: Machine, fleet: StoredFleet, *steps: Machine) -> EnrollAnswer:
    """Issue the API key of the worker and store the machine after its last step."""
    body: EnrollRequest = call.body
    clock = fleet_clock(context)
    ends_at = clock.server_time(before.ends_by) + KEY_MARGIN_S
    key, whole = generate_key(
        context.random,
        tenant=before.tenant,
        name=f"machine {before.id}",
        scopes=[Scope.WORKER],
        now=call.now,
        expires_at=ends_at,
        machine=call.principal.machine,
        queues=fleet.spec.queues,
    )
    # Before the machine names the key, because a machine whose key is missing could neither work nor enrol again.
    context.tokens.put_key(key)
    spec = fleet.spec
    terms = Terms(image=spec.image, disk_gib=rented_disk_gib(before.offer, spec), queues=spec.queues)
    after = steps[-1].model_copy(
        update={
            "worker_key": key.id,
            "enrolment_key": call.principal.key_id,
            "enrolment_sha256": token_digest(body.nonce) if body.nonce else None,
            "terms": (before.terms or terms).model_copy(update={"queues": spec.queues}),
            "usd_per_hour": lifecycle.running_price(before),
        }
    )
    transitions = [*steps[:-1], after] if after.state is not before.state else []
    _save(context, before, after, transitions)
    if body.nonce is not None:
        # Only the holder of the secret can use the enrolment key again.
        keep_key(context.tokens, call.principal.key_id, ends_at)
    return EnrollAnswer(
        machine_id=before.id,
        api_key=whole,
        queues=spec.queues,
        usd_per_hour=after.usd_per_hour,
        heartbeat_interval_s=clock.server_seconds(HEARTBEAT_S),
        gpu_model=before.offer.gpu_model,
        vram_gib=before.offer.vram_gib or None,
        disk_gib=rented_disk_gib(before.offer, spec) or None,
        image=spec.image,
    )


def _unknown(machine: Machine) -> Refusal:
    detail = f"The machine {machine.id} is {machine.state}: {machine.reason}."
    return Refusal(ErrorCode.MACHINE_UNKNOWN, detail, field="x-api-key")


def heartbeat(context: Context, call: ApiCall) -> MachineOrders:
    """Take a sign of life of a machine's worker and the job that the worker holds; answer with orders."""
    body: MachineHeartbeat = call.body
    machine, now = _require_machine(context, call), fleet_time(context, call)
    job_id = _held(context, machine, body.job_id)
    steps = _steps(machine, job_id, now)
    unseen_s = now - (machine.seen_at or 0)
    if steps or job_id != machine.job_id or unseen_s >= SEEN_EVERY_S:
        after = steps[-1] if steps else machine.model_copy(update={"seen_at": now, "job_id": job_id})
        machine = _save(context, machine, after, steps)
    clock = fleet_clock(context)
    return MachineOrders(
        state=machine.state,
        drain=machine.state in _ENDING,
        reason=machine.reason,
        alone_s=clock.server_seconds(ALONE_S),
        heartbeat_interval_s=clock.server_seconds(HEARTBEAT_S),
    )


def _held(context: Context, machine: Machine, job_id: str | None) -> str | None:
    """Return the job that the worker names if the machine holds the job's lease; None otherwise.

    The lease is read only when the job changes. The read is consistent, because a draining machine that seems to hold
    no job would end at once, without the checkpoint of the job that its worker has claimed a moment ago.
    """
    if job_id is None or job_id == machine.job_id:
        return job_id
    lease = context.leases.get(job_id)
    held = lease is not None and not lease.closed and (lease.tenant, lease.machine_id) == (machine.tenant, machine.id)
    return job_id if held else None


def _steps(machine: Machine, job_id: str | None, now: int) -> list[Machine]:
    """Return the machine after each transition that follows from the job that its worker holds."""
    steps: list[Machine] = []
    # A draining machine that has claimed another job in the meantime still needs the grace of a checkpoint.
    if (machine.state is State.BUSY and job_id != machine.job_id) or (
        machine.state is State.DRAINING and job_id is None
    ):
        steps.append(lifecycle.released(machine, now))
    at = steps[-1] if steps else machine
    if at.state is State.READY and job_id is not None:
        steps.append(lifecycle.claimed(at, job_id, now))
    return steps


def _require_machine(context: Context, call: ApiCall) -> Machine:
    """Return the machine to which the caller's key belongs."""
    fleet, _, token = (call.principal.machine or "").partition("/")
    if not token:
        raise Refusal(ErrorCode.MACHINE_UNKNOWN, "The API key is not the key of a machine.", field="x-api-key")
    machine = require_store(context).machine(call.tenant, fleet, token)
    if machine is None:
        raise Refusal(ErrorCode.MACHINE_UNKNOWN, f"The machine {token} was given back.", field="x-api-key")
    return machine


def _save(context: Context, before: Machine, after: Machine, steps: Sequence[Machine]) -> Machine:
    """Store a machine in place of the version before, with an event for each step; return the stored machine."""
    stored = after.model_copy(update={"version": before.version + 1})
    try:
        require_store(context).update_machine(stored, [one.event for one in steps])
    except WriteConflict as conflict:
        raise Refusal(ErrorCode.CONFLICT, f"Another call changed the machine {before.id}.") from conflict
    return stored


def _quarantine(context: Context, machine: Machine, now: int) -> None:
    if machine.offer.machine_ref is None:
        return
    host = f"{machine.provider}:{machine.offer.machine_ref}"
    earlier = require_store(context).quarantined(0).get(host)
    require_store(context).put_quarantine(
        Quarantine(
            host=host, until=now + QUARANTINE_S, failures=earlier.failures + 1 if earlier else 1, reason=machine.reason
        )
    )
