"""Training processes of an elastic job on this machine, with the agent's relay and a world in memory."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from baton.contract.elastic.data import DataGrant, DataRequest
from baton.contract.elastic.relay import RelayAnswer, RelayRequest
from baton.contract.elastic.world import EpochProposal, JoinRequest, WorldReport, WorldSeat, WorldView
from gpu_client.agent.control.world_relay import WorldRelay, describe_world
from gpu_client.elastic.errors import (
    NoMajorityError,
    NotAMemberError,
    WorldCallError,
    WorldChangedError,
    WorldMismatchError,
)
from gpu_client.transport.errors import Conflict, Unreachable
from tests.kits.elastic.memory_world import JOB, MemoryWorld
from tests.kits.stack.stack import clean_environment

Answered = TypeVar("Answered")
CODES: dict[type[WorldCallError], str] = {
    WorldChangedError: "world_changed",
    NoMajorityError: "no_majority",
    NotAMemberError: "not_a_member",
    WorldMismatchError: "world_mismatch",
}


class RelayClient:
    """Client of the control plane as the relay sees it, answered by the world in memory."""

    def __init__(self, world: MemoryWorld, lock: threading.Lock, seat: int) -> None:
        self._world, self._lock, self._seat = world, lock, seat

    def _answer(self, request: JoinRequest | EpochProposal | WorldReport | None) -> WorldView:
        return self._call(lambda: self._world.answer(f"{self._seat}.0.0", request))

    def _call(self, call: Callable[[], Answered]) -> Answered:
        with self._lock:
            try:
                return call()
            except tuple(CODES) as error:
                raise Conflict(code=CODES[type(error)], status=409, message=str(error)) from error
            except WorldCallError as error:
                raise Unreachable(str(error)) from error

    def world(self, job_id: str, lease_token: str) -> WorldView:
        return self._answer(None)

    def join_world(self, job_id: str, lease_token: str, request: JoinRequest) -> WorldView:
        return self._answer(request)

    def propose_epoch(self, job_id: str, lease_token: str, proposal: EpochProposal) -> WorldView:
        return self._answer(proposal)

    def relay_world(self, job_id: str, lease_token: str, request: RelayRequest) -> RelayAnswer:
        raise Unreachable("these nodes reach each other")

    def lease_shards(self, job_id: str, lease_token: str, request: DataRequest) -> DataGrant:
        return self._call(lambda: self._world.lease(request))

    def report_world(self, job_id: str, lease_token: str, report: WorldReport) -> WorldView:
        return self._answer(report)


class ForkedModule:
    """Module as a program, forked from a server that has imported its libraries; has what nodes use of `Popen`."""

    def __init__(
        self, context: ForkServerContext, program: Sequence[str], variables: Mapping[str, str], log: Path
    ) -> None:
        self._process = context.Process(target=run_module, args=(program, variables, log))
        self._process.start()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the process unless it has ended."""
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked module", timeout_s or 0)
        return self._process.exitcode


def run_module(program: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
    """Make this process the program: a module's name and arguments."""
    with log.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = list(program)
    runpy.run_module(program[0], run_name="__main__", alter_sys=True)


class NodeProcess:
    """Training process at one seat. `output`: its output directory; `log`: what the process printed."""

    def __init__(
        self,
        seat: int,
        attempt: int,
        process: subprocess.Popen[bytes] | ForkedModule,
        relay: WorldRelay,
        output: Path,
    ) -> None:
        self.seat, self.attempt, self.process, self.relay, self.output = seat, attempt, process, relay, output

    @property
    def log(self) -> str:
        """Return the output of the process so far."""
        return (self.output / "log.txt").read_text(encoding="utf-8", errors="replace")

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to the process."""
        self.process.send_signal(signal_number)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code."""
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """Kill the process and end its relay."""
        self.process.kill()
        self.process.wait()
        self.relay.close()


class SeatHolder(Protocol):
    """Process at a seat, as `SeatedProcesses` uses the process."""

    seat: int
    attempt: int

    def close(self) -> None:
        """Kill the process and end its relay."""


Holder = TypeVar("Holder", bound=SeatHolder)


class SeatedProcesses(Generic[Holder]):
    """Seats of one elastic job in a world in memory, and the processes that hold them.

    `world`: change it only while holding `lock`.
    """

    def __init__(self, least: int, most: int) -> None:
        self.world, self.lock = MemoryWorld(least, most), threading.Lock()
        self.nodes: list[Holder] = []

    def claim(self, seat: int, address: str = "127.0.0.1") -> tuple[int, WorldRelay, str]:
        """Claim a seat. Returns the attempt, its relay and its BATON_WORLD."""
        with self.lock:
            self.world.claim(seat)
            attempt = self.world.leases[seat].epoch
        relay = WorldRelay(RelayClient(self.world, self.lock, seat), f"seat-{seat}", "lease")
        place = WorldSeat(job=JOB, seat=seat, min=self.world.least, max=self.world.most)
        own = describe_world(place, attempt, relay, port=0, addresses=address, api_url="http://127.0.0.1:1")
        return attempt, relay, own

    def end_attempt(self, node: Holder) -> None:
        """End the attempt of a node, as its agent does after the end of the process."""
        with self.lock:
            self.world.end(f"{node.seat}.{node.attempt}.0")

    def view(self) -> WorldView:
        """Return the present world."""
        with self.lock:
            return self.world.view()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        for node in self.nodes:
            node.close()


class NodeProcesses(SeatedProcesses[NodeProcess]):
    """Processes of one elastic job that run a module.

    context: its server has imported the libraries of the module and forks the processes.
    """

    def __init__(
        self,
        directory: Path,
        least: int,
        most: int,
        module: str,
        params: Mapping[str, Any],
        *,
        context: ForkServerContext | None = None,
    ) -> None:
        super().__init__(least, most)
        self._directory, self._module, self._params, self._context = directory, module, params, context

    def start(self, seat: int, *arguments: str) -> NodeProcess:
        """Start a process at a seat, as a new attempt."""
        attempt, relay, own = self.claim(seat)
        output = self._directory / f"seat-{seat}-{attempt}"
        output.mkdir(parents=True)
        params = output / "params.json"
        params.write_text(json.dumps(dict(self._params)), encoding="utf-8")
        variables = {
            **clean_environment(),
            "BATON_WORLD": own,
            "BATON_OUTPUT_DIR": str(output),
            "BATON_PARAMS": str(params),
            "PYTHONUNBUFFERED": "1",
        }
        process: subprocess.Popen[bytes] | ForkedModule
        if self._context is not None:
            process = ForkedModule(self._context, [self._module, *arguments], variables, output / "log.txt")
        else:
            with (output / "log.txt").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", self._module, *arguments], env=variables, stdout=log, stderr=log
                )
        node = NodeProcess(seat, attempt, process, relay, output)
        self.nodes.append(node)
        return node

    def start_all(self, seats: Sequence[int]) -> list[NodeProcess]:
        """Start a process at each seat."""
        return [self.start(seat) for seat in seats]
