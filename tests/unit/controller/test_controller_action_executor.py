"""The outcome of each action, with and without the loop's capability; no exception reaches the loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
from controller_kit import TrainingLoop

from baton.contract.rules.document.actions import ACTIONS
from gpu_client.controller.action_executor import ActionExecutor, LoopCapabilities
from gpu_client.controller.learning_rate import Setting
from gpu_client.controller.orders import Order


class Knob:
    def __init__(self, value: Any = 0.1) -> None:
        self.value = value

    def read(self) -> Any:
        return self.value

    def write(self, value: float) -> None:
        self.value = value


def performer_of(
    offer: LoopCapabilities | None = None, *, agent: bool = True
) -> tuple[ActionExecutor, TrainingLoop, list[Order]]:
    loop, left = TrainingLoop(), []

    def leave(order: Order) -> bool:
        left.append(order)
        return agent

    return ActionExecutor(loop, offer or LoopCapabilities(), leave, lambda order, outcome, said: None), loop, left


class Profiler:
    active = False

    def begin(self, steps: int, step: int, told: Any) -> str:
        return f"{steps} steps"

    def stepped(self, step: int) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


ARGUMENTS: dict[str, dict[str, Any]] = {
    "stop": {"outcome": "complete", "save": True},
    "set": {"knob": "lr", "factor": 0.5},
    "log": {"text": "x"},
    "alert": {"text": "x"},
    "hook": {"name": "h"},
    "scale": {"group": "g", "delta": 1},
    "profile": {"steps": 3},
}
POSSIBLE = "stop save evaluate log alert set rollback skip_batch pause requeue hook profile".split()  # noqa: SIM905


@pytest.mark.parametrize("action", ACTIONS)
def test_each_action_with_all_that_a_loop_can_offer(action: str) -> None:
    offer = LoopCapabilities(knobs={"lr": Knob()}, hooks={"h": lambda order: None}, evaluates=True, skips_batches=True)
    offer.profiler = Profiler()
    performer, _, _ = performer_of(offer)
    outcome, said = performer.execute(Order(action, ARGUMENTS.get(action, {}), rule="r"))
    assert outcome == ("applied" if action in POSSIBLE else "rejected") and said


@pytest.mark.parametrize("action", ACTIONS)
def test_each_action_in_a_loop_that_offers_nothing(action: str) -> None:
    performer, _, _ = performer_of(agent=False)
    outcome, said = performer.execute(Order(action, ARGUMENTS.get(action, {}), rule="r"))
    assert outcome == ("applied" if action in ("stop", "save", "log", "alert") else "rejected") and said


@pytest.mark.parametrize("arguments", [{}, {"knob": None}, {"text": 3}, {"knob": "lr"}, {"name": []}, {"save": "no"}])
@pytest.mark.parametrize("action", [*ACTIONS, "format_disk", ""])
def test_no_arguments_make_it_raise(action: str, arguments: dict[str, Any]) -> None:
    performer, _, _ = performer_of(LoopCapabilities(knobs={"lr": Knob()}, hooks={"h": lambda order: None}))
    assert performer.execute(Order(action, arguments, command=1))[0] in ("applied", "rejected", "failed")


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


@pytest.mark.parametrize(
    "error", [KeyError("x"), ValueError(), StopIteration(), UnspeakableError(), RecursionError("deep")]
)
def test_a_hook_may_raise_anything(error: Exception) -> None:
    def hook(order: Order) -> None:
        raise error

    performer, _, _ = performer_of(LoopCapabilities(hooks={"h": hook}))
    outcome, said = performer.execute(Order("hook", {"name": "h"}, rule="r"))
    assert outcome == "failed" and said.startswith(type(error).__name__)


@pytest.mark.parametrize(
    ("before", "arguments", "after", "outcome"),
    [
        (0.1, {"factor": 0.5}, 0.05, "applied"),
        (0.1, {"value": 0.3}, 0.3, "applied"),
        (0.1, {"value": 0}, 0.0, "applied"),
        (0.1, {"factor": 0.5, "min": 0.08}, 0.08, "applied"),
        (0.1, {"factor": 50, "max": 0.2}, 0.2, "applied"),
        (0.1, {"factor": math.inf, "max": 0.2}, 0.2, "applied"),
        # A rate below its least was raised to it by what was to lower it.
        (1e-7, {"factor": 0.5, "min": 1e-6}, 1e-7, "applied"),
        (0.0, {"factor": 0.5, "min": 1e-6}, 0.0, "applied"),
        (0.3, {"factor": 2, "max": 0.2}, 0.3, "applied"),
        (0.3, {"factor": 0.5, "max": 0.1}, 0.1, "applied"),
        (1e-7, {"factor": 2, "min": 1e-6}, 1e-6, "applied"),
        (-0.2, {"factor": 0.5, "min": -0.3}, -0.1, "applied"),
        (-0.4, {"factor": 2, "min": -0.3}, -0.4, "applied"),
        (-0.2, {"factor": 0.5, "max": -0.3}, -0.2, "applied"),
        (1e-7, {"value": 1e-8, "min": 1e-6}, 1e-6, "applied"),
        (1e-7, {"factor": 1, "min": 1e-6}, 1e-6, "applied"),
        (0.1, {"value": math.nan, "min": 0.0, "max": 1.0}, 0.1, "rejected"),
        (0.1, {"factor": math.inf}, 0.1, "rejected"),
        (math.nan, {"factor": 0.5}, math.nan, "rejected"),
        (0.1, {}, 0.1, "failed"),
        (0.1, {"value": "much"}, 0.1, "failed"),
        ("text", {"factor": 0.5}, "text", "failed"),
        (None, {"value": 1}, None, "failed"),
    ],
)
def test_set(before: Any, arguments: dict[str, Any], after: Any, outcome: str) -> None:
    knob = Knob(before)
    performer, _, _ = performer_of(LoopCapabilities(knobs={"k": knob}))
    found, said = performer.execute(Order("set", {"knob": "k", **arguments}, command=1))
    assert found == outcome and said
    assert knob.value == after or (knob.value != knob.value and after != after)


def test_set_says_what_it_came_to_and_which_knobs_there_are() -> None:
    knob = Knob(0.1)
    performer, _, _ = performer_of(
        LoopCapabilities(knobs={"lr": knob, "beta": Setting(lambda: 1.0, lambda value: None)})
    )
    assert performer.execute(Order("set", {"knob": "lr", "factor": 0.5}))[1] == "lr: 0.1 -> 0.05"
    assert "beta, lr" in performer.execute(Order("set", {"knob": "lt", "factor": 0.5}))[1]


def test_a_knob_that_refuses_has_failed_and_says_why() -> None:
    def write(value: float) -> None:
        raise ValueError("stuck")

    performer, _, _ = performer_of(LoopCapabilities(knobs={"k": Setting(lambda: 1.0, write)}))
    assert performer.execute(Order("set", {"knob": "k", "value": 2})) == ("failed", "ValueError: stuck")


@pytest.mark.parametrize("first", ["stop", "rollback", "pause", "requeue"])
@pytest.mark.parametrize("second", ["stop", "rollback", "pause", "requeue"])
def test_of_two_ends_only_the_first_counts(first: str, second: str) -> None:
    """A training that a rule had failed was `finishing` as soon as another one said complete."""
    performer, loop, left = performer_of()
    failed = {"outcome": "failed"} if first == "stop" else {}
    assert performer.execute(Order(first, failed, rule="a"))[0] == "applied"
    assert performer.execute(Order(second, {"outcome": "complete"}, rule="b"))[0] == "rejected"
    assert [order.rule for order in left] == ["a"]
    assert len(loop.stops) == 1 and not performer.finishing


def test_an_end_that_was_rejected_is_none() -> None:
    performer, loop, _ = performer_of(agent=False)
    assert performer.execute(Order("rollback", {}, rule="a"))[0] == "rejected"
    assert performer.execute(Order("stop", {}, rule="b"))[0] == "applied"
    assert performer.finishing and loop.stops == [("rule", True)]


@pytest.mark.parametrize(
    ("order", "checkpoint"),
    [
        (Order("stop", {"outcome": "failed", "save": False}), False),
        (Order("stop", {"outcome": "complete", "save": True}), True),
        (Order("stop", {}, command=3), True),
        (Order("rollback", {}), False),
        (Order("pause", {}), True),
        (Order("requeue", {}), True),
    ],
)
def test_which_ends_leave_a_checkpoint(order: Order, checkpoint: bool) -> None:
    performer, loop, _ = performer_of()
    performer.execute(order)
    assert loop.stops == [("rule", checkpoint)]


def test_a_save_says_what_it_is_for() -> None:
    performer, _, _ = performer_of()
    assert performer.execute(Order("save", {"tag": "before the merge"})) == (
        "applied",
        "a checkpoint is due: before the merge",
    )
    assert performer.execute(Order("save", {})) == ("applied", "a checkpoint is due")
