"""Contenders: a training loop under the agent, with its session alone, and bare twice, in turns on one processor.

Agent, control plane and emulated cloud have another one, and are stopped while it is not their turn. See README.md for
what this includes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import InputRef, JobState, JobSubmit
from baton.contract.jobs.policy import Policy
from bench.harness.local_stack import RunningStack, clean_environment, pinned
from bench.harness.turns import Handle, Subject, overlap_s, take_turns
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.api.objects import files_below

HEARTBEAT_INTERVAL_S = 5
"""Seconds of wall time. The loop has a fifth of the time, so each second of training has one heartbeat."""
TIMEOUT_S = 300.0
POLL_S = 0.05
MODES = ("bare", "session", "control", "agent")
"""`control` is a second bare loop: the difference between the two is the resolution of the measurement."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Loop:
    """Training module with a stopwatch (see stopwatch.py), its inputs, parameters and outputs."""

    name: str
    """Name of the queue and of the inputs' prefix."""
    module: str
    data: Path
    params: Mapping[str, Any]
    outputs: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """Make the environment of the processes, whoever starts them."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(paths), **self.environment}


@dataclass(frozen=True)
class Processors:
    """Processors of trainer and others; empty means any."""

    trainer: tuple[int, ...]
    rest: tuple[int, ...]

    @classmethod
    def split(cls) -> Processors:
        """Pin the trainer to the first processor and everything else to the second; no pinning with only one."""
        usable = sorted(os.sched_getaffinity(0))
        return cls((usable[0],), tuple(usable[1:2])) if len(usable) > 1 else cls((), ())

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Keep this process off the trainer's processor meanwhile."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.rest or before)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Run:
    """Times of a run of the loop: wall time, time in `session.checkpoint`, CPU time of the process.

    Only the run's own turns count. `waited_s`: time in which the loop was ready while other processes used its
    processor. `peak_bytes`: largest resident memory of the process while the loop ran. `agent_cpu_s`: CPU time of the
    agent and its warden over the job's whole life.
    """

    wall_s: float
    cpu_s: float
    waited_s: float
    checkpoints: int
    checkpoint_wall_s: float
    checkpoint_waited_s: float
    process_cpu_s: float
    peak_bytes: int = 0
    agent_cpu_s: float = 0.0
    committed: int = 0

    @property
    def undisturbed_s(self) -> float:
        """Compute the seconds of the loop without waiting for the processor."""
        return self.wall_s - self.waited_s

    @property
    def undisturbed_checkpoint_s(self) -> float:
        """Compute the same of its checkpoints."""
        return self.checkpoint_wall_s - self.checkpoint_waited_s


class Contender:
    """Process that trains in a folder of its own, from start to end."""

    def __init__(self, place: Path, command: Sequence[str], variables: dict[str, str]) -> None:
        self.place = place
        self._handles: list[Handle] = []
        with (place / "log").open("wb") as output:
            self._process = subprocess.Popen(
                command, env=clean_environment() | variables, stdout=output, stderr=subprocess.STDOUT
            )
        self.cpu_s = 0.0

    def subject(self) -> Subject:
        """Wait for the beginning of the loop and stop everything; raises RuntimeError if the process ended before."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (self.place / "ready").exists():
            if self._has_ended() or time.monotonic() > deadline:
                raise RuntimeError(f"a run did not begin: {self.output_tail()}")
            time.sleep(POLL_S)
        trainer = int((self.place / "ready").read_text(encoding="ascii"))
        self._handles = [Handle(trainer)] + [Handle(pid) for pid in family(self._process.pid) if pid != trainer]
        subject = Subject(self._handles, self.loop_ended)
        subject.freeze()
        return subject

    def finish(self) -> None:
        """Wait for the end; raises RuntimeError after a failure."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self._has_ended():
            if time.monotonic() > deadline:
                raise RuntimeError(f"a run did not end: {self.output_tail()}")
            time.sleep(POLL_S)
        if self._process.returncode:
            raise RuntimeError(f"a run ended with {self._process.returncode}: {self.output_tail()}")

    def result(self, subject: Subject, **more: Any) -> Run:
        """Read the stopwatch's times within the turns."""
        noted = json.loads((self.place / "times.json").read_text(encoding="utf-8"))
        return Run(
            wall_s=overlap_s(noted["loop"], subject.turns),
            cpu_s=noted["cpu_s"],
            waited_s=noted["waited_s"],
            checkpoints=len(noted["checkpoints"]),
            checkpoint_wall_s=sum(overlap_s(span, subject.turns) for span in noted["checkpoints"]),
            checkpoint_waited_s=noted["checkpoints_waited_s"],
            process_cpu_s=noted["process_cpu_s"],
            peak_bytes=noted["peak_bytes"],
            **more,
        )

    def close(self) -> None:
        """Continue everything and end the process; an agent's trainer dies with it."""
        for handle in self._handles:
            handle.resume()
            handle.close()
        self._handles = []
        if not self._has_ended():
            self._process.kill()
            self._process.wait()

    def output_tail(self) -> str:
        """Read the end of its output."""
        return (self.place / "log").read_text(encoding="utf-8", errors="replace")[-2000:]

    def loop_ended(self) -> bool:
        return (self.place / "ended").exists() or self._has_ended()

    def _has_ended(self) -> bool:
        """Reap the process here, because only the reaper learns the CPU seconds of the process and its children."""
        if self._process.returncode is None:
            pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self.cpu_s = usage.ru_utime + usage.ru_stime
        return self._process.returncode is not None


class Bench:
    """Bench that runs a loop in several modes at once, in folders below `scratch`."""

    def __init__(self, stack: RunningStack, scratch: Path, processors: Processors, loop: Loop) -> None:
        self._stack = stack
        self._scratch = scratch
        self._processors = processors
        self._loop = loop
        self._runs = 0
        with stack.client("submit") as client:
            client.upload_files("training-data", files_below(loop.data, prefix=f"{loop.name}/"))

    def round(self, order: Sequence[str]) -> dict[str, Run]:
        """Run each mode once in this order of turns. Raises RuntimeError if one fails."""
        contenders: dict[str, Contender] = {}
        with self._stack.client("submit") as client, _closed_at_the_end(contenders):
            for mode in order:
                if mode != "agent":
                    contenders[mode] = self._alone(mode)
            ready = {mode: contender.subject() for mode, contender in contenders.items()}
            # The last one: an agent that is stopped until slower ones have started loses its lease.
            job_id = self._submit(client, place := self._place("agent"))
            contenders["agent"] = self._agent(place)
            ready["agent"] = contenders["agent"].subject()
            subjects = {mode: ready[mode] for mode in order}
            # The cloud would be elsewhere: it answers between the agent's turns.
            cloud = Subject([Handle(pid) for pid in family(self._stack.pid)], contenders["agent"].loop_ended)
            turns = list(subjects.values())
            turns.insert(list(order).index("agent") + 1, cloud)
            take_turns(turns, timeout_s=TIMEOUT_S)
            for contender in contenders.values():
                contender.finish()
            state, events = client.get_job(job_id).state, client.events(job_id, limit=1000).events
        if state is not JobState.COMPLETE:
            raise RuntimeError(f"the job under the agent is {state}: {contenders['agent'].output_tail()}")
        runs = {mode: contenders[mode].result(subjects[mode]) for mode in order}
        runs["agent"] = replace(
            runs["agent"],
            agent_cpu_s=contenders["agent"].cpu_s - runs["agent"].process_cpu_s,
            committed=sum(event.type is EventType.CHECKPOINT_COMMITTED for event in events),
        )
        return runs

    def compare(self, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Run]:
        """Run bare once for each change of the parameters, in turns. Raises RuntimeError if one fails."""
        return self._compared(
            {name: lambda changed=changed: self._alone("bare", changed) for name, changed in variants.items()}
        )

    def compare_sessions(self, variants: Mapping[str, Mapping[str, str]]) -> dict[str, Run]:
        """Run the session once for each set of environment variables, in turns."""
        return self._compared(
            {name: lambda more=more: self._alone("session", variables=more) for name, more in variants.items()}
        )

    def _compared(self, variants: Mapping[str, Callable[[], Contender]]) -> dict[str, Run]:
        contenders: dict[str, Contender] = {}
        with _closed_at_the_end(contenders):
            for name, start in variants.items():
                contenders[name] = start()
            subjects = {name: contenders[name].subject() for name in variants}
            take_turns(list(subjects.values()), timeout_s=TIMEOUT_S)
            for contender in contenders.values():
                contender.finish()
        return {name: contenders[name].result(subjects[name]) for name in variants}

    def _alone(
        self, mode: str, changed: Mapping[str, Any] | None = None, variables: Mapping[str, str] | None = None
    ) -> Contender:
        place = self._place(mode)
        params = place / "params.json"
        params.write_text(json.dumps({**self._loop.params, **(changed or {})}), encoding="utf-8")
        own = {
            "BATON_DATA_DIR": str(self._loop.data),
            "BATON_OUTPUT_DIR": str(place / "output"),
            "BATON_PARAMS": str(params),
        }
        command = self._command(place, "session" if mode == "session" else "bare")
        return Contender(place, command, {**self._loop.variables, **own, **(variables or {})})

    def _submit(self, client: BatonClient, place: Path) -> str:
        job = JobSubmit(
            command=self._command(place, "agent"),
            queue=self._loop.name,
            parameters=dict(self._loop.params),
            inputs=[InputRef(prefix=f"{self._loop.name}/")],
            outputs=list(self._loop.outputs),
            environment=self._loop.variables,
            policy=Policy(heartbeat_interval_s=HEARTBEAT_INTERVAL_S, max_failures=1),
        )
        return client.submit(job).id

    def _agent(self, place: Path) -> Contender:
        variables = {
            "BATON_API_URL": self._stack.url,
            "BATON_API_KEY": self._stack.keys["worker"],
            "BATON_QUEUE": self._loop.name,
            "BATON_WORKSPACE": str(place / "workspace"),
            "BATON_MAX_JOBS": "1",
            "BATON_GPUS": "0",
            "BATON_VRAM_GIB": "0",
        }
        command = pinned([sys.executable, "-m", "gpu_client.agent"], self._processors.rest)
        return Contender(place, command, variables)

    def _place(self, mode: str) -> Path:
        self._runs += 1
        place = self._scratch / f"{self._runs}-{mode}"
        place.mkdir()
        return place

    def _command(self, place: Path, mode: str) -> list[str]:
        cpus = [str(cpu) for cpu in self._processors.trainer[:1]]
        where = ["--cpu", *cpus] if cpus else []
        notes = [part for name in ("ready", "ended") for part in (f"--{name}", str(place / name))]
        times = ["--times", str(place / "times.json")]
        return [sys.executable, "-m", self._loop.module, "--mode", mode, *times, *notes, *where]


@contextmanager
def _closed_at_the_end(contenders: Mapping[str, Contender]) -> Iterator[None]:
    try:
        yield
    finally:
        for contender in contenders.values():
            contender.close()


def rounds_of(bench: Bench, rounds: int) -> dict[str, list[Run]]:
    """Run rounds of all modes; the order of the turns changes each round."""
    runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode, run in bench.round(order_of(number)).items():
            runs[mode].append(run)
    return runs


def order_of(number: int) -> list[str]:
    """Choose an order whose start and direction change, so that all pairs are neighbors equally often."""
    first = number // 2 % len(MODES)
    order = [*MODES[first:], *MODES[:first]]
    return order[::-1] if number % 2 else order


def added_percent(run: Run) -> float:
    """Compute the percent that checkpoints add to the loop, from one run so that noise affects both alike."""
    return 100 * run.undisturbed_checkpoint_s / (run.undisturbed_s - run.undisturbed_checkpoint_s)


def family(pid: int) -> list[int]:
    """List a process and all its descendants."""
    root = psutil.Process(pid)
    return [root.pid, *(child.pid for child in root.children(recursive=True))]
