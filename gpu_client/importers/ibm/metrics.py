"""Map IBM's metric classes to their counterparts in the rule language.

A path is a text in a rule or log format: `window["training_loss"]["loss"][-1]` has the source `window` and the keys
`training_loss`, `loss`, -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from baton.contract.rules.language.faults import Code, ExpressionError, suggest_name
from baton.contract.rules.language.syntax_tree import FunctionCall, Name, Node, Number
from baton.contract.rules.metrics import canonical_name, is_name

CLASSES: Mapping[str, tuple[str, ...]] = {
    "TrainingState": (),
    "PerProcessState": (),
    "EvalMetrics": ("source_event",),
    "Loss": (),
    "HistoryBasedMetric": ("window_size",),
}
"""Arguments of each metric class."""

ALWAYS_KNOWN = frozenset(("step", "epoch"))
EVALUATED = "eval.loss"
"""Metric that every evaluation reports."""
FINAL_SAVE = "save.final"
"""Metric that is true at the final save of a training; a document that reads the metric declares it."""
MAX_SPELT_OUT = 16
"""Largest window whose oldest point is a `coalesce` of lags while the window fills."""

Keys = tuple[str | int, ...]
_STATE = {"epoch": "epoch", "global_step": "step", "num_input_tokens_seen": "tokens"}
_LOGGED = {"learning_rate": "lr"}


class MetricSource(NamedTuple):
    """Metric that the file defines."""

    name: str
    kind: str
    window: int = 1
    """Number of points of a HistoryBasedMetric; negative for all points."""
    bare: bool = False
    """True if the name alone is the number, as in the original's first draft."""

    def path_text(self, keys: Keys) -> str:
        """Format a path in the syntax of rules."""
        return self.name + "".join(f"[{key}]" if isinstance(key, int) else f'["{key}"]' for key in keys)


class Size(NamedTuple):
    """Length of a window of a metric's points."""

    metric: str
    limit: int
    """Window size; negative if unbounded."""


class Evaluated(NamedTuple):
    """Number of evaluation metrics; 0 before the first evaluation."""

    metric: str


def refuse(reason: str, remedy: str, code: Code = Code.UNSUPPORTED) -> ExpressionError:
    """Create an ExpressionError to raise. A caller that knows the text adds the place."""
    return ExpressionError(code, reason, remedy, 0)


def name_evaluation(key: str) -> str:
    """Translate `eval_loss` to `eval.loss`. Raises ExpressionError for a key without that prefix."""
    name = f"eval.{canonical_name(key.removeprefix('eval_'))}"
    if not key.startswith("eval_") or not is_name(name):
        raise refuse(f"{key[:40]!r} is no metric of an evaluation", 'They are called like "eval_loss".')
    return name


def sample_at(metric: str, when: str) -> Node:
    """Return `at(metric, when)`."""
    return FunctionCall("at", (Name(metric), Name(when)))


def lag_by(metric: str, points: int) -> Node:
    """Return `lag(metric, points)`."""
    return Name(metric) if points == 0 else FunctionCall("lag", (Name(metric), Number(float(points), "")))


def translate_number(source: MetricSource, keys: Keys, *, full: bool, evaluated: str = EVALUATED) -> Node:
    """Translate a path to a number. Raises ExpressionError.

    `full`: the rule reads the number only while the window is full. `evaluated`: a metric that every evaluation
    reports.
    """
    match source.kind, keys:
        case "TrainingState", (str() as key,):
            return Name(_of_state(key))
        case "Loss", ():
            if source.bare:
                return Name("loss")
        case "Loss", ("loss",):
            return Name("loss")
        case "Loss", (str() as key,):
            return _logged(key)
        case "EvalMetrics", ("epoch",):
            return sample_at("epoch", evaluated)
        case "EvalMetrics", (str() as key,):
            return Name(name_evaluation(key))
        case "HistoryBasedMetric", ("window_size",):
            if source.window > 0:
                return Number(float(source.window), "")
            raise refuse("the window has no size", "Write a window_size of 1 or more.")
        case "HistoryBasedMetric", ("training_loss" | "metrics" as group, str() as key, int() as index):
            return _in_window(source, (group, key), index, full=full, evaluated=evaluated)
        case "PerProcessState", ("rank",):
            remedy = "Leave the comparison out: rules are decided once, for all ranks alike."
            raise refuse("ranks do not decide separately here", remedy)
    raise _no_number(source, keys)


def _of_state(key: str) -> str:
    if key in _STATE:
        return _STATE[key]
    if key == "is_final":
        raise refuse("is_final is true or false, not a number", "Compare it with True or False.", Code.WRONG_TYPE)
    if key in ("log_history", "best_metric", "best_global_step"):
        raise refuse(f"rules do not see {key}", "Use best(eval.loss), or a window, in a rule of this language.")
    remedy = f"There are {', '.join(_STATE)} and is_final; write what is fixed as a number."
    raise refuse(f"rules do not see {key[:40]!r} of the trainer's state", remedy, Code.UNKNOWN_METRIC)


def _logged(key: str) -> Node:
    name = _LOGGED.get(key, canonical_name(key))
    if not is_name(name):
        raise refuse(f"{key[:40]!r} cannot be a metric's name", "Use another metric.", Code.INVALID_VALUE)
    return sample_at(name, "loss")


def _in_window(source: MetricSource, path: tuple[str, str], index: int, *, full: bool, evaluated: str) -> Node:
    _, key = path
    metric = find_window_metric(path, evaluated)
    size = source.window
    path_text = source.path_text((*path, index))
    if size > 0 and not -size <= index < size:
        raise refuse(
            f"{path_text} is never there: the window has {size}", "Use an index within it.", Code.INVALID_WINDOW
        )
    newest = index == -1 or size == 1
    if key in ("epoch", "steps"):
        if not newest:
            raise refuse(f"of {key}, only the newest is kept: {path_text}", "Use [-1].")
        return sample_at("step" if key == "steps" else key, metric)
    if newest:
        return Name(metric)
    if index < 0:
        return lag_by(metric, -1 - index)
    if size < 0:
        raise refuse(f"{path_text} is the first of all points, which are not kept", "Give the window a size.")
    if full:
        return lag_by(metric, size - 1 - index)
    if index == 0 and size <= MAX_SPELT_OUT:
        return FunctionCall("coalesce", tuple(lag_by(metric, points) for points in range(size - 1, -1, -1)))
    guard = f'len({source.path_text(path)}) == {source.name}["window_size"] and ...'
    raise refuse(f"{path_text} is another point while the window fills", f"Write {guard}", Code.INVALID_WINDOW)


def find_window_metric(path: tuple[str, str], evaluated: str) -> str:
    """Return the metric of a window group's points. Raises ExpressionError."""
    group, key = path
    if group == "metrics":
        return evaluated if key in ("epoch", "steps") else name_evaluation(key)
    if key == "global_step":
        raise refuse("the key is 'steps'; the original's pages say 'global_step'", "Write steps.", Code.UNKNOWN_KEY)
    if key not in ("loss", "epoch", "steps"):
        raise refuse(f"there is no {key[:40]!r} in training_loss", suggest_name(key, ("loss", "epoch", "steps")))
    return "loss"


def translate_size(source: MetricSource, keys: Keys, evaluated: str = EVALUATED) -> Size | Evaluated:
    """Translate `len` of a path. Raises ExpressionError. `evaluated`: a metric that every evaluation reports."""
    if source.kind == "HistoryBasedMetric":
        match keys:
            case ("metrics",):
                return Evaluated(evaluated)
            case ("training_loss" | "metrics" as group, str() as key):
                return Size(find_window_metric((group, key), evaluated), source.window)
    remedy = 'There is the length of a window: len(window["training_loss"]["loss"]).'
    raise refuse(f"{source.path_text(keys)} has no length here", remedy, Code.WRONG_TYPE)


def find_presence(source: MetricSource, evaluated: str = EVALUATED) -> str | None:
    """Return the metric that becomes known together with the original's metric. Raises ExpressionError.

    Returns None if the original's metric always exists.
    """
    if source.kind == "Loss":
        return "loss"
    if source.kind == "EvalMetrics":
        return evaluated
    if source.kind == "HistoryBasedMetric":
        remedy = f'Write len({source.name}["training_loss"]["loss"]) > 0.'
        raise refuse(f"{source.name} is there before it holds anything", remedy)
    return None


def _no_number(source: MetricSource, keys: Keys) -> ExpressionError:
    example = {
        "TrainingState": '["epoch"]',
        "PerProcessState": "",
        "EvalMetrics": '["eval_loss"]',
        "Loss": '["loss"]',
        "HistoryBasedMetric": '["training_loss"]["loss"][-1]',
    }[source.kind]
    remedy = f"Write {source.name}{example}."
    return refuse(f"{source.path_text(keys)[:80]} is no number", remedy, Code.WRONG_TYPE)
