"""Rules on a plain loop of accelerate change its optimizer; a killed run ends like an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import accelerate
import pytest
import torch

from baton import Session
from gpu_client.controller.learning_rate import LearningRate

RULES = """rules:
- {name: slower, when: loss < 0.5, do: {set: {knob: lr, factor: 0.5}}}
- {name: done, when: "loss < 0.02", do: stop}
"""


def trained(place: Path, *, dies_after: int = 0) -> tuple[list[float], list[torch.Tensor]]:
    """The learning rate that each step was made with, and the weights at the end."""
    torch.manual_seed(0)
    rules = place.parent / "rules.yaml"
    rules.write_text(RULES)
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    features = torch.eye(4)
    rates: list[float] = []
    with Session.start(output_dir=place, rules=rules, resume=True) as session:
        session.steering.offer(knobs={"lr": LearningRate(optimizer, schedule)})
        done = session.resume(model=model, optimizer=optimizer, schedule=schedule)
        for step in range(done + 1, 200):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            loss = torch.nn.functional.mse_loss(model(features), torch.ones(4, 1))
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            session.report(step, 200, loss=loss)
            if session.checkpoint_due(step, every=1):
                session.checkpoint(step, model=model, optimizer=optimizer, schedule=schedule)
            if session.should_stop or step == dies_after:
                break
        else:
            pytest.fail("no rule has ended it")
        assert dies_after or session.finishing
    return rates, [one.detach().clone() for one in accelerator.unwrap_model(model).parameters()]


def test_rules_steer_a_loop_of_accelerate_and_a_resumed_one_alike(tmp_path: Path) -> None:
    whole, weights = trained(tmp_path / "whole")
    assert whole[0] == 0.1 and whole[-1] == 0.05
    slower_at = whole.index(0.05)
    for dies_after in (slower_at - 1, slower_at, slower_at + 3):
        place = tmp_path / f"cut-{dies_after}"
        first, _ = trained(place, dies_after=dies_after)
        second, resumed = trained(place)
        assert first + second == whole
        assert all(torch.equal(one, other) for one, other in zip(weights, resumed, strict=True))
