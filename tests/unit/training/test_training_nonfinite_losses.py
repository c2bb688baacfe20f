"""Losses that are not finite are found at their step, however rarely Hugging Face's Trainer logs."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from baton import Session
from gpu_client.training.integrations.hf_callback import NonfiniteLosses

transformers = pytest.importorskip("transformers")
from trainer_kit import Losses, Model, Ordered, Trained  # noqa: E402  # it needs transformers

NAN = float("nan")
STOP = "rules: [{name: odd, when: not isfinite(loss), do: {stop: failed}}]"
SELDOM: dict[str, Any] = {"logging_steps": 6}


@pytest.mark.parametrize("odd", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("step", [1, 2, 5, 6, 7])
def test_a_rule_acts_at_the_step_itself(tmp_path: Path, odd: float, step: int) -> None:
    """A rule acts at the step of a nonfinite loss, although the Trainer logs a loss only every 500 steps."""
    losses = [1.0] * (step - 1) + [odd] + [1.0] * 3
    trained = Trained(tmp_path, STOP, losses, **SELDOM)
    assert trained.fired() == [("odd", step)] and trained.step == step and not trained.finishing
    assert (tmp_path / "output" / f"checkpoint-{step}" / "baton.json").is_file()


def test_each_batch_of_a_step_counts(tmp_path: Path) -> None:
    trained = Trained(tmp_path, STOP, [1.0] * 4, **SELDOM, gradient_accumulation_steps=3, dataset=lambda _: Losses(
        [1.0, 1.0, 1.0, 1.0, NAN, 1.0, *[1.0] * 6]
    ))  # fmt: skip
    assert trained.fired() == [("odd", 2)]


def test_finite_losses_count_when_they_are_logged(tmp_path: Path) -> None:
    """Finite losses count at each log and not at each step, so that `for: 2 checks` means two logs."""
    rules = "rules: [{name: r, when: loss > 2, for: 2 checks, do: stop}]"
    assert Trained(tmp_path, rules, [3.0] * 6, logging_steps=2).fired() == [("r", 4)]


def test_one_that_is_logged_at_its_step_counts_once(tmp_path: Path) -> None:
    rules = "rules: [{name: r, when: not isfinite(loss), for: 3 checks, do: stop}]"
    trained = Trained(tmp_path, rules, [1.0, NAN, NAN, 1.0, 1.0, 1.0], logging_steps=2)
    assert trained.fired() == [("r", 4)], "logged at 2, seen at 3, logged at 4: the Trainer's mean never recovers"


def test_the_preset_is_shown_it_without_a_rule(tmp_path: Path) -> None:
    """The agent evaluates presets by the reported losses."""
    trained = Trained(tmp_path, "", [1.0, 1.0, NAN, 1.0, 1.0], job=True, **SELDOM)
    assert trained.shown[:2] == [None, None]
    assert [math.isnan(loss) for loss in trained.shown[2:]] == [True] * 3, "until the next one is logged"


def test_arguments_and_model_are_the_scripts_again(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "", [1.0] * 2, job=True)
    assert trained.filtered == {False} and trained.arguments.logging_nan_inf_filter
    assert trained.hooks == 0


@pytest.mark.parametrize(
    ("rules", "job", "filtering"),
    [("rules: [{name: r, when: step > 9, do: stop}]", False, True), ("", True, False), ("presets: off", True, True)],
)
def test_where_nobody_asks_no_step_waits_for_its_loss(
    tmp_path: Path, rules: str, job: bool, filtering: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that has switched the Trainer's filter off has done so to wait for no loss."""
    asked: list[float | None] = []
    monkeypatch.setattr(NonfiniteLosses, "__call__", lambda *_: asked.append(None))
    rules = f"{{{rules}, rules: []}}" if rules == "presets: off" else rules
    Trained(tmp_path, rules, [1.0, NAN], job=job, logging_nan_inf_filter=filtering, **SELDOM)
    assert asked == []


def test_an_evaluation_is_none_of_the_training(tmp_path: Path) -> None:
    often = {"eval_dataset": Losses([NAN]), "eval_strategy": "steps", "eval_steps": 1}
    assert Trained(tmp_path, STOP, [1.0] * 4, **often, **SELDOM).fired() == []


class OwnLoss(Ordered):
    """Trains on something else than the model's loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = (outputs["logits"] * 0 + model.weight).sum()
        return (loss, outputs) if return_outputs else loss


def test_a_loss_that_is_not_trained_on_is_not_looked_at(tmp_path: Path) -> None:
    """A model may well give NaN where labels are such that only the script's own loss can deal with them."""

    class Given(Model):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            return {"loss": (self.weight * 0 + x).sum(), "logits": torch.nan_to_num(x)}

    trained = Trained(tmp_path, STOP, [1.0, NAN, 1.0], model=Given(), trainer=OwnLoss, **SELDOM)
    assert trained.fired() == [] and trained.step == 3


def test_of_a_tuple_the_first_is_the_loss(tmp_path: Path) -> None:
    class Tuple(Model):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            return (self.weight * 0 + x).sum(), x

    assert Trained(tmp_path, STOP, [1.0, NAN, 1.0], model=Tuple(), **SELDOM).fired() == [("odd", 2)]


def test_a_model_that_is_compiled_goes_on_and_is_heard_when_the_trainer_logs(tmp_path: Path) -> None:
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "logging_steps": 3}
    torch._dynamo.reset()
    trained = Trained(tmp_path, STOP, [1.0, NAN, *[1.0] * 5], **compiled)
    assert trained.fired() == [("odd", 3)] and trained.step == 3
    assert torch._dynamo.utils.counters["frames"]["ok"] and not torch._dynamo.utils.counters["graph_break"]


def test_rules_that_come_later_see_it_too(tmp_path: Path) -> None:
    class Later(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self, session: Session) -> None:
            self.session = session

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                self.session.steering.receive({"type": "rules", "revision": 5, "text": STOP})

    losses = [1.0, 1.0, 1.0, 1.0, NAN, 1.0]
    trained = Trained(tmp_path, "rules: []", losses, callbacks=lambda session: [Later(session)], **SELDOM)
    assert trained.fired() == [("odd", 5)]


def test_a_copy_of_the_model_can_be_made_and_keeps_nothing() -> None:
    model, losses = Model(), NonfiniteLosses()
    losses.watch(model)
    losses.watch(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.tensor(NAN))["loss"].backward()
        (hook,) = other._forward_hooks.values()
        assert isinstance(hook, NonfiniteLosses) and hook is not losses and hook.take_nonfinite() is None
    assert losses.take_nonfinite() is None
    model(torch.tensor(NAN))["loss"].backward()
    assert math.isnan(losses.take_nonfinite() or 0.0)
    assert losses.take_nonfinite() is None, "asked once"


def test_losses_of_samples_and_infinities_of_both_signs() -> None:
    class Each(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.weight * 0 + x,)

    model, losses = Each(), NonfiniteLosses()
    losses.watch(model)
    for given, odd in (([1.0, math.inf], [math.inf]), ([1.0, 2.0], []), ([3.0, NAN], [NAN])):
        model(torch.tensor(given))[0].sum().backward()
        assert [repr(losses.take_nonfinite())] == [repr(value) for value in odd or [None]]
    for given in ([math.inf], [-math.inf]):
        model(torch.tensor(given))[0].sum().backward()
    assert math.isnan(losses.take_nonfinite() or 0.0)
