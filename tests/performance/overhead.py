"""What the agent costs the training loop: the digits example under the agent, with its session alone, and bare, twice.

They take turns on one processor; agent, control plane and emulated cloud have another, and are stopped while it is not
their turn. See README.md for what this includes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image
from sklearn.datasets import load_digits

from contract.history import EventType
from contract.jobs import InputRef, JobState, JobSubmit, Policy
from gpu_client.transport.api import BatonClient
from gpu_client.transport.objects import files_below
from tests.performance.figures import Figure
from tests.performance.local_stack import RunningStack, clean_environment, pinned
from tests.performance.turns import Handle, Subject, overlap_s, take_turns

TARGET_RATIO = 1.03
CHECKPOINT_EVERY = 50
HEARTBEAT_INTERVAL_S = 5
"""Of wall time, of which the loop has a fifth: one heartbeat in a second of training."""
IMAGES = 400
TIMEOUT_S = 300.0
POLL_S = 0.05
MODES = ("bare", "session", "control", "agent")
"""`control` is a second bare loop: how far the two are apart is what cannot be told apart here."""
QUEUE = "overhead"
_PROCESS = Path(__file__).with_name("digits_process.py")


@dataclass(frozen=True)
class Processors:
    """Who runs where; empty means anywhere."""

    trainer: tuple[int, ...]
    rest: tuple[int, ...]

    @classmethod
    def split(cls) -> Processors:
        """The first processor for the trainer, the second for everything else; no pinning with only one."""
        usable = sorted(os.sched_getaffinity(0))
        return cls((usable[0],), tuple(usable[1:2])) if len(usable) > 1 else cls((), ())


@dataclass(frozen=True)
class Run:
    """One run of the loop: its time, what of it was spent in `session.checkpoint`, and the CPU time of the process.

    Only the run's own turns count. `waited_s`: how long the loop was ready while its processor was busy with others.
    `agent_cpu_s`: of the agent and its warden, over the job's whole life.
    """

    wall_s: float
    cpu_s: float
    waited_s: float
    checkpoints: int
    checkpoint_wall_s: float
    checkpoint_waited_s: float
    process_cpu_s: float
    agent_cpu_s: float = 0.0
    committed: int = 0

    @property
    def undisturbed_s(self) -> float:
        """The loop without waiting for the processor."""
        return self.wall_s - self.waited_s

    @property
    def undisturbed_checkpoint_s(self) -> float:
        """The same, of the checkpoints in it."""
        return self.checkpoint_wall_s - self.checkpoint_waited_s


class Contender:
    """One process that trains, from its start to its end, in a folder of its own."""

    def __init__(self, place: Path, command: Sequence[str], variables: dict[str, str]) -> None:
        self.place = place
        self._handles: list[Handle] = []
        with (place / "log").open("wb") as output:
            self._process = subprocess.Popen(
                command, env=clean_environment() | variables, stdout=output, stderr=subprocess.STDOUT
            )
        self.cpu_s = 0.0

    def subject(self) -> Subject:
        """Wait until the loop is about to begin, and stop everything. Raises RuntimeError if it ended before."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (self.place / "ready").exists():
            if self._has_ended() or time.monotonic() > deadline:
                raise RuntimeError(f"a run did not begin: {self.said()}")
            time.sleep(POLL_S)
        trainer = int((self.place / "ready").read_text(encoding="ascii"))
        self._handles = [Handle(trainer)] + [Handle(pid) for pid in family(self._process.pid) if pid != trainer]
        subject = Subject(self._handles, self.loop_ended)
        subject.freeze()
        return subject

    def finish(self) -> None:
        """Wait for the end; raises RuntimeError unless it is a good one."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self._has_ended():
            if time.monotonic() > deadline:
                raise RuntimeError(f"a run did not end: {self.said()}")
            time.sleep(POLL_S)
        if self._process.returncode:
            raise RuntimeError(f"a run ended with {self._process.returncode}: {self.said()}")

    def result(self, subject: Subject, **more: Any) -> Run:
        """What the stopwatch noted, within the turns."""
        noted = json.loads((self.place / "times.json").read_text(encoding="utf-8"))
        return Run(
            wall_s=overlap_s(noted["loop"], subject.turns),
            cpu_s=noted["cpu_s"],
            waited_s=noted["waited_s"],
            checkpoints=len(noted["checkpoints"]),
            checkpoint_wall_s=sum(overlap_s(span, subject.turns) for span in noted["checkpoints"]),
            checkpoint_waited_s=noted["checkpoints_waited_s"],
            process_cpu_s=noted["process_cpu_s"],
            **more,
        )

    def close(self) -> None:
        """Let everything go on, and end it if it still runs. An agent's trainer dies with it."""
        for handle in self._handles:
            handle.resume()
            handle.close()
        self._handles = []
        if not self._has_ended():
            self._process.kill()
            self._process.wait()

    def said(self) -> str:
        """The end of its output."""
        return (self.place / "log").read_text(encoding="utf-8", errors="replace")[-2000:]

    def loop_ended(self) -> bool:
        return (self.place / "ended").exists() or self._has_ended()

    def _has_ended(self) -> bool:
        """Reaps it itself: only so the CPU seconds of the process and of those it waited for are told."""
        if self._process.returncode is None:
            pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self.cpu_s = usage.ru_utime + usage.ru_stime
        return self._process.returncode is not None


class Bench:
    """Runs the loop in its three ways at once, in folders below `scratch`."""

    def __init__(
        self, stack: RunningStack, scratch: Path, processors: Processors, steps: int, checkpoint_every: int
    ) -> None:
        self._stack = stack
        self._scratch = scratch
        self._processors = processors
        self._params = {"steps": steps, "checkpoint_every": checkpoint_every}
        self._data = scratch / "digits"
        self._runs = 0
        write_images(self._data)
        with stack.client("submit") as client:
            client.upload_files("training-data", files_below(self._data, prefix="digits/"))

    def round(self, order: Sequence[str]) -> dict[str, Run]:
        """One run of each mode, taking turns in this order. Raises RuntimeError if one fails."""
        contenders: dict[str, Contender] = {}
        subjects: dict[str, Subject] = {}
        with self._stack.client("submit") as client:
            try:
                job_id = self._submit(client, place := self._place("agent"))
                contenders["agent"] = self._agent(place)
                for mode in order:
                    if mode != "agent":
                        contenders[mode] = self._alone(self._place(mode), mode)
                subjects = {mode: contenders[mode].subject() for mode in order}
                # The cloud would be elsewhere: it answers between the agent's turns.
                cloud = Subject([Handle(pid) for pid in family(self._stack.pid)], contenders["agent"].loop_ended)
                turns = list(subjects.values())
                turns.insert(list(order).index("agent") + 1, cloud)
                take_turns(turns, timeout_s=TIMEOUT_S)
                for contender in contenders.values():
                    contender.finish()
            finally:
                for contender in contenders.values():
                    contender.close()
            state, events = client.get_job(job_id).state, client.events(job_id, limit=1000).events
        if state is not JobState.COMPLETE:
            raise RuntimeError(f"the job under the agent is {state}: {contenders['agent'].said()}")
        runs = {mode: contenders[mode].result(subjects[mode]) for mode in order}
        runs["agent"] = replace(
            runs["agent"],
            agent_cpu_s=contenders["agent"].cpu_s - runs["agent"].process_cpu_s,
            committed=sum(event.type is EventType.CHECKPOINT_COMMITTED for event in events),
        )
        return runs

    def _alone(self, place: Path, mode: str) -> Contender:
        params = place / "params.json"
        params.write_text(json.dumps(self._params), encoding="utf-8")
        variables = {
            "BATON_DATA_DIR": str(self._data),
            "BATON_OUTPUT_DIR": str(place / "output"),
            "BATON_PARAMS": str(params),
        }
        return Contender(place, self._command(place, "session" if mode == "session" else "bare"), variables)

    def _submit(self, client: BatonClient, place: Path) -> str:
        job = JobSubmit(
            command=self._command(place, "agent"),
            queue=QUEUE,
            parameters=self._params,
            inputs=[InputRef(prefix="digits/")],
            outputs=["model.safetensors"],
            policy=Policy(heartbeat_interval_s=HEARTBEAT_INTERVAL_S, max_failures=1),
        )
        return client.submit(job).id

    def _agent(self, place: Path) -> Contender:
        variables = {
            "BATON_API_URL": self._stack.url,
            "BATON_API_KEY": self._stack.keys["worker"],
            "BATON_QUEUE": QUEUE,
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
        return [sys.executable, str(_PROCESS), "--mode", mode, "--times", str(place / "times.json"), *notes, *where]


def measure(
    stack: RunningStack,
    scratch: Path,
    *,
    rounds: int,
    steps: int,
    checkpoint_every: int = CHECKPOINT_EVERY,
    at_most: float = TARGET_RATIO,
) -> list[Figure]:
    """Rounds in each of which all three run; the order of their turns changes from round to round."""
    processors = Processors.split()
    if processors.rest:
        # We, too, keep off the trainer's processor.
        os.sched_setaffinity(0, processors.rest)
    bench = Bench(stack, scratch, processors, steps, checkpoint_every)
    runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode, run in bench.round(order_of(number)).items():
            runs[mode].append(run)
    return figures(runs, processors, steps, checkpoint_every, at_most)


def order_of(number: int) -> list[str]:
    """Who is first changes from round to round, and the direction too: each is the other's neighbour equally often."""
    first = number // 2 % len(MODES)
    order = [*MODES[first:], *MODES[:first]]
    return order[::-1] if number % 2 else order


def figures(
    runs: dict[str, list[Run]],
    processors: Processors,
    steps: int,
    checkpoint_every: int = CHECKPOINT_EVERY,
    at_most: float = TARGET_RATIO,
) -> list[Figure]:
    """What the runs say: wall against bare (the target), CPU against bare, and where it goes."""
    bare, control, alone, agent = runs["bare"], runs["control"], runs["session"], runs["agent"]
    details: dict[str, Any] = {
        "steps": steps,
        "checkpoint_every": checkpoint_every,
        "heartbeat_interval_s": HEARTBEAT_INTERVAL_S,
        "checkpoints written": [run.checkpoints for run in agent],
        "checkpoints committed": [run.committed for run in agent],
        "processors": {"trainer": list(processors.trainer), "agent and control plane": list(processors.rest)},
        "waited for the processor, s": {
            mode: [round(run.waited_s, 3) for run in of_mode] for mode, of_mode in runs.items()
        },
        "agent_cpu_s (whole job)": [round(run.agent_cpu_s, 3) for run in agent],
    }

    def against_bare(name: str, subject: list[Run], of: Callable[[Run], float], **more: Any) -> Figure:
        both = [(of(first) + of(second)) / 2 for first, second in zip(bare, control, strict=True)]
        values = [of(run) for run in subject]
        return Figure(name=name, unit="s", rounds=values, baseline_name="bare", baseline=both, **more)

    return [
        against_bare(
            "training loop under the agent: wall",
            agent,
            lambda run: run.wall_s,
            at_most=at_most,
            details=details,
        ),
        against_bare("training loop under the agent: wall less waiting", agent, lambda run: run.undisturbed_s),
        against_bare("training loop under the agent: CPU", agent, lambda run: run.cpu_s),
        against_bare("training loop with session alone: wall", alone, lambda run: run.wall_s),
        Figure(
            name="control: one bare loop against the other",
            unit="s",
            rounds=[run.wall_s for run in control],
            baseline_name="bare",
            baseline=[run.wall_s for run in bare],
        ),
        Figure(
            name="session.checkpoint under the agent: wall",
            unit="ms",
            rounds=[1000 * run.checkpoint_wall_s / run.checkpoints for run in agent],
            baseline_name="alone",
            baseline=[1000 * run.checkpoint_wall_s / run.checkpoints for run in alone],
        ),
        Figure(
            name="session.checkpoint: added to the steps, less waiting",
            unit="%",
            rounds=[added_percent(run) for run in agent],
            baseline_name="alone",
            baseline=[added_percent(run) for run in alone],
        ),
    ]


def added_percent(run: Run) -> float:
    """How much longer the loop takes for its checkpoints: from one and the same run, so that noise hits both alike."""
    return 100 * run.undisturbed_checkpoint_s / (run.undisturbed_s - run.undisturbed_checkpoint_s)


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    root = psutil.Process(pid)
    return [root.pid, *(child.pid for child in root.children(recursive=True))]


def write_images(folder: Path) -> None:
    """The first of scikit-learn's handwritten digits as `<label>/<index>.png`."""
    digits = load_digits()
    for index, (pixels, label) in enumerate(zip(digits.images[:IMAGES], digits.target, strict=False)):
        path = folder / str(label) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype(np.uint8)).save(path)
