"""Show and change the world of an elastic job: join, propose an epoch, report, exclude nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.contract.elastic.round_advice import advise_rounds
from baton.contract.elastic.world import EpochProposal, ExcludeRequest, JoinRequest, WorldReport, WorldView
from baton.contract.errors import ErrorCode
from baton.contract.names import Scope
from functions.api.http.context import ApiCall, Context, require_job
from functions.api.worker.lease_guard import WRITE_TRIES, require_lease
from functions.domain.errors import FenceBroken, Refusal, WriteConflict
from functions.domain.jobs.transaction import CheckLease, Put, Transaction, Write, update_job
from functions.domain.records import Job, Lease
from functions.domain.seat_records import Seat
from functions.domain.worlds import membership as rules
from functions.domain.worlds.data_pool import DataRecord
from functions.domain.worlds.seat_ids import seat_ids
from functions.domain.worlds.world_events import WorldEvent, describe_epoch, describe_exclusion, describe_repairs
from functions.domain.worlds.world_record import Leases, WorldRecord, WorldTensors, view_world

Decided = tuple[WorldRecord | None, Sequence[Write]]
"""Next world, None for no change, and other writes of the same transaction."""
Decide = Callable[[WorldRecord | None, Lease, Leases], Decided]
"""Decision on a world, the caller's lease and the leases of all seats."""


def show(context: Context, call: ApiCall) -> WorldView:
    """Show the world of an elastic job to users, and to the nodes of its seats."""
    job = require_job(context, call, call.path["id"])
    if job.spec.seat is not None:
        seat = job.spec.seat
        require_lease(context, call.fence(job.id))
        world = context.jobs.read(WorldRecord, seat.job)
        return _view(context, call, seat, world, read_leases(context, seat))
    if Scope.SUBMIT not in call.principal.scopes:
        detail = "A worker reads the world by the id of its seat, with the lease token of its attempt."
        raise Refusal(ErrorCode.WRONG_SCOPE, detail, field="x-api-key")
    seat = _view_seats(job)
    world = context.jobs.read(WorldRecord, job.id)
    data = context.jobs.read(DataRecord, job.id)
    # Users decide nothing by these leases, therefore the cheaper read is enough.
    leases = read_leases(context, seat, consistent=False)
    view = _view(context, call, seat, world, leases, ended=job.state.terminal)
    advice = advise_rounds(view.rounds, view.program)
    return view.model_copy(update={"advice": advice, "shards": None if data is None else data.view()})


def exclude(context: Context, call: ApiCall) -> WorldView:
    """Begin an epoch without some members, by an operator's decision: no majority is required."""
    body: ExcludeRequest = call.body
    for _ in range(WRITE_TRIES):
        job = require_job(context, call, call.path["id"])
        seat = _view_seats(job)
        if job.state.terminal:
            raise Refusal(
                ErrorCode.JOB_FINISHED, f"Job {job.id} is {job.state.value}; its world has ended.", field="id"
            )
        world = context.jobs.read(WorldRecord, job.id)
        after = rules.exclude(world, body.seats)
        assert world is not None
        events = _add_events(context, call, seat, [describe_exclusion(world, after)])
        try:
            context.jobs.apply(Transaction((*events, Put(owner=job.id, record=after))))
        except WriteConflict:
            continue
        return _view(context, call, seat, after, read_leases(context, seat))
    raise build_conflict()


def join(context: Context, call: ApiCall) -> WorldView:
    """Ask to become a member; a repeat updates the request."""
    body: JoinRequest = call.body
    seat = require_seat(context, call)

    def decide(world: WorldRecord | None, lease: Lease, leases: Leases) -> Decided:
        known = world.program if world is not None else None
        another = known is not None and known.model_sha256 != body.program.model_sha256
        stored = context.jobs.read(WorldTensors, seat.job) if another else None
        after = rules.join(world, body, seat, lease, leases, tensors=stored.tensors if stored is not None else ())
        defines = after is not None and after.program != known
        tensors = Put(owner=seat.job, record=WorldTensors(tensors=body.program.tensors))
        return after, [tensors] if defines else []

    return _change(context, call, seat, decide)


def propose(context: Context, call: ApiCall) -> WorldView:
    """Replace the membership of an epoch by the membership of the next epoch."""
    body: EpochProposal = call.body
    seat = require_seat(context, call)

    def decide(world: WorldRecord | None, lease: Lease, leases: Leases) -> Decided:
        after = rules.propose(world, body, seat, lease, leases, now=call.now)
        if world is None or after is None:
            return after, ()
        return after, _add_events(context, call, seat, describe_epoch(world, after, body))

    return _change(context, call, seat, decide)


def report(context: Context, call: ApiCall) -> WorldView:
    """Store the newest rounds and the states of nodes, as a member has seen both."""
    body: WorldReport = call.body
    seat = require_seat(context, call)

    def decide(world: WorldRecord | None, lease: Lease, _: Leases) -> Decided:
        after = rules.report(world, body, seat, lease)
        return after, _add_events(context, call, seat, describe_repairs(world, body))

    return _change(context, call, seat, decide)


def _add_events(context: Context, call: ApiCall, seat: Seat, events: Sequence[WorldEvent]) -> Sequence[Write]:
    """Return the writes that add events to the history of the elastic job; empty without events or after its end."""
    job = context.jobs.get(seat.job) if events else None
    if job is None or job.state.terminal:
        return ()
    change = update_job(job, call.now)
    for type_, data in events:
        change = change.with_event(type_, call.now, **data)
    return change.writes


def read_leases(context: Context, seat: Seat, *, consistent: bool = True) -> dict[int, Lease]:
    """Read the leases of all seats of an elastic job, by seat."""
    ids = seat_ids(seat.job, seat.max)
    found = context.leases.get_many(ids, consistent=consistent)
    return {place: found[one] for place, one in enumerate(ids) if one in found}


def require_seat(context: Context, call: ApiCall) -> Seat:
    """Return the seat that the call names. Refuses other jobs."""
    job = require_job(context, call, call.path["id"])
    if job.spec.seat is None:
        raise _build_not_elastic(job)
    return job.spec.seat


def _view_seats(job: Job) -> Seat:
    """Return a seat that stands for all seats of an elastic job. Refuses other jobs."""
    nodes = job.spec.nodes
    if nodes is None:
        raise _build_not_elastic(job)
    return Seat(job=job.id, seat=0, min=nodes.min, max=nodes.max)


def _build_not_elastic(job: Job) -> Refusal:
    if job.spec.nodes is not None:
        detail = f"Job {job.id} is elastic; its nodes call with the ids of their seats."
        return Refusal(ErrorCode.NOT_ELASTIC, detail, field="id", remedy="Call with the id of the claimed job.")
    return Refusal(ErrorCode.NOT_ELASTIC, f"Job {job.id} has no nodes.", field="id")


def _change(context: Context, call: ApiCall, seat: Seat, decide: Decide) -> WorldView:
    """Decide on the world and write the next world, again after a conflicting write.

    The world is read before the leases: a lease that ends after the read of the world is seen as ended.
    """
    fence = call.fence(call.path["id"])
    for _ in range(WRITE_TRIES):
        world = context.jobs.read(WorldRecord, seat.job)
        leases = read_leases(context, seat)
        lease = leases.get(seat.seat)
        if lease is None or not fence.admits(lease):
            raise fence.refusal(lease)
        after, beside = decide(world, lease, leases)
        if after is not None:
            world_write = Put(owner=seat.job, record=after)
            try:
                context.jobs.apply(Transaction((*beside, world_write, CheckLease(fence=fence))))
            except WriteConflict:
                continue
            except FenceBroken as broken:
                raise fence.refusal(broken.lease) from broken
        return _view(context, call, seat, after or world, leases)
    raise build_conflict()


def build_conflict() -> Refusal:
    """Return the refusal of a change after too many conflicting writes."""
    return Refusal(ErrorCode.CONFLICT, f"Other nodes changed the world during all {WRITE_TRIES} tries.")


def _view(
    context: Context,
    call: ApiCall,
    seat: Seat,
    world: WorldRecord | None,
    leases: Leases,
    *,
    ended: bool = False,
) -> WorldView:
    return view_world(seat.job, world, leases, least=seat.min, most=seat.max, ended=ended, now=call.now)
