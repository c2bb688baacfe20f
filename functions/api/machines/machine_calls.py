"""The calls of the workers on rented machines: enrolment and signs of life."""

from __future__ import annotations

import os
from collections.abc import Sequence

from baton.contract.errors import ErrorCode
from baton.contract.fleets.events import FleetEventType
from baton.contract.fleets.fleet import (
    EnrollAnswer,
    EnrollRequest,
    FleetSpec,
    MachineHeartbeat,
    MachineOrders,
    PreflightDownload,
)
from baton.contract.fleets.fleet import MachineState as State
from baton.contract.names import CHECKPOINTS_BUCKET, Scope
from functions.api.admin.keys import generate_key
from functions.api.fleet.store import fleet_clock, fleet_time, require_store
from functions.api.http.context import ApiCall, Context
from functions.api.machines.enrolment_keys import keep_key, revoke_key
from functions.api.machines.preflight import find_problem, rented_disk_gib
from functions.api.machines.workload_identity import require_identity
from functions.domain.access.api_keys import token_digest
from functions.domain.errors import Refusal, WriteConflict
from functions.fleet import lifecycle
from functions.fleet.drivers.protocol import HostMover, ProviderRefused, ProviderUnavailable
from functions.fleet.machine_states import ENROLS_WITHIN_S, STARTING
from functions.fleet.offers.measurements import find_shortfall
from functions.fleet.offers.reputation import HostFailure, host_of, quarantine
from functions.fleet.records import FleetEvent, Machine, StoredFleet, Terms
from functions.fleet.store import FleetStore

HEARTBEAT_S = 60
"""Interval between two signs of life of a worker, by the fleets' clock."""
SEEN_EVERY_S = 45
"""Shortest time between two stored signs of life without another change; heartbeats come a little early or late."""
ALONE_S = 900
"""Time without an answer after which a worker ends itself, by the fleets' clock."""
KEY_MARGIN_S = 3600
"""Life of a worker's key after the latest end of its machine."""
PROBE_BYTES = 16 * 2**20
"""Size of the object whose download each machine times. Its bytes are random, because a proxy could compress others."""
PROBE_KEY = "preflight/random-16-mib"
PROBE_URL_S = 60

TELL_THE_INSTANCE = frozenset({"vast", "runpod"})
"""Providers whose containers know the id of their instance. A host of `ssh` may itself be a container of another."""

MOST_REALLOCATIONS = 3
MOST_REALLOCATIONS_A_DAY = 20
"""Most moves away from quarantined hosts, of one machine and of the deployment: after a move the provider keeps the
host from the account for a while, and the supply shrinks."""
DAY_S = 86_400

MOVED = "the provider moved the machine to another host"

_WORKING = frozenset({State.REGISTERED, State.READY, State.BUSY, State.DRAINING})
_ENDING = (State.DRAINING, State.LOST, State.TERMINATING, State.GONE, State.FAILED)


def preflight(context: Context, call: ApiCall) -> PreflightDownload:
    """Return the object whose download the machine times before it enrols; a tenant's first machine has it stored."""
    machine, objects = _require_machine(context, call), context.objects
    if machine.state not in STARTING | _WORKING:
        raise _unknown(machine)
    if objects.head(call.tenant, CHECKPOINTS_BUCKET, PROBE_KEY) is None:
        objects.create(call.tenant, CHECKPOINTS_BUCKET, PROBE_KEY, os.urandom(PROBE_BYTES))
    url = objects.presign_get(call.tenant, CHECKPOINTS_BUCKET, PROBE_KEY, expires_s=PROBE_URL_S)
    return PreflightDownload(url=url)


def enroll(context: Context, call: ApiCall) -> EnrollAnswer:
    """Enrol a machine: compare hardware and measurements with offer and document, issue the API key of its worker."""
    body: EnrollRequest = call.body
    machine, now = _require_machine(context, call), fleet_time(context, call)
    fleet = require_store(context).fleet(machine.tenant, machine.fleet)
    if machine.state in STARTING - {State.BOOTING, State.REGISTERED}:
        raise Refusal(ErrorCode.CONFLICT, f"The create of {machine.id} is not recorded yet.", field="x-api-key")
    if machine.provider in TELL_THE_INSTANCE and body.instance not in (None, machine.handle):
        # A provider may make two containers for one token; the tick destroys the container that is not the machine.
        detail = f"The instance {body.instance} is not the machine {machine.id}."
        raise Refusal(ErrorCode.MACHINE_UNKNOWN, detail, field="instance")
    if machine.proves_identity:
        host = require_identity(context, machine, body.identity, call.now)
        machine = machine.model_copy(update={"offer": machine.offer.model_copy(update={"machine_ref": host})})
    if machine.enrolled_at is not None:
        return _enroll_again(context, call, machine, fleet)
    if machine.state is not State.BOOTING or fleet is None:
        raise _unknown(machine)
    _leave_quarantined_host(context, call, machine, now)
    registered = lifecycle.enrolled(machine, now).model_copy(update={"measured": body.measured})
    problem, failure = _find_failure(body, machine, fleet.spec)
    checked = lifecycle.checked(registered, problem, now)
    _require_ready(context, failure, machine, registered, checked)
    return _issue(context, call, machine, fleet, registered, checked)


def _find_failure(found: EnrollRequest, machine: Machine, spec: FleetSpec) -> tuple[str, HostFailure]:
    """Return how the machine fails the preflight check, empty if it passes, and the kind of the failure."""
    problem = find_problem(found, machine.offer, spec)
    if problem:
        return problem, "hardware"
    shortfall = find_shortfall(found.measured, spec)
    return shortfall and f"the machine {shortfall}", "shortfall"


def _require_ready(context: Context, failure: HostFailure, before: Machine, *steps: Machine) -> None:
    """Store the end of a machine that fails the preflight check, and quarantine its host. Raises Refusal then."""
    ended = steps[-1]
    if ended.state is State.TERMINATING:
        _save(context, before, ended, [one.event for one in steps])
        store = require_store(context)
        quarantined = quarantine(ended, failure, store.quarantined(0), ended.since)
        if quarantined is not None:
            store.put_quarantine(quarantined)
        raise Refusal(ErrorCode.PREFLIGHT_FAILED, f"The machine {before.id}: {ended.reason}.")


def _leave_quarantined_host(context: Context, call: ApiCall, machine: Machine, now: int) -> None:
    """Let the provider move a machine away from a quarantined host, or end a machine that moved too often.

    Only where the provider chooses the host: elsewhere no machine is rented of a quarantined host. Raises Refusal then.
    """
    driver: object = context.drivers.get(machine.provider)
    store, host = require_store(context), machine.offer.machine_ref
    if not isinstance(driver, HostMover) or host is None or machine.handle is None:
        return
    found = store.quarantined(now).get(host_of(machine.offer))
    if found is None:
        return
    told = f"the host {host} is quarantined: {found.reason}"
    # A second call from the host follows a move that the provider did not confirm, and counts no more; the deadline of
    # the boot goes on from the first, therefore a host that comes back ends the machine.
    if host not in machine.reallocated:
        free = [lifecycle.released(machine, now).model_copy(update={"reason": MOVED})] if machine.job_id else []
        at, events = free[-1] if free else machine, [one.event for one in free]
        limit = _find_move_limit(store, machine, now)
        if limit:
            ended = lifecycle.move(at, State.TERMINATING, now, f"{told}, and {limit}")
            _save(context, machine, ended, [*events, ended.event])
            raise Refusal(ErrorCode.HOST_QUARANTINED, f"The machine {machine.id}: {ended.reason}.", field="identity")
        moved = lifecycle.reallocated(at, now)
        event = FleetEvent(
            at=now, type=FleetEventType.MACHINE_REALLOCATED, machine=machine.id, reason=told, usd=machine.spent_usd
        )
        _save(context, machine, moved, [*events, event])
        if machine.state is State.BOOTING:
            expires_at = fleet_clock(context).server_time(now + ENROLS_WITHIN_S)
            keep_key(context.tokens, call.principal.key_id, expires_at)
    try:
        driver.reallocate(machine.handle, host)
    except (ProviderUnavailable, ProviderRefused) as error:
        raise Refusal(ErrorCode.UNAVAILABLE, f"{told}; the move is asked for again: {error}.") from error
    raise Refusal(ErrorCode.HOST_QUARANTINED, f"The machine {machine.id}: {told}.", field="identity")


def _find_move_limit(store: FleetStore, machine: Machine, now: int) -> str:
    """Return which bound of moves is reached, empty for none; then one more move of the day is used up."""
    moves = len(machine.reallocated)
    if moves >= MOST_REALLOCATIONS:
        return f"the machine was moved {moves} times"
    # Each of so many rights can be claimed once a day.
    rights = (f"reallocate {number}" for number in range(MOST_REALLOCATIONS_A_DAY))
    if any(store.allow(machine.provider, right, now, DAY_S) for right in rights):
        return ""
    return f"the {MOST_REALLOCATIONS_A_DAY} moves of the deployment for today are used up"


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
    now = fleet_time(context, call)
    if machine.state is not State.DRAINING:
        _leave_quarantined_host(context, call, machine, now)
    if machine.worker_key is not None:
        revoke_key(context.tokens, machine.worker_key, call.now)
    if same:
        return _issue(context, call, machine, fleet, machine.model_copy(update={"seen_at": now}))
    moved = machine.model_copy(update={"measured": body.measured, "seen_at": now})
    free = [lifecycle.released(moved, now).model_copy(update={"reason": MOVED})] if machine.job_id else []
    problem, failure = _find_failure(body, machine, fleet.spec)
    if problem:
        _require_ready(context, failure, machine, *free, lifecycle.checked(free[-1] if free else moved, problem, now))
    return _issue(context, call, machine, fleet, *(free or [moved]))


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
        tags=fleet.spec.tags,
    )
    # Before the machine names the key, because a machine whose key is missing could neither work nor enrol again.
    context.tokens.put_key(key)
    spec = fleet.spec
    terms = Terms(image=spec.image, disk_gib=rented_disk_gib(before.offer, spec), queues=spec.queues, tags=spec.tags)
    after = steps[-1].model_copy(
        update={
            "worker_key": key.id,
            "enrolment_key": call.principal.key_id,
            "enrolment_sha256": token_digest(body.nonce) if body.nonce else None,
            "terms": (before.terms or terms).model_copy(update={"queues": spec.queues, "tags": spec.tags}),
            "usd_per_hour": lifecycle.running_price(before),
        }
    )
    transitions = [*steps[:-1], after] if after.state is not before.state else []
    _save(context, before, after, [one.event for one in transitions])
    if body.nonce is not None:
        # Only the holder of the secret can use the enrolment key again.
        keep_key(context.tokens, call.principal.key_id, ends_at)
    return EnrollAnswer(
        machine_id=before.id,
        api_key=whole,
        queues=spec.queues,
        usd_per_hour=clock.server_price(after.usd_per_hour),
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
    job_id = _verify_job(context, machine, body.job_id)
    steps = _steps(machine, job_id, now)
    unseen_s = now - (machine.seen_at or 0)
    if steps or job_id != machine.job_id or unseen_s >= SEEN_EVERY_S:
        after = steps[-1] if steps else machine.model_copy(update={"seen_at": now, "job_id": job_id})
        machine = _save(context, machine, after, [one.event for one in steps])
    clock = fleet_clock(context)
    return MachineOrders(
        state=machine.state,
        drain=machine.state in _ENDING,
        reason=machine.reason,
        alone_s=clock.server_seconds(ALONE_S),
        heartbeat_interval_s=clock.server_seconds(HEARTBEAT_S),
    )


def _verify_job(context: Context, machine: Machine, job_id: str | None) -> str | None:
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


def _save(context: Context, before: Machine, after: Machine, events: Sequence[FleetEvent]) -> Machine:
    """Store a machine with events in place of the version before; return the stored machine."""
    stored = after.model_copy(update={"version": before.version + 1})
    try:
        require_store(context).update_machine(stored, events)
    except WriteConflict as conflict:
        raise Refusal(ErrorCode.CONFLICT, f"Another call changed the machine {before.id}.") from conflict
    return stored
