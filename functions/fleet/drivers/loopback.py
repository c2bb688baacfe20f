"""Rent out processes of this computer as machines, with fake prices and injected faults, for demos and tests.

    <directory>/market.json                      offers, price and faults; optional, written by a person or a test
    <directory>/machines/<handle>/machine.json   token, price, process and meter of a machine
    <directory>/machines/<handle>/home/          working directory and HOME of the process
    <directory>/machines/<handle>/output.log     output of the process

Files and processes are the whole state of the provider, therefore machines go on while the control plane is away, and
the next driver finds them. Linux only: the start time in /proc proves that a process id still belongs to the machine.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from baton.contract.fleets.fleet import FleetSpec
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
from functions.fleet.records import Inventory, Offer, Price, Sighting

AGENT = (sys.executable, "-m", "gpu_client.agent")
MARKET = "market.json"
LOG_TAIL_BYTES = 16 * 1024
HOSTS = 8
DRIVER = "580.65.06"
"""Driver of each invented GPU."""
"""Offers without a market file: each is one host, which has this computer's disk and no GPU."""

_ROOT = Path(__file__).resolve().parents[3]
_START_WHEN_RECORDED = 'read -r _ && exec "$@" </dev/null'
"""Shell command that waits for a line and becomes the program. If the driver dies before it has recorded the process,
the line never comes and the process ends."""


class LoopbackFaults(Record):
    """Faults of the next calls; each counter falls by one at its use."""

    lost_answers: int = 0
    """Creates that take effect and whose answer is lost."""
    snatched: int = 0
    """Creates whose offer is gone."""
    no_capacity: int = 0
    """Quotes without an offer."""
    incomplete: int = 0
    unreadable: int = 0
    """Inventories that lack machines; inventories without an answer."""
    ignored_destroys: int = 0
    """Destroys that the provider accepts and does not carry out."""


class LoopbackMarket(Record):
    """Offers and injected faults of the provider."""

    offers: list[Offer] | None = None
    """None: HOSTS offers without a GPU. A GPU in an offer is one that the machine's `nvidia-smi` names."""
    usd_per_hour: Price | None = None
    """Price of all offers and machines from the next inventory on; None: the price of each offer."""
    faults: LoopbackFaults = LoopbackFaults()

    def save(self, directory: Path) -> None:
        """Replace the market of the provider in `directory`."""
        _replace(directory / MARKET, self)


class LoopbackMachine(Record):
    """A machine, also after its end, for its bill."""

    handle: str
    token: str
    host: str
    pid: int
    started: int
    """Start time of the process in clock ticks since the boot of the computer."""
    usd_per_hour: float
    created_at: int
    ended_at: int | None = None
    """Time of the destroy. A process that ends by itself is billed further, as elsewhere a stopped machine."""
    billed_usd: float = 0
    """Bill up to `billed_until`."""
    billed_until: float
    scratch: str = ""
    """Directory of the machine's temporary files, which ends with the machine."""

    def charged_usd(self, now: float) -> float:
        """Return the bill up to the machine's end, or up to `now`."""
        until = now if self.ended_at is None else self.ended_at
        return self.billed_usd + max(0.0, until - self.billed_until) / 3600 * self.usd_per_hour


class LoopbackDriver:
    """Driver of the loopback provider.

    now: the clock that machines are billed by. program: command of each machine.
    """

    name = "loopback"
    min_interval_s: Mapping[str, float] = {}

    def __init__(self, directory: Path, *, now: Callable[[], float], program: Sequence[str] = AGENT) -> None:
        self._directory = directory.absolute()
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._now = now
        self._program = program
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        """Processes that this driver started, by handle. The kernel keeps a dead one until its parent asks for it."""

    def quote(self, spec: FleetSpec) -> Sequence[Offer]:
        """Return the offers of the hosts that have no machine."""
        if self._meet("no_capacity"):
            return []
        market = self._market()
        rented = self._rented()
        offers = [one for one in _offers(market, self._directory) if one.ref not in rented]
        if market.usd_per_hour is None:
            return offers
        return [one.model_copy(update={"usd_per_hour": market.usd_per_hour}) for one in offers]

    def create(self, intent: CreateIntent) -> CreateResult:
        """Start a process, with the environment of the intent and that of a bare machine."""
        offer = intent.offer
        try:
            if self._meet("snatched") or offer.ref in self._rented():
                return NotCreated(reason=f"the offer {offer.ref} is gone")
            lost = self._meet("lost_answers")
            machine = self._start(intent, self._market().usd_per_hour or offer.usd_per_hour)
        except (OSError, ProviderRefused) as error:
            return NotCreated(reason=f"the process cannot start: {error}")
        if lost:
            return Ambiguous(reason="no answer (injected)")
        return Created(handle=machine.handle, usd_per_hour=machine.usd_per_hour)

    def inventory(self, prefix: str, now: int) -> Inventory:
        """List the machines that are not destroyed, or whose processes still run."""
        if self._meet("unreadable"):
            raise ProviderUnavailable("no answer (injected)")
        if self._meet("incomplete"):
            return Inventory(provider=self.name, at=now, complete=False)
        self._apply_price()
        listed = [(one, self._sighting(one)) for one in self.machines() if one.token.startswith(prefix)]
        return Inventory(
            provider=self.name,
            at=now,
            complete=True,
            sightings=[seen for one, seen in listed if seen.running or one.ended_at is None],
        )

    def destroy(self, handle: str) -> bool:
        """Kill the machine's process group and end the machine's bill."""
        machine = self._machine(handle)
        if machine is None or self._meet("ignored_destroys"):
            return True
        if self.runs(machine):
            with suppress(ProcessLookupError):
                os.killpg(machine.pid, signal.SIGKILL)
        if machine.scratch:
            # A process of the group may still write before the kernel ends it; a repeated destroy removes the rest.
            shutil.rmtree(machine.scratch, ignore_errors=True)
        if machine.ended_at is None:
            self._write(machine.model_copy(update={"ended_at": int(self._now())}))
        return True

    def logs(self, handle: str) -> str | None:
        """Return the end of the process's output."""
        if self._machine(handle) is None:
            return None
        with (self._home(handle).parent / "output.log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")

    def accept_price(self, handle: str, usd_per_hour: float) -> None:
        """Do nothing, because a changed price of the market holds at once."""

    def ssh_target(self, handle: str) -> SshTarget | None:
        """Return None, because the machine is this computer."""
        return None

    def examine(self, prefix: str) -> AccountReport:
        """Report the processes of other deployments in the same directory."""
        foreign = [self._sighting(one) for one in self.machines() if not one.token.startswith(prefix)]
        return AccountReport(account=str(self._directory), foreign=[one for one in foreign if one.running])

    def remove_leftover(self, leftover: Leftover) -> None:
        """Do nothing, because a process leaves nothing that is billed."""

    def charged_usd(self, handle: str) -> float | None:
        """Return the machine's bill."""
        machine = self._machine(handle)
        return None if machine is None else machine.charged_usd(self._now())

    def machines(self) -> list[LoopbackMachine]:
        """Return all machines, ended ones included, by the time of their creation."""
        handles = [path.parent.name for path in self._directory.glob("machines/*/machine.json")]
        found = [machine for handle in handles if (machine := self._machine(handle)) is not None]
        return sorted(found, key=lambda one: (one.created_at, one.handle))

    def runs(self, machine: LoopbackMachine) -> bool:
        """Return True if the machine's own process runs: another process with the same id started at another time."""
        running = _start_ticks(machine.pid) == machine.started
        if not running and machine.handle in self._children:
            self._children[machine.handle].poll()
        return running

    def _sighting(self, machine: LoopbackMachine) -> Sighting:
        running = self.runs(machine)
        return Sighting(
            token=machine.token,
            handle=machine.handle,
            running=running,
            usd_per_hour=machine.usd_per_hour,
            machine_ref=machine.host,
            message="" if running else "the process of the machine has ended",
            created_at=machine.created_at,
        )

    def _rented(self) -> set[str]:
        return {one.host for one in self.machines() if one.ended_at is None}

    def _start(self, intent: CreateIntent, usd_per_hour: float) -> LoopbackMachine:
        handle = f"loopback-{secrets.token_hex(6)}"
        home = self._home(handle)
        home.mkdir(parents=True, mode=0o700)
        programs = install_gpus(home, intent.offer)
        # Beside the driver's own temporary files, because the path of a socket in the machine's home can be too long.
        scratch = tempfile.mkdtemp(prefix="baton-machine-")
        with (home.parent / "output.log").open("wb") as log:
            process = self._children[handle] = subprocess.Popen(
                ["/bin/sh", "-c", _START_WHEN_RECORDED, "sh", *self._program],
                cwd=home,
                env={
                    "HOME": str(home),
                    "PATH": os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)]),
                    "PYTHONPATH": str(_ROOT),
                    "TMPDIR": scratch,
                    **intent.environment,
                },
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        now = self._now()
        machine = LoopbackMachine(
            handle=handle,
            token=intent.token,
            host=intent.offer.ref,
            pid=process.pid,
            started=_start_ticks(process.pid) or 0,
            usd_per_hour=usd_per_hour,
            created_at=int(now),
            billed_until=now,
            scratch=scratch,
        )
        assert process.stdin is not None
        with process.stdin:
            self._write(machine)
            process.stdin.write(b"\n")
        return machine

    def _apply_price(self) -> None:
        """Bill the machines up to now at their old price, if the market has a new one."""
        price, now = self._market().usd_per_hour, self._now()
        for one in self.machines():
            if price is not None and one.ended_at is None and one.usd_per_hour != price:
                update = {"usd_per_hour": price, "billed_usd": one.charged_usd(now), "billed_until": now}
                self._write(one.model_copy(update=update))

    def _meet(self, fault: str) -> bool:
        """Return True if the next call of its kind meets the fault."""
        market = self._market()
        left: int = getattr(market.faults, fault)
        if left:
            faults = market.faults.model_copy(update={fault: left - 1})
            market.model_copy(update={"faults": faults}).save(self._directory)
        return left > 0

    def _market(self) -> LoopbackMarket:
        path = self._directory / MARKET
        try:
            return LoopbackMarket.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return LoopbackMarket()
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise ProviderRefused(RefusalKind.INVALID, f"{path}: {problem}: correct or remove the file") from error

    def _home(self, handle: str) -> Path:
        return self._directory / "machines" / handle / "home"

    def _machine(self, handle: str) -> LoopbackMachine | None:
        with suppress(FileNotFoundError):
            return LoopbackMachine.model_validate_json((self._home(handle).parent / "machine.json").read_bytes())
        return None

    def _write(self, machine: LoopbackMachine) -> None:
        _replace(self._home(machine.handle).parent / "machine.json", machine)


def _offers(market: LoopbackMarket, directory: Path) -> list[Offer]:
    if market.offers is not None:
        return market.offers
    # A machine finds a little less space than the offer was made with.
    disk_gib = shutil.disk_usage(directory).free // 2**30 * 0.9
    return [
        Offer(
            provider=LoopbackDriver.name,
            ref=f"host-{number}",
            machine_ref=f"host-{number}",
            gpus=0,
            disk_gib=disk_gib,
            usd_per_hour=round(0.2 + number / 100, 2),
            boot_s=60,
        )
        for number in range(HOSTS)
    ]


def install_gpus(home: Path, offer: Offer) -> Path:
    """Return the directory of the machine's programs, with an `nvidia-smi` that names the GPUs of the offer."""
    programs = home / "bin"
    programs.mkdir()
    if offer.gpu_model and offer.gpus:
        line = f"{offer.gpu_model}, {round(offer.vram_gib * 1024)}, {DRIVER}"
        program = programs / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf '%s\\n' {' '.join([shlex.quote(line)] * offer.gpus)}\n")
        program.chmod(0o700)
    return programs


def _start_ticks(pid: int) -> int | None:
    """Return the start time of a process; None if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _replace(path: Path, record: Record) -> None:
    """Write a record so that a reader sees the old or the new one."""
    temporary = path.with_suffix(".new")
    temporary.write_text(record.model_dump_json(), encoding="utf-8")
    temporary.replace(path)
