"""Generate files of IBM's trainer controller and trainings: all metrics, operations, events and patiences."""

from __future__ import annotations

import math
import random
from typing import Any

from tests.kits.ibm.streams import Moment, stream

EVENTS = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_epoch_end", "on_train_end")
ACTIONS = ("should_training_stop", "should_save", "should_evaluate", "should_log")
WINDOWS = {"window": 3, "single": 1, "endless": -1}
"""Names and sizes."""
METRICS: list[dict[str, Any]] = [
    {"name": "now", "class": "TrainingState"},
    {"name": "newest", "class": "Loss"},
    {"name": "evaluation", "class": "EvalMetrics"},
    {"name": "window", "class": "HistoryBasedMetric", "arguments": {"window_size": WINDOWS["window"]}},
    {"name": "single", "class": "HistoryBasedMetric"},
    {"name": "endless", "class": "HistoryBasedMetric", "arguments": {"window_size": WINDOWS["endless"]}},
    {"name": "ranks", "class": "PerProcessState"},
]
KEYS = {
    "now": ("epoch", "global_step", "num_input_tokens_seen"),
    "newest": ("loss", "loss", "loss", "learning_rate", "grad_norm", "epoch", "step"),
    "evaluation": ("eval_loss", "eval_f1", "epoch"),
    "training_loss": ("loss", "loss", "loss", "epoch", "steps"),
    "metrics": ("eval_loss", "eval_loss", "eval_f1", "epoch", "steps"),
}
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
WHOLE = (
    *("evaluation == None", "newest == None", "newest != None", "now != None", "ranks == None", "True", "False"),
    *('now["is_final"]', 'now["is_final"] == False', 'len(window["metrics"]) > 0', 'len(endless["metrics"]) != 0'),
    *('len(single["metrics"]) >= 1', 'len(window["training_loss"]["loss"]) == window["window_size"]'),
    *('single["window_size"] == len(single["training_loss"]["loss"])', 'len(window["metrics"]["eval_f1"]) >= 2'),
)
FORMATS = (
    *("{control_name} {{}}", "{now[epoch]:.3f} {now[global_step]} {now[num_input_tokens_seen]}"),
    *("{newest[loss]:.4f}", "{newest[grad_norm]:,.2f} {newest[learning_rate]:.2e}", "{evaluation[eval_f1]:.3g}"),
    *("{single[training_loss][loss][0]:.2e}", "{single[metrics][eval_loss][0]:.1f} {ranks[rank]}"),
    *("{window[window_size]} {now[global_step]:,}", "{now[num_input_tokens_seen]:,d} {now[global_step]:.1f}"),
)


def line_of(form: str) -> dict[str, Any]:
    """Make an operation that writes a line."""
    return {"name": "line", "class": "LogControl", "arguments": {"log_format": form, "log_level": "info"}}


class Cases:
    """Generator of cases from a seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def file(self, controllers: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "controller_metrics": [dict(metric) for metric in METRICS],
            "operations": [line_of(self._chance.choice(FORMATS))],
            "controllers": [{**one, "name": f"r{number}"} for number, one in enumerate(controllers)],
        }

    def controller(self) -> dict[str, Any]:
        chance = self._chance
        operations = [*(f"hfcontrols.{action}" for action in ACTIONS), "line.should_log"]
        triggers = chance.sample(EVENTS, chance.choice((1, 1, 1, 2, 3)))
        found = {
            "name": "rule",
            "triggers": triggers,
            "rule": self.condition(3),
            "operations": chance.sample(operations, chance.choice((1, 1, 2, 3))),
        }
        # with several triggers, patience is counted for each of them there: see test_ibm_differences.py
        if len(triggers) == 1 and chance.random() < 0.4:
            mode = chance.choice(("reset_on_failure", "no_reset_on_failure"))
            found["patience"] = {"patience_threshold": chance.randint(0, 4), "mode": mode}
        if len(triggers) == 1 and chance.random() < 0.2:
            found["config"] = {"trigger_log_level": chance.choice(("debug", "info", "Warning"))}
        return found

    def condition(self, depth: int) -> str:
        kind = self._chance.randrange(10) if depth else 0
        if kind < 4:
            return self._plain()
        if kind < 8:
            word = " and " if kind < 6 else " or "
            return f"({word.join(self.condition(depth - 1) for _ in range(self._chance.randint(2, 3)))})"
        one, other, test = (self.condition(depth - 1) for _ in range(3))
        return f"not ({one})" if kind == 8 else f"({one} if {test} else {other})"

    def training(self) -> list[Moment]:
        chance = self._chance
        count = chance.randint(0, 16)
        every = {"steps_per_epoch": chance.randint(1, 5), "save_every": chance.randint(1, 4)}
        often = chance.choice((0.0, 0.1, 0.3, 0.6))
        # a loss that is NaN, with logs between that have none, is counted twice there: see test_ibm_differences.py
        losses = [self._value(nan=not often) for _ in range(count)]
        evals = {
            step: {"eval_loss": self._value(nan=True), "eval_f1": self._value(nan=True)}
            for step in range(count + 1)
            if chance.random() < often
        }
        return stream(losses, evals=evals, log_every=chance.randint(1, 3), summary=often > 0, **every)

    def _value(self, *, nan: bool) -> float:
        kind = self._chance.randrange(12)
        if kind < 5:
            return self._chance.choice((0.5, 1.0, 2.0, 3.0))
        if kind == 5:
            return self._chance.choice((math.inf, 0.0, -1.0, 1e300))
        return math.nan if nan and kind == 6 else self._chance.uniform(0, 4)

    def _plain(self) -> str:
        choice, kind = self._chance.choice, self._chance.randrange(16)
        if kind < 5:
            return f"{self._metric()} {choice(COMPARISONS)} {self._constant()}"
        if kind < 8:
            return f"{self._number(2)} {choice(COMPARISONS)} {self._number(2)}"
        if kind == 8:
            return f"{self._constant()} < {self._number(1)} <= {self._number(1)}"
        if kind == 9:
            return f"({self.condition(1)}) {choice(('==', '!='))} {choice(('True', 'False'))}"
        if kind < 12:
            length = f'len({choice(list(WINDOWS))}["training_loss"]["{choice(KEYS["training_loss"])}"])'
            return f"{length} {choice(COMPARISONS)} {self._chance.randint(0, 5)}"
        return choice(WHOLE)

    def _number(self, depth: int) -> str:
        choice, kind = self._chance.choice, self._chance.randrange(10)
        if kind < 5 or not depth:
            return self._metric()
        if kind < 7:
            return self._constant()
        one = self._number(depth - 1)
        if kind == 7:
            return f"({one} {choice('+-*/')} {self._number(depth - 1)})"
        return (
            f"{choice(('abs', 'float', '-', '+'))}({one})" if kind == 8 else f"({one} % {choice(('3', '0.5', '-2'))})"
        )

    def _metric(self) -> str:
        choice = self._chance.choice
        name = choice(("now", "newest", "newest", "evaluation", *WINDOWS))
        if name in KEYS:
            key = choice(KEYS[name])
            return choice((f'{name}["{key}"]', f"{name}['{key}']", f"{name}.{key}"))
        group = choice(("training_loss", "training_loss", "metrics"))
        key, index = choice(KEYS[group]), choice((-1, -1, 0, 0, -2, -3))
        return choice((f'{name}["{group}"]["{key}"][{index}]', f"{name}.{group}.{key}[{index}]"))

    def _constant(self) -> str:
        value = self._chance.uniform(0, 4)
        return self._chance.choice(
            ("0", "1", "2", "0.5", "-1", "1e-4", str(self._chance.randint(0, 14)), repr(round(value, 2)), repr(value))
        )
