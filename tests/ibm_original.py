"""IBM's trainer controller once more, as plainly as it can be said: its metrics, patience, triggers and operations.

It keeps to what facts tell of the original, defects included, and knows nothing of the importer. Rules are Python, read
by Python itself, with a stand-in for metrics that are not there yet.
"""

from __future__ import annotations

import ast
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NoReturn

EVENTS = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_epoch_end", "on_train_end")


class MetricUnavailableError(Exception):
    """A rule met a metric that has not been computed: it is passed over."""


class DiedError(Exception):
    """The original's training would have ended with an error."""


class Unavailable:
    """What a rule sees of such a metric."""

    def give_up(self, *_: object) -> NoReturn:
        raise MetricUnavailableError

    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __add__ = __sub__ = __mul__ = __truediv__ = __mod__ = give_up
    __neg__ = __pos__ = __abs__ = __float__ = give_up
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if other is None:
            return True
        raise MetricUnavailableError


class Bag(dict[str, Any]):
    """Keys as attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class Moment:
    """What the trainer has at an event."""

    event: str
    step: int
    epoch: float
    metrics: dict[str, float] | None = None
    """Of on_evaluate."""
    entry: dict[str, float] | None = None
    """Of on_log: what was logged just now."""
    final: bool = False


@dataclass
class Window:
    """HistoryBasedMetric."""

    size: int
    values: Bag = field(default_factory=lambda: Bag(training_loss=Bag(), metrics=Bag()))

    def compute(self, moment: Moment, history: list[dict[str, float]]) -> Bag:
        self.values["window_size"] = self.size
        if moment.metrics is not None:
            moment.metrics.update(steps=moment.step, epoch=moment.epoch)
            self._add("metrics", moment.metrics)
            return self.values
        group = self.values["training_loss"]
        for key in ("loss", "steps", "epoch"):
            group.setdefault(key, deque())
        newest = next((entry for entry in reversed(history) if "loss" in entry), None)
        if newest is not None:
            loss, epoch = newest["loss"], newest["epoch"]
            if not group["loss"] or group["loss"][-1] != loss or group["epoch"][-1] != epoch:
                self._add("training_loss", {"loss": loss, "steps": moment.step, "epoch": epoch})
        return self.values

    def _add(self, name: str, data: dict[str, float]) -> None:
        group = self.values[name]
        for key in list(group or data):
            group.setdefault(key, deque()).append(data[key])
            if 0 <= self.size < len(group[key]):
                group[key].popleft()


@dataclass
class Patience:
    """One for each controller and each of its triggers."""

    threshold: int
    mode: str
    counter: int = 0

    def tolerates(self, outcome: bool) -> bool:
        if outcome:
            self.counter += 1
        elif self.mode == "reset_on_failure":
            self.counter = 0
        if self.counter <= self.threshold:
            return True
        self.counter = 0
        return False


class Original:
    """The callback, with a configuration in the shape that its code reads."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._controllers: dict[str, list[tuple[dict[str, Any], Any, Patience | None]]] = {}
        for one in config["controllers"]:
            code = compile(ast.parse(one["rule"].strip(), mode="eval"), "rule", "eval")
            for event in one["triggers"]:
                patience = None
                if "patience" in one:
                    said = {"patience_threshold": 1, "mode": "reset_on_failure", **one["patience"]}
                    patience = Patience(said["patience_threshold"], said["mode"])
                self._controllers.setdefault(event, []).append((one, code, patience))
        self._metrics: dict[str, Any] = {one["name"]: None for one in config.get("controller_metrics", [])}
        self._handlers = config.get("controller_metrics", [])
        self._windows = {
            one["name"]: Window(one.get("arguments", {}).get("window_size", 1))
            for one in self._handlers
            if one["class"] == "HistoryBasedMetric"
        }
        self._history: list[dict[str, float]] = []

    def take(self, moment: Moment) -> list[tuple[str, str]]:
        """An event; controllers and operations that it sets off. Raises DiedError."""
        if moment.entry is not None:
            self._history.append(dict(moment.entry))
        for one in self._handlers:
            try:
                self._compute(one["name"], one["class"], moment)
            except KeyError as error:
                raise DiedError(repr(error)) from error
        found: list[tuple[str, str]] = []
        for controller, code, patience in self._controllers.get(moment.event, []):
            try:
                outcome = self._outcome(code)
            except MetricUnavailableError:
                continue
            if patience is not None and patience.tolerates(outcome):
                continue
            if outcome:
                found += [(controller["name"], operation) for operation in controller["operations"]]
        return found

    def _compute(self, name: str, kind: str, moment: Moment) -> None:
        event = moment.event
        if kind == "TrainingState":
            self._metrics[name] = Bag(epoch=moment.epoch, global_step=moment.step, is_final=moment.final)
        elif kind == "PerProcessState":
            self._metrics[name] = Bag(rank=0)
        elif kind == "EvalMetrics" and event == "on_evaluate":
            self._metrics[name] = Bag(moment.metrics or {})
        elif kind == "Loss" and event == "on_log":
            newest = next((entry for entry in reversed(self._history) if "loss" in entry), None)
            self._metrics[name] = None if newest is None else Bag(newest)
        elif kind == "HistoryBasedMetric" and event in ("on_log", "on_evaluate"):
            self._metrics[name] = self._windows[name].compute(moment, self._history)

    def _outcome(self, code: Any) -> bool:
        names = {name: Unavailable() if value is None else value for name, value in self._metrics.items()}
        safe = {"__builtins__": {}, "len": len, "abs": abs, "float": float}
        try:
            outcome = eval(code, safe, names)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, NameError) as error:
            raise DiedError(repr(error)) from error
        if not isinstance(outcome, bool):
            raise DiedError(f"{outcome!r} is no boolean")
        return outcome


def log_entry(loss: float, epoch: float, step: int) -> dict[str, float]:
    """As the trainer logs while it trains."""
    norm = abs(loss) / 2 if math.isfinite(loss) else 0.0
    return {"loss": loss, "grad_norm": norm, "learning_rate": 1e-4 / (step + 1), "epoch": epoch, "step": float(step)}


def observation_of(moment: Moment) -> dict[str, float | bool]:
    """The same event as rules observe it: what docs/rules-ibm.md says of who hands metrics in."""
    observed: dict[str, float | bool] = {"epoch": moment.epoch}
    if moment.entry is not None and "loss" in moment.entry:
        entry = moment.entry
        observed |= {"loss": entry["loss"], "lr": entry["learning_rate"], "grad_norm": entry["grad_norm"]}
    if moment.metrics is not None:
        observed |= {f"eval.{key[5:]}": value for key, value in moment.metrics.items() if key.startswith("eval_")}
    if moment.event == "on_save":
        observed["save.final"] = moment.final
    return observed
