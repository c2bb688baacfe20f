"""Trainings as events of IBM's trainer controller and as observations of rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass
class Moment:
    """State of the trainer at an event."""

    event: str
    step: int
    epoch: float
    tokens: int = 0
    metrics: dict[str, float] | None = None
    """Metrics of `on_evaluate`."""
    entry: dict[str, float] | None = None
    """Log entry of `on_log`."""
    final: bool = False


def stream(
    losses: list[float],
    *,
    steps_per_epoch: int = 4,
    log_every: int = 1,
    evals: dict[int, dict[str, float]] | None = None,
    save_every: int = 3,
    summary: bool = True,
) -> list[Moment]:
    """Make the events of a training in the trainer's order. `evals`: metrics of evaluations by step.

    `summary`: of the whole training, the trainer's last log, without a loss.
    """

    def add(event: str, step: int, **more: Any) -> None:
        moments.append(Moment(event, step, step / steps_per_epoch, tokens=64 * step, **more))

    def evaluate(step: int) -> None:
        if evals and step in evals:
            add("on_log", step, entry={**evals[step], "epoch": step / steps_per_epoch, "step": step})
            add("on_evaluate", step, metrics={**evals[step], "epoch": step / steps_per_epoch})

    moments: list[Moment] = []
    add("on_train_begin", 0)
    evaluate(0)
    for step, loss in enumerate(losses, 1):
        epoch = step / steps_per_epoch
        add("on_step_end", step)
        if step % log_every == 0:
            add("on_log", step, entry=log_entry(loss, epoch, step))
        evaluate(step)
        if step % save_every == 0:
            add("on_save", step)
        if step % steps_per_epoch == 0:
            add("on_epoch_end", step)
    last = len(losses)
    if summary:
        add("on_log", last, entry={"train_runtime": 1.0, "epoch": last / steps_per_epoch, "step": last})
    add("on_train_end", last)
    add("on_save", last, final=True)
    return moments


def log_entry(loss: float, epoch: float, step: int) -> dict[str, float]:
    """Make a log entry of the trainer."""
    norm = abs(loss) / 2 if math.isfinite(loss) else 0.0
    return {"loss": loss, "grad_norm": norm, "learning_rate": 1e-4 / (step + 1), "epoch": epoch, "step": step}


def observation_of(moment: Moment) -> dict[str, float | bool]:
    """Convert an event to an observation of rules, as docs/rules-ibm.md describes."""
    observed: dict[str, float | bool] = {"epoch": moment.epoch, "tokens": moment.tokens}
    if moment.entry is not None and "loss" in moment.entry:
        entry = moment.entry
        observed |= {"loss": entry["loss"], "lr": entry["learning_rate"], "grad_norm": entry["grad_norm"]}
    if moment.metrics is not None:
        observed |= {f"eval.{key[5:]}": value for key, value in moment.metrics.items() if key.startswith("eval_")}
    if moment.event == "on_save":
        observed["save.final"] = moment.final
    return observed


RECORDED = {
    "of the original's tests": stream([2.0, 2.1, 1.3, 0.9], steps_per_epoch=2, evals={2: {"eval_loss": 2.2}}),
    "falls": stream(
        [3.0 - 0.1 * step for step in range(28)],
        evals={step: {"eval_loss": 3.0 - step / 12, "eval_runtime": 1.0} for step in range(4, 29, 4)},
    ),
    "rises again": stream(
        [abs(14 - step) / 4 + 0.5 for step in range(30)],
        evals={step: {"eval_loss": abs(14 - step) / 4 + 0.6} for step in range(3, 31, 3)},
    ),
    "is logged seldom": stream(
        [2.6 - 0.07 * step for step in range(30)],
        log_every=5,
        steps_per_epoch=3,
        evals={step: {"eval_loss": 2.3 + (step % 5 - 2) / 4} for step in range(2, 31, 2)},
    ),
    "is no number": stream([2.0, math.nan, 1.0, math.inf, 0.5, math.nan, 3.0, 2.5], evals={4: {"eval_loss": math.nan}}),
}
