"""The calls of users to one machine: the output that its provider keeps, the address of its shell."""

from __future__ import annotations

import re

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import MachineLog, MachineShell
from baton.contract.names import KEY_PREFIX
from functions.api.fleet.account_calls import refusals_translated, secrets_readable
from functions.api.fleet.fleet_calls import require_fleet
from functions.api.fleet.store import require_store
from functions.api.http.context import ApiCall, Context
from functions.domain.errors import Refusal
from functions.fleet.drivers.protocol import Driver
from functions.fleet.records import Machine

SEARCHED_ENDED = 1000
"""Newest ended machines among which a machine is found."""
MAX_LOG_CHARACTERS = 64 * 1024
_KEYS = re.compile(rf"{KEY_PREFIX}_[\w-]+")


def logs(context: Context, call: ApiCall) -> MachineLog:
    """Return the last output of a machine, also of an ended one as long as its provider keeps the output."""
    machine = _require_machine(context, call)
    if machine.handle is None:
        return MachineLog()
    driver = _require_driver(context, machine)
    with refusals_translated(machine.provider):
        text = driver.logs(machine.handle)
    # A host is foreign, and the environment of its container holds the enrolment key.
    shown = None if text is None else _KEYS.sub("[removed]", text)[-MAX_LOG_CHARACTERS:]
    return MachineLog(text=shown, job_id=machine.job_id)


def shell(context: Context, call: ApiCall) -> MachineShell:
    """Return the address of a machine's shell."""
    machine = _require_machine(context, call)
    if machine.handle is None or machine.state.ended:
        raise _no_shell(f"The machine {machine.id} is {machine.state}.")
    driver = _require_driver(context, machine)
    with refusals_translated(machine.provider):
        target = driver.ssh_target(machine.handle)
        if target is None:
            raise _no_shell(f"Machines of {machine.provider} have no shell, or this one has none yet.")
        return MachineShell(host=target.host, port=target.port, user=target.user)


def _require_machine(context: Context, call: ApiCall) -> Machine:
    name, token = require_fleet(context, call).spec.name, call.path["machine"]
    store = require_store(context)
    machine = store.machine(call.tenant, name, token)
    if machine is None:
        ended = store.ended(call.tenant, name, limit=SEARCHED_ENDED)
        machine = next((one for one in ended if one.id == token), None)
    if machine is None:
        detail = f"The fleet {name} has no machine {token[:80]}."
        raise Refusal(ErrorCode.MACHINE_NOT_FOUND, detail, field="machine")
    return machine


def _require_driver(context: Context, machine: Machine) -> Driver:
    with secrets_readable():
        driver = context.drivers.get(machine.provider)
    if driver is None:
        detail = f"No account at {machine.provider} is stored."
        raise Refusal(ErrorCode.PROVIDER_NOT_FOUND, detail, field="machine")
    return driver


def _no_shell(detail: str) -> Refusal:
    return Refusal(ErrorCode.MACHINE_HAS_NO_SHELL, detail, field="machine")
