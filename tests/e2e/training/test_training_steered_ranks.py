"""Rules in trainings of several real processes: all decide alike, act after the same step, and none waits for ever."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from training_runs import forkserver, only_complete, run_ranks

from baton import Session
from tests.kits.network.ports import free_port
from tests.unit.controller.controller_kit import Agent, command

STEPS = 12
LOSSES = [1.0, 2.5, 3.5, 2.2, 0.5, 2.8, 3.1, 3.2, 1.0, 4.0, 4.0, 0.2]
RULES = {
    "rules": [
        {"name": "for", "when": "loss > 2", "for": "2 checks", "do": {"log": "x"}},
        {"name": "zscore", "when": "abs(zscore(loss, 4)) > 1", "do": {"set": {"knob": "lr", "factor": 0.5}}},
        {"name": "mean", "when": "mean(loss, 3) > 2.4", "do": {"log": "x"}, "cooldown": "2 checks"},
        {"name": "eval", "when": "eval.loss < 1", "do": {"log": "x"}},
        {"name": "own", "when": "mine > 3 and loss > 0", "do": {"log": "x"}},
        {"name": "nan", "when": "isnan(loss)", "do": "stop"},
    ]
}


class Rate:
    value = 1.0

    def read(self) -> float:
        return self.value

    def write(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def train(rank: int, size: int, port: int, folder: str, how: dict[str, Any]) -> None:
    """Train as one process; write its record to `<folder>/<rank>.json`."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=120))
    rules = Path(folder) / "rules.json"
    variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "BATON_OUTPUT_DIR": f"{folder}/output"}
    resume = how.get("resume", False)
    session = Session.start(rules=rules if how.get("rules", True) else None, variables=variables, resume=resume)
    agent, rate = Agent(), Rate()
    if rank == 0 and how.get("agent", True):
        session.steering._reporter.send = agent
    session.steering.offer(knobs={"lr": rate})
    seen, ended_at = [], 0
    for step in range(session.resume(rate=rate) + 1, STEPS + 1):
        if rank == 0 and step == how.get("live_at"):
            session.steering.receive({"type": "rules", "revision": 5, "text": json.dumps(RULES)})
            session.steering.receive(command(1, "set", knob="lr", factor=0.25))
        loss = float("nan") if (rank, step) == tuple(how.get("nan", ())) else LOSSES[step - 1]
        reports = 0 if rank in how.get("silent", ()) else 2 if rank in how.get("twice", ()) else 1
        for _ in range(reports):
            session.report(step, STEPS, loss=loss, **({"mine": step} if rank == how.get("own") else {}))
        if session.checkpoint_due(step, how.get("every")):
            session.checkpoint(step, rate=rate, must=True)
        if rank == 0 and step % 4 == 0:
            session.steering.evaluated(step, loss=LOSSES[step - 1])
        ended_at = step
        seen.append([rate.value, session.steering.engine.revision])
        if session.should_stop:
            break
        if step == how.get("killed_after"):
            tell(folder, rank, fired=agent.fired(), seen=seen)
            os.kill(os.getpid(), signal.SIGKILL)
    session.close()
    tell(folder, rank, fired=agent.fired(), ended_at=ended_at, seen=seen, finishing=session.finishing)
    if size > 1:
        dist.destroy_process_group()


def tell(folder: str, rank: int, **saw: Any) -> None:
    Path(folder, f"{rank}.json").write_text(json.dumps(saw))


def run(folder: Path, size: int, **how: Any) -> list[dict[str, Any]]:
    """Run a training of `size` processes; return the record of each. Fails if a process does not reach its end."""
    folder.mkdir(exist_ok=True)
    (folder / "rules.json").write_text(json.dumps(how.get("document", RULES)))
    port = free_port()
    # Forked from a server that has imported torch: spawned processes take four seconds each to import torch.
    ranks = [forkserver.Process(target=train, args=(rank, size, port, str(folder), how)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    until = time.monotonic() + 300
    for rank in ranks:
        rank.join(max(0.0, until - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
            rank.join()
    assert codes == [-signal.SIGKILL if "killed_after" in how else 0] * size
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def test_one_two_and_four_processes_decide_the_same(tmp_path: Path) -> None:
    (alone,) = run(tmp_path / "1", 1, own=0)
    assert {name for name, _ in alone["fired"]} == {"for", "zscore", "mean", "eval", "own"}
    for size in (2, 4):
        ranks = run(tmp_path / str(size), size, own=size - 1, silent=[1] if size == 4 else [], twice=[2])
        assert ranks[0]["fired"] == alone["fired"], "(rule, step), in this order"
        assert [rank["fired"] for rank in ranks[1:]] == [[]] * (size - 1)
        assert [rank["ended_at"] for rank in ranks] == [STEPS] * size
        assert all(rank["seen"] == ranks[0]["seen"] for rank in ranks), "knobs are turned after the same step"
        rates, rates_alone = ([seen[0] for seen in one["seen"]] for one in (ranks[0], alone))
        assert rates == [1.0, 1.0, *rates_alone[:-2]] != [1.0] * STEPS, "two steps later than one alone"


@pytest.mark.parametrize(("size", "rank"), [(2, 1), (4, 3)])
def test_one_process_with_a_nan_stops_all_after_the_same_step(tmp_path: Path, size: int, rank: int) -> None:
    ranks = run(tmp_path / "nan", size, nan=(rank, 5))
    assert ["nan", 5] in ranks[0]["fired"]
    assert [one["ended_at"] for one in ranks] == [7] * size, "seen after step 6, done after step 7"
    assert all(one["finishing"] for one in ranks)


@pytest.mark.parametrize("agent", [True, False], ids=["with an agent", "alone"])
def test_all_leave_alike_though_only_the_first_has_an_agent(tmp_path: Path, agent: bool) -> None:
    """Both processes leave at the same step with the same end; different ends would block the next collective call."""
    document = {"rules": [{"name": do, "when": "loss > 2", "do": do} for do in ("pause", "stop")]}
    ranks = run(tmp_path / "ends", 2, document=document, agent=agent)
    assert [one["ended_at"] for one in ranks] == [4, 4]
    assert [one["finishing"] for one in ranks] == [not agent] * 2


def test_a_trainer_of_two_processes_goes_by_rules_alike_and_sees_the_nan_of_one(tmp_path: Path) -> None:
    """Two processes decide as one with the mean of their losses, three steps later; a NaN ends them at its step.

    The Trainer logs a loss after its step, ranks send it after the next step, and receive it one step later.
    """
    nan = float("nan")
    losses = [[1.0, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 5.0, 5.0, 1.0, nan, 1.0, 1.0, 1.0, 1.0]]
    rules = """rules:
- {name: high, when: "mean(loss, 2) > 2", once: true, do: {set: {knob: lr, factor: 0.5}}}
- {name: nan, when: not isfinite(loss), do: {stop: failed}}
"""
    for name, given in (("two", losses), ("one", [[(a + b) / 2 for a, b in zip(*losses, strict=True)]])):
        (tmp_path / f"{name}-rules.yaml").write_text(rules)
        printed = run_ranks("steered_trainer", tmp_path / name, len(given), losses=given)
        ends = {text[text.index("rates ") :].strip() for text in printed}
        assert len(ends) == 1, "the same rate after each step, and the same last one"
        ((rates, left),) = (end.splitlines() for end in ends)
        late = 3 * (len(given) - 1)
        last = 7 if len(given) == 2 else 5
        assert json.loads(rates.removeprefix("rates ")) == ([1.0] * (2 + late) + [0.5] * 9)[:last]
        assert left == f"left after step {last}: rule"
        fired = [re.findall(r"rule\.fired (\w+)", text) for text in printed]
        assert fired == [["high", "nan"], []][: len(given)], "the first one decides"
        assert only_complete(tmp_path / name) == [last]


def test_a_trainer_of_two_processes_that_seldom_logs_sees_the_nan_of_one(tmp_path: Path) -> None:
    losses = [[1.0] * 12, [1.0] * 3 + [float("nan")] + [1.0] * 8]
    (tmp_path / "two-rules.yaml").write_text("rules: [{name: nan, when: not isfinite(loss), do: {stop: failed}}]")
    printed = run_ranks("steered_trainer", tmp_path / "two", losses=losses, logging_steps=500)
    assert all("left after step 6: rule" in text for text in printed), (
        "told of with step 4, heard after 5, done after 6"
    )
    assert "rule.fired nan" in printed[0] and "rule.fired" not in printed[1]
    assert only_complete(tmp_path / "two") == [6]


def test_a_live_revision_and_a_command_reach_all_after_the_same_step(tmp_path: Path) -> None:
    ranks = run(tmp_path / "live", 2, rules=False, live_at=6)
    assert ranks[0]["seen"] == ranks[1]["seen"]
    assert [seen[1] for seen in ranks[0]["seen"]] == [0] * 6 + [5] * 6
    assert [seen[0] for seen in ranks[0]["seen"]][5:7] == [1.0, 0.25]
    assert ranks[0]["fired"]


def test_killed_with_rules_in_force_other_processes_go_on_as_if_they_had_not_been(tmp_path: Path) -> None:
    """A checkpoint holds the orders under way between the processes; a resumed training fires as an unkilled one."""
    whole = run(tmp_path / "whole", 2, own=0)[0]
    fired, seen = [], []
    for size, killed_after in ((2, 4), (3, 7), (2, None)):
        how: dict[str, Any] = {"resume": bool(seen), "every": 1, "own": 0}
        if killed_after is not None:
            how["killed_after"] = killed_after
        first = run(tmp_path / "killed", size, **how)[0]
        fired += first["fired"]
        seen += first["seen"]
    assert fired == whole["fired"]
    assert [rate for rate, _ in seen] == [rate for rate, _ in whole["seen"]] != [1.0] * STEPS
