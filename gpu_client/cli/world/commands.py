"""Command group `baton world`: see nodes and rounds of an elastic training, exclude nodes, plan rounds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from baton.contract.elastic.nodes import MAX_NODES
from gpu_client.cli.core.formats import count, duration, require_finite, size
from gpu_client.cli.core.output import TableColumn
from gpu_client.cli.core.session import AsJson, JobIdArgument, resolve_job_id, session_of
from gpu_client.cli.world.planning import HOST_BYTES_PER_VALUE, INT4_HOST_BYTES_PER_VALUE, plan_rounds
from gpu_client.cli.world.view import NODES, node_rows, world_fields

_PLAN = (
    "codec",
    TableColumn("sent", right=True),
    TableColumn("reduce", right=True),
    TableColumn("inner steps, blocking", right=True),
    TableColumn("overlapped", right=True),
)
SHORT_S = 10
"""Durations below this limit are shown with a fraction."""


class _WorldGroup(TyperGroup):
    """Command group whose first argument may be the id of a job: `baton world ID` is `baton world show ID`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = [one for one in args if not one.startswith("-")]
        return super().parse_args(ctx, ["show", *args] if named and named[0] not in self.commands else args)


world = typer.Typer(cls=_WorldGroup, help="See and plan elastic trainings, on several machines.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the command group."""
    app.add_typer(world, name="world")


@world.command("show")
def show(context: typer.Context, job_id: JobIdArgument, as_json: AsJson = False) -> None:
    """Show the nodes of an elastic job and its last rounds; also: baton world ID."""
    session = session_of(context)
    with session.client() as client:
        view = client.world(resolve_job_id(client, job_id))
    if as_json:
        session.output.json(view)
        return
    session.output.fields([("job", view.job), *world_fields(view, unicode=session.output.supports_unicode)])
    if view.nodes:
        session.output.line("")
        session.output.table(NODES, node_rows(view, session.clock()))
    else:
        session.output.note("No node has joined.")


@world.command("exclude")
def exclude(
    context: typer.Context,
    job_id: JobIdArgument,
    seats: Annotated[list[int], typer.Argument(metavar="NODE...", min=0, help="Numbers of nodes, as in baton world.")],
    as_json: AsJson = False,
) -> None:
    """Let the other nodes go on without some nodes at once, for instance after a network is cut in two halves.

    By themselves, nodes exclude others only by majority, or after the leases of the others have ended. Excluded nodes
    that still run join again as soon as they reach the others.
    """
    session = session_of(context)
    with session.client() as client:
        view = client.exclude_nodes(resolve_job_id(client, job_id), seats)
    if as_json:
        session.output.json(view)
        return
    left = ", ".join(str(one.seat) for one in view.members) or "none"
    session.output.line(f"Epoch {view.epoch} begins with {count(len(view.members), 'node')}: {left}.")


@world.command("plan")
def plan(
    context: typer.Context,
    *,
    params: Annotated[
        float, typer.Option("--params", min=1, max=1e13, help="Trained parameters of the model, such as 1e9.")
    ],
    uplink: Annotated[
        float, typer.Option("--uplink", min=0.1, max=1e6, help="Upload rate of the slowest node, Mbit/s.")
    ],
    nodes: Annotated[int, typer.Option("--nodes", min=2, max=MAX_NODES, help="Nodes that train together.")] = 8,
    step_s: Annotated[float, typer.Option("--step-s", min=1e-6, max=1e6, help="Seconds of one inner step.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Compute the bytes and seconds of a round, and the inner steps between rounds, for each codec."""
    for value, option in ((params, "--params"), (uplink, "--uplink"), (step_s, "--step-s")):
        require_finite(value, option)
    session = session_of(context)
    plans = plan_rounds(params, nodes, uplink, step_s)
    if as_json:
        session.output.json([asdict(one) for one in plans])
        return
    rows = [
        (
            one.codec,
            size(one.sent_bytes),
            _seconds(one.reduce_s),
            f"{one.blocking_steps:,}",
            f"{one.overlapped_steps:,}",
        )
        for one in plans
    ]
    session.output.table(_PLAN, rows)
    session.output.line(
        f"Each of {nodes} nodes sends and receives these bytes in each round, and needs "
        f"{size(HOST_BYTES_PER_VALUE * params)} of memory beside the model "
        f"(int4: {size(INT4_HOST_BYTES_PER_VALUE * params)})."
    )
    session.output.line(
        "blocking: steps for 95 % utilization while the training waits; overlapped: steps that hide the reduce."
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < SHORT_S else duration(seconds)
