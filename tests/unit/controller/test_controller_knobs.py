"""The learning rate of real optimizers under every kind of schedule continues scaled, also after a resume."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from gpu_client.controller.learning_rate import LearningRate

STEPS, TURN_AT = 14, 5
Make = Callable[[Any], Any]


def pieces(optimizer: Any) -> Any:
    first = schedules.LinearLR(optimizer, 0.1, total_iters=3)
    return schedules.SequentialLR(optimizer, [first, schedules.CosineAnnealingLR(optimizer, 12, 1e-4)], milestones=[4])


def nested(optimizer: Any) -> Any:
    return schedules.SequentialLR(
        optimizer,
        [schedules.ConstantLR(optimizer, 0.5, 2), schedules.LambdaLR(optimizer, lambda step: 0.9**step)],
        milestones=[8],
    )


MAKES: dict[str, Make] = {
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 0.95**step),
    "multiplicative": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.95),
    "step": lambda o: schedules.StepLR(o, 3, 0.5),
    "multistep": lambda o: schedules.MultiStepLR(o, [4, 9], 0.5),
    "constant": lambda o: schedules.ConstantLR(o, 0.3, 8),
    "linear": lambda o: schedules.LinearLR(o, 0.1, total_iters=9),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "polynomial": lambda o: schedules.PolynomialLR(o, 20, 2.0),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 12, 1e-3),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 4, eta_min=1e-3),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.2, step_size_up=4, cycle_momentum=False),
    "onecycle": lambda o: schedules.OneCycleLR(o, 0.5, total_steps=STEPS + 1),
    "onecycle three": lambda o: schedules.OneCycleLR(o, 0.5, total_steps=STEPS + 1, three_phase=True),
    "sequential": pieces,
    "sequential of others": nested,
    "chained": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o, 0.5, 6), schedules.ExponentialLR(o, 0.9)]),
}


def made(make: Make, lr: Any = 0.1, **options: Any) -> tuple[Any, Any]:
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "lr": copy.deepcopy(lr) * 10}]
    optimizer = torch.optim.AdamW(groups, lr=lr, **options)
    return optimizer, make(optimizer)


def rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def course(optimizer: Any, schedule: Any, steps: int) -> list[list[float]]:
    found = []
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        found.append(rates(optimizer))
    return found


def close(found: list[list[float]], expected: list[list[float]], factor: float = 1.0) -> None:
    flat = [value for row in found for value in row]
    wanted = [value * factor for row in expected for value in row]
    assert flat == pytest.approx(wanted, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("name", MAKES)
def test_the_schedule_goes_on_at_the_factor(name: str) -> None:
    """CyclicLR kept its upper rates, cosines their floor."""
    make = MAKES[name]
    plain = course(*made(make), STEPS)
    optimizer, schedule = made(make)
    close(course(optimizer, schedule, TURN_AT), plain[:TURN_AT])
    knob = LearningRate(optimizer, schedule)
    before = rates(optimizer)
    knob.write(knob.read() * 0.5)
    assert rates(optimizer) == pytest.approx([rate * 0.5 for rate in before])
    close(course(optimizer, schedule, STEPS - TURN_AT), plain[TURN_AT:], 0.5)


@pytest.mark.parametrize("name", MAKES)
def test_a_resumed_training_goes_on_with_it(name: str) -> None:
    make = MAKES[name]
    optimizer, schedule = made(make)
    course(optimizer, schedule, TURN_AT)
    LearningRate(optimizer, schedule).scale(0.25)
    saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    expected = course(optimizer, schedule, STEPS - TURN_AT)
    resumed, other = made(make)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    close(course(resumed, other, STEPS - TURN_AT), expected)


@pytest.mark.parametrize("name", MAKES)
def test_a_knob_made_before_the_state_is_loaded_turns_what_trains(name: str) -> None:
    """load_state_dict() gives the optimizer new groups: the knob turned the old ones, and nothing happened."""
    make = MAKES[name]
    optimizer, schedule = made(make)
    course(optimizer, schedule, TURN_AT)
    saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    expected = course(optimizer, schedule, STEPS - TURN_AT)
    resumed, other = made(make)
    knob = LearningRate(resumed, other)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    knob.scale(0.5)
    close(course(resumed, other, STEPS - TURN_AT), expected, 0.5)


def test_reduce_on_plateau_goes_on_below() -> None:
    def run(factor: float | None) -> list[list[float]]:
        optimizer, schedule = made(lambda o: schedules.ReduceLROnPlateau(o, patience=1, min_lr=1e-3))
        found = []
        for step in range(12):
            if step == TURN_AT and factor is not None:
                LearningRate(optimizer, schedule).scale(factor)
            optimizer.step()
            schedule.step(1.0)
            found.append(rates(optimizer))
        return found

    plain = run(None)
    close(run(0.5)[TURN_AT:], plain[TURN_AT:], 0.5)
    assert plain[-1][0] == pytest.approx(1e-3), "down to its floor"


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    """A captured graph reads that very tensor: another one in its place changes nothing."""
    optimizer, schedule = made(MAKES["cosine"], torch.tensor(0.1), foreach=False)
    before = [group["lr"] for group in optimizer.param_groups]
    LearningRate(optimizer, schedule).write(0.05)
    after = [group["lr"] for group in optimizer.param_groups]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert rates(optimizer) == pytest.approx([0.05, 0.5])
    plain = course(*made(MAKES["cosine"], torch.tensor(0.1), foreach=False), 3)
    close(course(optimizer, schedule, 3), plain, 0.5)


def test_accelerates_wrappers_are_looked_through() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    plain = course(*made(MAKES["onecycle"]), STEPS)
    optimizer, schedule = made(MAKES["onecycle"])
    optimizer, schedule = accelerator.prepare(optimizer, schedule)
    knob = LearningRate(optimizer, schedule)
    found = course(optimizer, schedule, TURN_AT)
    knob.scale(0.5)
    close(found, plain[:TURN_AT])
    close(course(optimizer, schedule, STEPS - TURN_AT), plain[TURN_AT:], 0.5)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 0.0])
def test_what_no_rate_can_be_is_refused(value: float) -> None:
    optimizer, schedule = made(MAKES["step"])
    with pytest.raises(ValueError):
        LearningRate(optimizer, schedule).write(value)
    assert rates(optimizer) == [0.1, 1.0]


def test_where_a_warm_up_begins_at_0_only_a_factor_can_be_meant() -> None:
    def warm_up(optimizer: Any) -> Any:
        return schedules.LambdaLR(optimizer, lambda step: step / 10)

    optimizer, schedule = made(warm_up)
    knob = LearningRate(optimizer, schedule)
    assert knob.read() == 0
    with pytest.raises(ValueError, match="is 0"):
        knob.write(0.01)
    knob.scale(0.5)
    close(course(optimizer, schedule, 3), course(*made(warm_up), 3), 0.5)
