"""Start, disturb and read nodes; the world is the control plane's own decisions on a world in memory."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from bench.elastic.nodes import node_program
from bench.elastic.nodes.node_program import END, NodePlan
from bench.elastic.nodes.trace_ledger import TraceLedger
from bench.elastic.places import Place
from gpu_client.agent.control.world_relay import WorldRelay
from tests.kits.elastic.node_processes import SeatedProcesses
from tests.kits.waiting import until

CONTEXT = multiprocessing.get_context("forkserver")
# A node begins within milliseconds instead of the seconds in which torch loads.
CONTEXT.set_forkserver_preload(["bench.elastic.nodes.node_cluster"])
POLL_S = 0.01
START_S = 180.0
CHANGE_S = 180.0
"""Also on a machine whose cores are shared."""


class BenchNode:
    """Process at a seat."""

    def __init__(self, seat: int, attempt: int, process: BaseProcess, relay: WorldRelay, folder: Path) -> None:
        self.seat, self.attempt, self.process, self.relay, self.folder = seat, attempt, process, relay, folder
        self.name = ""
        self.lines: list[dict[str, Any]] = []
        self._read = 0

    def read(self) -> list[dict[str, Any]]:
        """Read the new lines of the trace, and return all lines. Raises RuntimeError if the process has failed."""
        path = self.folder / "trace.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read += len(whole)
            self.lines += [json.loads(line) for line in whole.splitlines()]
            if not self.name:
                self.name = next((one["node"] for one in self.lines if one["kind"] == "born"), "")
        if self.process.exitcode not in (None, 0, -signal.SIGKILL):
            log = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"node {self.seat}.{self.attempt} ended with {self.process.exitcode}: {log[-3000:]}")
        return self.lines

    def found(self, kind: str, since: float = 0.0) -> Iterator[dict[str, Any]]:
        """Return the lines of a kind from an instant on."""
        return (one for one in self.read() if one["kind"] == kind and one["at"] >= since)

    @property
    def round(self) -> int:
        """Return the newest round of the node."""
        return next((one["round"] for one in reversed(self.read()) if "round" in one), 0)

    def arm(self, point: str, signal_number: int, skip: int = 0) -> None:
        """Let the process send itself a signal at a point of `fault_points.POINTS`."""
        self._put("fault", json.dumps({"point": point, "skip": skip, "signal": int(signal_number)}))

    def limit(self, bytes_per_s: float | None) -> None:
        """Limit the process's connections, 0 to cut them; None ends the limit."""
        if bytes_per_s is None:
            (self.folder / "link").unlink(missing_ok=True)
        else:
            self._put("link", str(bytes_per_s))

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.process.pid or 0, number)

    def close(self) -> None:
        """Kill the process and end its relay."""
        self.process.kill()
        self.process.join()
        self.relay.close()

    def _put(self, name: str, text: str) -> None:
        new = self.folder / f"{name}.new"
        new.write_text(text)
        new.rename(self.folder / name)


class NodeCluster(SeatedProcesses[BenchNode]):
    """Nodes of one world. `places`: of the seats; loopback by default."""

    def __init__(
        self, folder: Path, plan: NodePlan, least: int, most: int, places: Sequence[Place] | None = None
    ) -> None:
        super().__init__(least, most)
        self.plan = plan
        self._folder, self._places = folder, places
        folder.mkdir(parents=True)

    def start(self, seat: int) -> BenchNode:
        """Start a process at a seat, as a new attempt."""
        place = self._places[seat] if self._places else Place("127.0.0.1")
        attempt, relay, described = self.claim(seat, place.host)
        folder = self._folder / f"{seat}-{attempt}"
        folder.mkdir()
        process = CONTEXT.Process(
            target=node_program.run,
            args=({"BATON_WORLD": described}, self.plan, folder, place.command[-1] if place.command else None),
        )
        process.start()
        node = BenchNode(seat, attempt, process, relay, folder)
        self.nodes.append(node)
        return node

    def form(self, count: int, rounds: int = 2) -> list[BenchNode]:
        """Start nodes at the first seats, and wait until all of them are members and have committed a few rounds."""
        nodes = [self.start(seat) for seat in range(count)]
        self.wait(lambda: len(self.view().members) == count, f"a world of {count} nodes", START_S)
        self.wait_for_members(nodes, rounds=rounds)
        return nodes

    def end_attempt(self, node: BenchNode) -> None:
        """Wait for the end of the process, and end the attempt, as its agent does."""
        node.process.join(START_S)
        node.read()
        super().end_attempt(node)

    def replace(self, node: BenchNode) -> BenchNode:
        """End a killed node's attempt, and start the next one at its seat."""
        self.end_attempt(node)
        return self.start(node.seat)

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = CHANGE_S) -> Any:
        """Wait for a condition. Raises RuntimeError with the ends of the logs."""
        try:
            return until(condition, timeout_s, what=what, every_s=POLL_S)
        except AssertionError as error:
            told = "\n".join(f"{one.folder.name}: {[*one.lines[-3:]]}" for one in self.nodes)
            view = self.view()
            raise RuntimeError(f"{error}\nepoch {view.epoch}: {[one.node for one in view.members]}\n{told}") from error

    def wait_for_members(self, names: Sequence[BenchNode], *, rounds: int = 1) -> None:
        """Wait until exactly these nodes are the members, and until all of them have committed some rounds more."""

        def same() -> bool:
            wanted = {one.name for one in names if one.read() and one.name}
            return len(wanted) == len(names) and {one.node for one in self.view().members} == wanted

        self.wait(same, f"a world of the nodes {[one.folder.name for one in names]}")
        goal = max(one.round for one in names) + rounds
        self.wait(lambda: all(one.round >= goal for one in names), f"round {goal} at all members")

    def finish(self, nodes: Sequence[BenchNode], rounds: int = 2) -> TraceLedger:
        """Let the nodes end after some more rounds, and read all traces."""
        last = self._folder / f"{END}.new"
        last.write_text(str(max(one.round for one in nodes) + rounds))
        last.rename(self._folder / END)
        self.wait(lambda: all(one.process.exitcode == 0 for one in nodes), "the end of all nodes")
        return self.ledger()

    def ledger(self) -> TraceLedger:
        """Read the traces of all nodes."""
        return TraceLedger({one.folder.name: one.read() for one in self.nodes})
