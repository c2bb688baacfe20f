"""IBM's metric handlers: what each exposes, and what that is here.

A path is what a rule or a log format writes of a metric: `window["training_loss"]["loss"][-1]` is the source `window`
and the keys `training_loss`, `loss`, -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from baton.contract.rules.language.faults import Code, ExpressionError, did_you_mean
from baton.contract.rules.language.syntax_tree import Call, Name, Node, Number
from baton.contract.rules.metrics import canonical_name, is_name

CLASSES: Mapping[str, tuple[str, ...]] = {
    "TrainingState": (),
    "PerProcessState": (),
    "EvalMetrics": ("source_event",),
    "Loss": (),
    "HistoryBasedMetric": ("window_size",),
}
"""Classes and their arguments."""

ALWAYS_KNOWN = frozenset(("step", "epoch"))
EVALUATED = "eval.loss"
"""What comes with every evaluation."""
FINAL_SAVE = "save.final"
"""True with the save that ends a training; declared by the documents that need it."""
MAX_SPELT_OUT = 16
"""The oldest point of a window that is not full yet is spelt out point by point, up to so many."""

Keys = tuple[str | int, ...]
_STATE = {"epoch": "epoch", "global_step": "step", "num_input_tokens_seen": "tokens"}
_LOGGED = {"learning_rate": "lr"}


class Source(NamedTuple):
    """One of the file's metrics."""

    name: str
    kind: str
    window: int = 1
    """Of a HistoryBasedMetric; less than 0 for all points."""
    bare: bool = False
    """Its name alone is its number, as the first draft of the original had it."""

    def said(self, keys: Keys) -> str:
        """As it is written in a rule."""
        return self.name + "".join(f"[{key}]" if isinstance(key, int) else f'["{key}"]' for key in keys)


class Size(NamedTuple):
    """The length of a window of a metric's points."""

    metric: str
    limit: int
    """Less than 0 for none."""


class Evaluated(NamedTuple):
    """How many metrics evaluations gave: none before the first, some after."""

    metric: str


def refusal(reason: str, remedy: str, code: Code = Code.UNSUPPORTED) -> ExpressionError:
    """To be raised; who reads the text adds the place."""
    return ExpressionError(code, reason, remedy, 0)


def eval_name(key: str) -> str:
    """What the trainer calls `eval_loss` is `eval.loss`. Raises ExpressionError for what is none of an evaluation."""
    name = f"eval.{canonical_name(key.removeprefix('eval_'))}"
    if not key.startswith("eval_") or not is_name(name):
        raise refusal(f"{key[:40]!r} is no metric of an evaluation", 'They are called like "eval_loss".')
    return name


def at(metric: str, when: str) -> Node:
    """The value of one when the newest point of the other came."""
    return Call("at", (Name(metric), Name(when)))


def lag(metric: str, points: int) -> Node:
    """An earlier point."""
    return Name(metric) if points == 0 else Call("lag", (Name(metric), Number(float(points), "")))


def number_at(source: Source, keys: Keys, *, full: bool, evaluated: str = EVALUATED) -> Node:
    """The number that a path leads to. Raises ExpressionError.

    `full`: the rule asks for it only while the window has all its points. `evaluated`: a metric that comes with every
    evaluation.
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
            return at("epoch", evaluated)
        case "EvalMetrics", (str() as key,):
            return Name(eval_name(key))
        case "HistoryBasedMetric", ("window_size",):
            if source.window > 0:
                return Number(float(source.window), "")
            raise refusal("the window has no size", "Write a window_size of 1 or more.")
        case "HistoryBasedMetric", ("training_loss" | "metrics" as group, str() as key, int() as index):
            return _in_window(source, (group, key), index, full=full, evaluated=evaluated)
        case "PerProcessState", ("rank",):
            remedy = "Leave the comparison out: rules are decided once, for all ranks alike."
            raise refusal("ranks do not decide on their own here", remedy)
    raise _no_number(source, keys)


def _of_state(key: str) -> str:
    if key in _STATE:
        return _STATE[key]
    if key == "is_final":
        raise refusal("is_final is true or false, not a number", "Compare it with True or False.", Code.WRONG_TYPE)
    if key in ("log_history", "best_metric", "best_global_step"):
        raise refusal(f"rules do not see {key}", "Use best(eval.loss), or a window, in a rule of this language.")
    remedy = f"There are {', '.join(_STATE)} and is_final; write what is fixed as a number."
    raise refusal(f"rules do not see {key[:40]!r} of the trainer's state", remedy, Code.UNKNOWN_METRIC)


def _logged(key: str) -> Node:
    name = _LOGGED.get(key, canonical_name(key))
    if not is_name(name):
        raise refusal(f"{key[:40]!r} cannot be a metric's name", "Use another metric.", Code.INVALID_VALUE)
    return at(name, "loss")


def _in_window(source: Source, path: tuple[str, str], index: int, *, full: bool, evaluated: str) -> Node:
    _, key = path
    metric = window_metric(path, evaluated)
    size = source.window
    said = source.said((*path, index))
    if size > 0 and not -size <= index < size:
        raise refusal(f"{said} is never there: the window has {size}", "Use an index within it.", Code.INVALID_WINDOW)
    newest = index == -1 or size == 1
    if key in ("epoch", "steps"):
        if not newest:
            raise refusal(f"of {key}, only the newest is kept: {said}", "Use [-1].")
        return at("step" if key == "steps" else key, metric)
    if newest:
        return Name(metric)
    if index < 0:
        return lag(metric, -1 - index)
    if size < 0:
        raise refusal(f"{said} is the first of all points, which are not kept", "Give the window a size.")
    if full:
        return lag(metric, size - 1 - index)
    if index == 0 and size <= MAX_SPELT_OUT:
        return Call("coalesce", tuple(lag(metric, points) for points in range(size - 1, -1, -1)))
    guard = f'len({source.said(path)}) == {source.name}["window_size"] and ...'
    raise refusal(f"{said} is another point while the window fills", f"Write {guard}", Code.INVALID_WINDOW)


def window_metric(path: tuple[str, str], evaluated: str) -> str:
    """Whose points a window of that group has. Raises ExpressionError."""
    group, key = path
    if group == "metrics":
        return evaluated if key in ("epoch", "steps") else eval_name(key)
    if key == "global_step":
        raise refusal("the key is 'steps'; the original's pages say 'global_step'", "Write steps.", Code.UNKNOWN_KEY)
    if key not in ("loss", "epoch", "steps"):
        raise refusal(f"there is no {key[:40]!r} in training_loss", did_you_mean(key, ("loss", "epoch", "steps")))
    return "loss"


def size_at(source: Source, keys: Keys, evaluated: str = EVALUATED) -> Size | Evaluated:
    """What `len` of a path is. Raises ExpressionError. `evaluated`: a metric that comes with every evaluation."""
    if source.kind == "HistoryBasedMetric":
        match keys:
            case ("metrics",):
                return Evaluated(evaluated)
            case ("training_loss" | "metrics" as group, str() as key):
                return Size(window_metric((group, key), evaluated), source.window)
    remedy = 'There is the length of a window: len(window["training_loss"]["loss"]).'
    raise refusal(f"{source.said(keys)} has no length here", remedy, Code.WRONG_TYPE)


def presence_of(source: Source, evaluated: str = EVALUATED) -> str | None:
    """The metric that is known as soon as the original's is; None if that is always. Raises ExpressionError."""
    if source.kind == "Loss":
        return "loss"
    if source.kind == "EvalMetrics":
        return evaluated
    if source.kind == "HistoryBasedMetric":
        remedy = f'Write len({source.name}["training_loss"]["loss"]) > 0.'
        raise refusal(f"{source.name} is there before it holds anything", remedy)
    return None


def _no_number(source: Source, keys: Keys) -> ExpressionError:
    example = {
        "TrainingState": '["epoch"]',
        "PerProcessState": "",
        "EvalMetrics": '["eval_loss"]',
        "Loss": '["loss"]',
        "HistoryBasedMetric": '["training_loss"]["loss"][-1]',
    }[source.kind]
    remedy = f"Write {source.name}{example}."
    return refusal(f"{source.said(keys)[:80]} is no number", remedy, Code.WRONG_TYPE)
