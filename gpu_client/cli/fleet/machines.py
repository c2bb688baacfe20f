"""Commands `baton fleet logs` and `baton fleet ssh`: reach one machine."""

from __future__ import annotations

import os
import shutil
from typing import Annotated

import typer

from baton.contract.fleets.fleet import MAX_FLEET_IN_TOKEN
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.session import SHOWN_ID_CHARACTERS, AsJson, session_of
from gpu_client.transport.api.client import BatonClient

MachineArgument = Annotated[
    str, typer.Argument(metavar="MACHINE", help="Machine, as `baton fleet show` names it.", show_default=False)
]


def register(fleet: typer.Typer) -> None:
    """Add the commands."""
    fleet.command("logs")(logs)
    fleet.command("ssh")(ssh)


def logs(context: typer.Context, machine: MachineArgument, as_json: AsJson = False) -> None:
    """Print the last output of a machine, as its provider has it: why a machine did not boot, or ended early."""
    session = session_of(context)
    with session.client() as client:
        found = client.machine_log(_fleet_of(client, machine), machine)
    if as_json:
        session.output.json(found)
        return
    for line in (found.text or "").splitlines():
        session.output.line(line)
    if not found.text:
        session.output.note(f"The provider has no output of {machine}, or none yet.")
    if found.job_id:
        session.output.note(f"The log of its job: baton logs {found.job_id[:SHOWN_ID_CHARACTERS]}")


def ssh(context: typer.Context, machine: MachineArgument, as_json: AsJson = False) -> None:
    """Open a shell on a machine with this computer's OpenSSH and your own key.

    A rented host is foreign: do not forward your agent there. The exit code is the one of the shell.
    """
    session = session_of(context)
    with session.client() as client:
        found = client.machine_shell(_fleet_of(client, machine), machine)
    if as_json:
        session.output.json(found)
        return
    command = ["ssh", "-p", str(found.port), "-l", found.user, "--", found.host]
    if shutil.which("ssh") is None:
        raise CliError("This computer has no OpenSSH client", f"Install one, then run: {' '.join(command)}")
    # In place of this process: signals, the terminal and the exit code are those of OpenSSH alone.
    os.execvp(command[0], command)  # noqa: S606 - no shell, and the API checks the address


def _fleet_of(client: BatonClient, machine: str) -> str:
    """Return the name of a machine's fleet, which is the middle of the machine's name, cut for long names."""
    name = machine.partition("-")[2].rpartition("-")[0]
    if not name:
        raise CliError(f"{machine} is not a machine", "Show the machines of a fleet with: baton fleet show NAME")
    if len(name) < MAX_FLEET_IN_TOKEN:
        return name
    alike = [one for one in client.fleets().fleets if one.spec.name.startswith(name)]
    owners = [one for one in alike if any(known.id == machine for known in one.machines)]
    return next((one.spec.name for one in [*owners, *alike]), name)
