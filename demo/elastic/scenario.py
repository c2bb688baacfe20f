"""The scenario: three nodes train, one is killed inside a reduce, one joins, one freezes and wakes, all end equal."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from baton.contract.elastic.nodes import NodesSpec
from baton.contract.elastic.world import RoundReport, WorldView
from baton.contract.jobs.job import JobState, JobSubmit
from baton.contract.jobs.policy import Policy
from demo.cluster import LocalCluster
from demo.elastic.results import ElasticResults, TracedStep, WorldMoment
from demo.elastic.train import END, INSIDE, KILL
from demo.failure import DemoError
from demo.processes import ROOT, Child
from demo.runner import Stage
from demo.screen import Phase
from gpu_client.transport.api.client import BatonClient

MAX_ROUNDS = 1000
"""The demo ends the training, when all machines are back."""
LAST_ROUNDS = 8
"""Rounds after the return of the frozen machine."""
NODES = 3
FIRST_ROUNDS = 5
INNER_STEPS = 12
POLL_S = 0.1
START_S = 90.0
"""Deadline from the start of the workers to the first round."""
CHANGE_S = 40.0
"""Deadline of a change of membership."""
TRAIN_S = 150.0
"""Deadline of the rest of the training."""
FROZEN_S = 4.0
"""Time for which the group trains without the frozen machine."""


class WorldWatch:
    """Polls the world of the job, and keeps each moment."""

    def __init__(self, user: BatonClient, job_id: str, folder: Path) -> None:
        self.moments: list[WorldMoment] = []
        self._user, self._job_id, self._folder = user, job_id, folder

    @property
    def round(self) -> int:
        """Return the newest round that a node has traced; the API learns of rounds every 15 s."""
        return max((one["round"] for one in _read_lines(self._folder)), default=0)

    def trained_nodes(self) -> set[str]:
        """Return the nodes that have taken a step."""
        return {one["node"] for one in _read_lines(self._folder)}

    def poll(self) -> WorldView:
        """Return the present world."""
        view = self._user.world(self._job_id)
        self.moments.append(WorldMoment(time.time(), view))
        return view

    def until(self, condition: Callable[[WorldView], bool], event: str, deadline_s: float, phase: Phase) -> WorldView:
        """Poll until `condition` holds. Raises DemoError after `deadline_s`."""
        deadline = time.monotonic() + deadline_s
        while not condition(view := self.poll()):
            phase.at(0, f"epoch {view.epoch}, {len(view.members)} members, round {self.round}")
            if time.monotonic() > deadline:
                raise DemoError(f"{event} took more than {deadline_s:.0f} s; the world is {view.model_dump_json()}")
            time.sleep(POLL_S)
        return view


def play(stage: Stage) -> ElasticResults:
    """Run the scenario. Raises DemoError for a step that failed, BatonError for a failed call."""
    cluster = LocalCluster(stage)
    folder = stage.scratch / "traces"
    folder.mkdir()
    with cluster.user() as user:
        job = user.submit(_job(folder))
        watch = WorldWatch(user, job.id, folder)
        marks: list[tuple[float, str]] = []
        with stage.screen.phase("form", "Three machines form the world") as phase:
            workers = {f"machine-{number}": cluster.start_worker(number, max_jobs=None) for number in (1, 2, 3)}
            view = watch.until(
                lambda view: len(view.members) == NODES and watch.round >= FIRST_ROUNDS,
                "the first rounds",
                START_S,
                phase,
            )
            began_at = next(one.at for one in watch.moments if one.view.members)
            phase.ends_with(f"epoch {view.epoch}, round {watch.round}")
        results = ElasticResults(began_at, watch.moments, [], {}, 0, 0, marks)
        _kill_one(stage, watch, workers, folder, results)
        with stage.screen.phase("join", "A new machine joins") as phase:
            marks.append((time.time(), "a machine starts"))
            workers["machine-4"] = cluster.start_worker(4, max_jobs=None)
            view = watch.until(
                lambda view: len(view.members) == NODES and view.members[-1].node in watch.trained_nodes(),
                "the join",
                START_S,
                phase,
            )
            phase.ends_with(f"member of epoch {view.epoch} at round {watch.round}")
            trained = watch.round + 2
            watch.until(lambda _: watch.round >= trained, "the first rounds of the new machine", CHANGE_S, phase)
        _freeze_one(stage, watch, workers, results)
        with stage.screen.phase("finish", "Train to the end") as phase:
            results.rounds = watch.round + LAST_ROUNDS
            end = folder / f"{END}.new"
            end.write_text(str(results.rounds))
            end.rename(folder / END)
            watch.until(lambda view: view.state == "ended", "the end of the training", TRAIN_S, phase)
            ended = user.get_job(job.id)
            if ended.state is not JobState.COMPLETE:
                raise DemoError(f"the job is {ended.state}: {ended.reason}")
            phase.ends_with("complete")
        results.reports = _merge_reports(watch.moments)
    _read_traces(folder, results)
    program = next(one.view.program for one in watch.moments if one.view.program is not None)
    results.parameters = program.parameters
    return results


def _job(folder: Path) -> JobSubmit:
    return JobSubmit(
        command=["python", "-m", "demo.elastic.train"],
        name="elastic",
        nodes=NodesSpec(min=NODES, max=NODES),
        parameters={"rounds": MAX_ROUNDS, "inner_steps": INNER_STEPS},
        environment={"DEMO_FOLDER": str(folder), "PYTHONPATH": str(ROOT)},
        outputs=["model.safetensors"],
        policy=Policy(heartbeat_interval_s=1),
    )


def _kill_one(
    stage: Stage, watch: WorldWatch, workers: dict[str, Child], folder: Path, results: ElasticResults
) -> None:
    with stage.screen.phase("kill", "SIGKILL inside a reduce") as phase:
        epoch = watch.poll().epoch
        (folder / KILL).touch()
        deadline = time.monotonic() + CHANGE_S
        while not (taken := list(folder.glob(f"{INSIDE}-*"))):
            if time.monotonic() > deadline:
                raise DemoError(f"no node entered a reduce within {CHANGE_S:.0f} s")
            time.sleep(0.01)
        victim = int(taken[0].name.rpartition("-")[2])
        name = next(name for name, one in workers.items() if victim in [process.pid for process in one.family()])
        killed_at = time.time()
        workers.pop(name).kill_group()
        results.marks.append((killed_at, "SIGKILL"))
        view = watch.until(lambda view: view.epoch > epoch, "the new epoch", CHANGE_S, phase)
        results.kill_to_epoch_s = time.time() - killed_at
        results.kill_to_commit_s = _first_step_of_round(folder, killed_at) - killed_at
        phase.ends_with(f"{name} gone; epoch {view.epoch} after {results.kill_to_epoch_s:.1f} s")


def _first_step_of_round(folder: Path, killed_at: float) -> float:
    """Return the instant of the first inner step after a commit that follows the kill."""
    deadline = time.monotonic() + CHANGE_S
    while time.monotonic() < deadline:
        steps = _read_lines(folder)
        before = max((one["round"] for one in steps if one["at"] <= killed_at), default=0)
        after = [one["at"] for one in steps if one["at"] > killed_at and one["round"] > before]
        if after:
            return float(min(after))
        time.sleep(POLL_S)
    raise DemoError(f"the survivors committed no round within {CHANGE_S:.0f} s")


def _freeze_one(stage: Stage, watch: WorldWatch, workers: dict[str, Child], results: ElasticResults) -> None:
    with stage.screen.phase("freeze", "SIGSTOP, SIGCONT later") as phase:
        view = watch.poll()
        frozen = view.members[-1].machine_id or ""
        epoch = view.epoch
        frozen_at = time.time()
        _signal(workers[frozen], signal.SIGSTOP)
        results.marks.append((frozen_at, "SIGSTOP"))
        try:
            watch.until(lambda view: view.epoch > epoch, "the epoch without the frozen machine", CHANGE_S, phase)
            results.freeze_to_epoch_s = time.time() - frozen_at
            until = time.monotonic() + FROZEN_S
            while time.monotonic() < until:
                watch.poll()
                time.sleep(POLL_S)
        finally:
            _signal(workers[frozen], signal.SIGCONT)
        results.marks.append((time.time(), "SIGCONT"))
        view = watch.until(
            lambda view: any(one.machine_id == frozen for one in view.members), "the return", START_S, phase
        )
        phase.ends_with(f"excluded after {results.freeze_to_epoch_s:.1f} s, back in epoch {view.epoch}")


def _signal(worker: Child, number: signal.Signals) -> None:
    for process in worker.family():
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _merge_reports(moments: list[WorldMoment]) -> list[RoundReport]:
    found = {one.round: one for moment in moments for one in moment.view.rounds}
    return [found[number] for number in sorted(found)]


def _read_lines(folder: Path) -> list[dict[str, Any]]:
    """Read all traces; the last line of a killed process may be incomplete."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("trace-*.jsonl"))]
    return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _read_traces(folder: Path, results: ElasticResults) -> None:
    for one in _read_lines(folder):
        if "sha256" in one:
            results.weights[one["node"]] = one["sha256"]
        else:
            results.steps.append(TracedStep(one["at"], one["node"], one["round"], one["loss"]))
