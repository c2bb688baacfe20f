"""Use machines that accept an SSH key: OpenSSH starts one agent on each host, stops the agent, reads its output.

Each call of the driver is one connection to each host that the call is about. `host.py` runs on the host and keeps
the record of the machine there, therefore the machine goes on while the control plane is away.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.providers import SshAccount, SshHost
from functions.domain.record_base import Record
from functions.fleet.drivers.protocol import (
    AccountReport,
    Ambiguous,
    Created,
    CreateIntent,
    CreateResult,
    Leftover,
    NotCreated,
    ProviderRefused,
    ProviderUnavailable,
    RefusalKind,
    SshTarget,
)
from functions.fleet.drivers.provider_http import AnswerLost, CallNotSent
from functions.fleet.drivers.ssh.agent_bundle import agent_bundle, agent_requirements
from functions.fleet.drivers.ssh.connection import CALL_S, HostUnfit, call, key_file
from functions.fleet.records import Inventory, Offer, Price, Sighting

CONNECTIONS = 16
"""Hosts that are asked at the same time."""
ALL_HOSTS_S = 18.0
"""Longest time for all hosts together, so that a call ends within the time that the controller leaves for it."""
OLDEST_PYTHON = (3, 11)
FREE_SHARE = 0.95
"""Share of the free disk that an offer names: the agent's own files need a little."""
BOOT_S = 90


class SshMachine(Record):
    """Record of a machine on its host. All times are of the driver's clock."""

    id: str
    token: str
    usd_per_hour: Price
    created_at: int
    ended_at: int | None = None

    def charged_usd(self, now: float) -> float:
        """Return the price of the machine's life up to its end, or up to `now`."""
        return max(0.0, (now if self.ended_at is None else self.ended_at) - self.created_at) / 3600 * self.usd_per_hour


class HostState(Record):
    """Answer of a host. `python`: major and minor version. `machine`: None for a free host."""

    python: tuple[int, int]
    linux: bool
    free_gib: Price
    machine: SshMachine | None
    running: bool

    @property
    def problem(self) -> str:
        """Return why no agent can run on the host, with the remedy; empty if one can."""
        if not self.linux:
            return "is no Linux computer: remove the host from the account"
        if self.python < OLDEST_PYTHON:
            found, oldest = (".".join(map(str, version)) for version in (self.python, OLDEST_PYTHON))
            return f"has Python {found}: install Python {oldest} or newer and name the interpreter as `python`"
        return ""


class SshDriver:
    """Driver of the hosts of an account. now: the clock that machines are billed by."""

    name = "ssh"
    min_interval_s: Mapping[str, float] = {}

    def __init__(self, account: SshAccount, *, now: Callable[[], float]) -> None:
        self._hosts = {host.name: host for host in account.hosts}
        self._private_key = account.private_key
        self._now = now

    def quote(self, spec: FleetSpec) -> Sequence[Offer]:
        """Return the hosts that answer, can run an agent, and have no machine."""
        states, _ = self._states()
        return [_offer(host, state) for host, state in states if state.machine is None and not state.problem]

    def create(self, intent: CreateIntent) -> CreateResult:
        """Start the agent on the host of the offer, with the environment of the intent and that of an SSH session."""
        host = self._hosts.get(intent.offer.ref)
        if host is None:
            return NotCreated(reason=f"the account has no host {intent.offer.ref}")
        machine = SshMachine(
            id=secrets.token_hex(6),
            token=intent.token,
            usd_per_hour=intent.offer.usd_per_hour,
            created_at=int(self._now()),
        )
        bundle = agent_bundle()
        request = {
            "record": machine.model_dump(),
            "environment": dict(intent.environment),
            "python": host.python,
            "requirements": agent_requirements(),
            "bundle_bytes": len(bundle),
        }
        try:
            with self._key() as key:
                answer = call(host, key, "create", request, bundle=bundle)
        except ProviderRefused as error:
            return NotCreated(reason=str(error), kind=error.kind)
        except CallNotSent as error:
            return NotCreated(reason=str(error))
        except AnswerLost as error:
            return Ambiguous(reason=str(error))
        match answer:
            case {"created": True}:
                return Created(handle=f"{host.name}:{machine.id}", usd_per_hour=machine.usd_per_hour)
            case {"created": False, "reason": str(reason)}:
                return NotCreated(reason=f"the host {host.name} made no machine: {reason}")
        return Ambiguous(reason=f"{host.name}: the answer cannot be read")

    def inventory(self, prefix: str, now: int) -> Inventory:
        """List the machines of all hosts. A host that cannot be asked makes the list incomplete for that host."""
        states, problems = self._states()
        if not states:
            raise ProviderUnavailable(_join(problems))
        return Inventory(
            provider=self.name,
            at=now,
            complete=not problems,
            unread=list(problems),
            sightings=[
                seen
                for host, state in states
                if (seen := _sighting(host, state)) is not None and seen.token.startswith(prefix)
            ],
        )

    def destroy(self, handle: str) -> bool:
        """Kill the agent and all its processes, delete the data of the machine."""
        host, machine_id = self._find(handle)
        if host is None:
            return True
        answer = self._ask(host, "destroy", {"id": machine_id, "ended_at": int(self._now())})
        match answer:
            case {"alive": [_, *_] as alive}:
                raise ProviderUnavailable(f"{host.name}: the processes {alive} do not end, restart the host")
        return True

    def accept_price(self, handle: str, usd_per_hour: float) -> None:
        """Do nothing, because the price of a host is a constant of the account."""

    def logs(self, handle: str) -> str | None:
        """Return the end of the agent's output."""
        host, machine_id = self._find(handle)
        match host and self._ask(host, "logs", {"id": machine_id}):
            case {"text": str(text)}:
                return text
        return None

    def ssh_target(self, handle: str) -> SshTarget | None:
        """Return the address of the host."""
        host, _ = self._find(handle)
        return None if host is None else SshTarget(host=host.address, port=host.port, user=host.user)

    def examine(self, prefix: str) -> AccountReport:
        """Ask all hosts; report those without an answer, without a usable Python, or with machines of others."""
        states, problems = self._states()
        if not states and all(isinstance(one, HostUnfit) for one in problems.values()):
            raise ProviderRefused(RefusalKind.INVALID, _join(problems))
        if not states:
            raise ProviderUnavailable(_join(problems))
        unfit = [f"{host.name}: {state.problem}" for host, state in states if state.problem]
        seen = [one for host, state in states if (one := _sighting(host, state)) is not None]
        return AccountReport(
            account=f"{len(self._hosts)} {'host' if len(self._hosts) == 1 else 'hosts'}",
            problems=[*map(str, problems.values()), *unfit],
            foreign=[one for one in seen if one.running and not one.token.startswith(prefix)],
        )

    def remove_leftover(self, leftover: Leftover) -> None:
        """Do nothing, because a machine's end deletes its data."""

    def charged_usd(self, handle: str) -> float | None:
        """Return price times life, as the host has recorded them."""
        host, machine_id = self._find(handle)
        answer = host and self._ask(host, "record", {"id": machine_id})
        if not answer or answer.get("machine") is None:
            return None
        return SshMachine.model_validate(answer["machine"]).charged_usd(self._now())

    def _find(self, handle: str) -> tuple[SshHost | None, str]:
        name, _, machine_id = handle.rpartition(":")
        return self._hosts.get(name), machine_id

    def _key(self) -> Any:
        return key_file(self._private_key.get_secret_value())

    def _ask(self, host: SshHost, operation: str, request: Mapping[str, Any]) -> Any:
        """Call one host. Raises ProviderUnavailable, ProviderRefused."""
        try:
            with self._key() as key:
                return call(host, key, operation, request)
        except (AnswerLost, CallNotSent) as error:
            raise ProviderUnavailable(str(error)) from error

    def _states(self) -> tuple[list[tuple[SshHost, HostState]], dict[str, Exception]]:
        """Return the state of each host that answers, and the problem of each other host by its name."""
        hosts = list(self._hosts.values())
        with self._key() as key, ThreadPoolExecutor(min(CONNECTIONS, len(hosts))) as pool:
            found = list(pool.map(partial(_state, key, time.monotonic() + ALL_HOSTS_S), hosts))
        states = [(host, one) for host, one in zip(hosts, found, strict=True) if isinstance(one, HostState)]
        return states, {host.name: one for host, one in zip(hosts, found, strict=True) if isinstance(one, Exception)}


def _state(key: Path, until: float, host: SshHost) -> HostState | Exception:
    """Return the state of a host, or why the host does not tell its state."""
    try:
        return HostState.model_validate(call(host, key, "state", timeout_s=min(CALL_S, until - time.monotonic())))
    except (AnswerLost, CallNotSent) as error:
        return error
    except ValidationError as error:
        return AnswerLost(f"{host.name}: the answer cannot be read: {error.errors()[0]['msg']}")


def _join(problems: Mapping[str, Exception]) -> str:
    return "; ".join(map(str, problems.values()))


def _reference(host: SshHost) -> str:
    """Return the name of a host for its reputation, with a digest of its description.

    A host with a wrong description is quarantined, and the quarantine must not outlive the correction.
    """
    return f"{host.name}/{hashlib.sha256(host.model_dump_json().encode()).hexdigest()[:6]}"


def _offer(host: SshHost, state: HostState) -> Offer:
    return Offer(
        provider=SshDriver.name,
        ref=host.name,
        machine_ref=_reference(host),
        gpu_model=host.gpu_model,
        gpus=host.gpus,
        vram_gib=host.vram_gib,
        disk_gib=min(host.disk_gib, state.free_gib * FREE_SHARE),
        regions=[host.region] if host.region else [],
        usd_per_hour=host.usd_per_hour,
        boot_s=BOOT_S,
    )


def _sighting(host: SshHost, state: HostState) -> Sighting | None:
    if state.machine is None:
        return None
    return Sighting(
        token=state.machine.token,
        handle=f"{host.name}:{state.machine.id}",
        running=state.running,
        usd_per_hour=state.machine.usd_per_hour,
        machine_ref=_reference(host),
        message="" if state.running else "the agent has ended",
        created_at=state.machine.created_at,
    )
