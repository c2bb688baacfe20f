"""Command group `baton fleet`: permit renting, see machines and money, stop, read receipts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from baton.contract.fleets.fleet import FleetView
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import count, require_finite
from gpu_client.cli.core.session import AsJson, CliSession, session_of
from gpu_client.cli.fleet import accounts, doctor, machines, planning
from gpu_client.cli.fleet.document import dump_fleet, read_fleet
from gpu_client.cli.fleet.view import (
    EVENTS,
    FLEETS,
    RECEIPTS,
    condition,
    deployment_text,
    event_row,
    fleet_row,
    has_ended,
    headline,
    receipt_rows,
    render,
    replacement,
    standing_text,
    summary,
)
from gpu_client.transport.errors import Unreachable

DEFAULT_EVERY_S = 2.0
DEFAULT_EVENTS = 50
MAX_LISTED = 1000
"""Most machines or events that the API lists."""

fleet = typer.Typer(help="Rent machines within a budget, and give them back.", no_args_is_help=True)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the fleet.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the command group, and `baton offers`."""
    app.add_typer(fleet, name="fleet")
    planning.register(app, fleet)
    accounts.register(fleet)
    doctor.register(fleet)
    machines.register(fleet)


@fleet.command("apply")
def apply(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Fleet document, YAML.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Store a fleet document in place of an earlier one of the same name; a stopped fleet rents again."""
    session = session_of(context)
    spec = read_fleet(file)
    with session.client() as client:
        stored = client.put_fleet(spec)
    if as_json:
        session.output.json(stored)
    else:
        session.output.line(f"Fleet {spec.name} is active: {summary(spec)}.")
        for change in replacement(stored):
            session.output.line(change)
        for warning in filter(None, [standing_text(spec), *stored.warnings]):
            session.output.note(warning)


@fleet.command("ls")
def list_fleets(context: typer.Context, as_json: AsJson = False) -> None:
    """List all fleets with machines and money."""
    session = session_of(context)
    with session.client() as client:
        page = client.fleets()
    found = page.fleets
    if as_json:
        session.output.json(found)
    elif not found and not page.damaged:
        session.output.note("No fleets. Create one with: baton fleet apply FILE")
    else:
        session.output.table(FLEETS, map(fleet_row, found))
        if whole := deployment_text(found):
            session.output.line(whole)
    for line in page.damaged:
        session.output.note(line)


@fleet.command("show")
def show(
    context: typer.Context,
    name: NameArgument,
    document: Annotated[
        bool, typer.Option("--document", help="Print only the fleet's document, YAML for `baton fleet apply`.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a fleet: money by bound of the budget, machines, why the fleet waits."""
    session = session_of(context)
    with session.client() as client:
        found = client.fleet(name)
    if document:
        session.output.raw(dump_fleet(found.spec))
    elif as_json:
        session.output.json(found)
    else:
        session.output.print(render(found))


@fleet.command("watch")
def watch(
    context: typer.Context,
    name: NameArgument,
    every_s: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between updates.")] = DEFAULT_EVERY_S,
    as_json: AsJson = False,
) -> None:
    """Follow a fleet until it is stopped and no machine is left. Ctrl-C ends the command; the fleet continues."""
    session = session_of(context)
    pause_s = require_finite(every_s, "--every") or DEFAULT_EVERY_S
    with session.client() as client:
        found, silent = client.fleet(name), False
        with _display(session, as_json=as_json) as shown:
            while True:
                shown(found)
                if has_ended(found):
                    break
                session.sleep(pause_s)
                try:
                    found, silent = client.fleet(name), False
                except Unreachable as error:
                    if not silent:
                        session.output.note(f"{error}. Retrying; Ctrl-C ends this command, not the fleet.")
                    silent = True
    if not as_json:
        session.output.line(f"{name} {headline(found)}")


@fleet.command("stop")
def stop(context: typer.Context, name: NameArgument, as_json: AsJson = False) -> None:
    """Stop a fleet: machines with a job save a checkpoint first, then all machines are given back."""
    session = session_of(context)
    with session.client() as client:
        stopped = client.stop_fleet(name)
    if as_json:
        session.output.json(stopped)
    elif stopped.machines:
        given_back = count(len(stopped.machines), "machine is", "machines are")
        session.output.line(f"Fleet {name} stops: {given_back} given back. Follow: baton fleet watch {name}")
    else:
        session.output.line(f"Fleet {name} is stopped; no machine is rented.")


@fleet.command("receipts")
def receipts(context: typer.Context, name: NameArgument, as_json: AsJson = False) -> None:
    """List the ended machines: quoted price, observed cost, the provider's charge, proof of absence, and the total."""
    session = session_of(context)
    with session.client() as client:
        found = client.ended_machines(name, limit=MAX_LISTED)
    if as_json:
        session.output.json(found)
    elif not found:
        session.output.note(f"No machine of fleet {name} has ended. Show its machines with: baton fleet show {name}")
    else:
        session.output.table(RECEIPTS, receipt_rows(found))
        if len(found) == MAX_LISTED:
            session.output.note(f"Only the newest {MAX_LISTED:,} machines are listed and counted.")


@fleet.command("events")
def events(
    context: typer.Context,
    name: NameArgument,
    limit: Annotated[int, typer.Option(min=1, help="Number of the newest events to list.")] = DEFAULT_EVENTS,
    as_json: AsJson = False,
) -> None:
    """List the newest events of a fleet, oldest first."""
    session = session_of(context)
    if limit > MAX_LISTED:
        raise CliError(f"--limit is {limit:,}", f"At most {MAX_LISTED:,} events can be listed.")
    with session.client() as client:
        found = client.fleet_events(name, limit=limit)[::-1]
    if as_json:
        session.output.json(found)
    elif not found:
        session.output.note(f"Nothing has happened in fleet {name} yet.")
    else:
        session.output.table(EVENTS, map(event_row, found))


@contextmanager
def _display(session: CliSession, *, as_json: bool) -> Iterator[Callable[[FleetView], None]]:
    """Yield a function that shows a changed fleet: as a JSON line, a live view on a terminal, or a line of text.

    A line of text follows each transition, not each cent.
    """
    if session.output.live and not as_json:
        with session.output.live_area() as draw:
            yield lambda found: draw(render(found))
        return
    shown: object = None

    def show_change(found: FleetView) -> None:
        nonlocal shown
        now = found.model_copy(update={"at": 0}) if as_json else condition(found)
        if now == shown:
            return
        shown = now
        if as_json:
            session.output.json_line(found)
        elif not has_ended(found):
            session.output.note(f"{found.spec.name} {headline(found)}")

    yield show_change
