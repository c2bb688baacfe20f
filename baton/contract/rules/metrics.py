"""Metrics that rules can name: built in, declared by a document, or reported by a training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Literal, NamedTuple

from baton.contract.rules.language.faults import find_nearest, find_typo
from baton.contract.rules.limits import MAX_NAME_CHARS

Goal = Literal["min", "max"]
Reduce = Literal["mean", "max", "min", "sum"]
REDUCES: tuple[Reduce, ...] = ("mean", "max", "min", "sum")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")
SIGNALS = "log."
"""Prefix of the metrics that count signals."""
RESERVED = frozenset(("and", "or", "not", "true", "false", "inf", "min", "max"))


class Kind(StrEnum):
    """Kinds of values. A function of a history takes a metric by its name, whatever its kind."""

    NUMBER = "number"
    DURATION = "duration"
    """Unit: seconds."""
    SIZE = "size"
    """Unit: bytes."""
    BOOL = "bool"


UNITS: Mapping[str, tuple[Kind, float]] = {
    "ms": (Kind.DURATION, 0.001),
    "s": (Kind.DURATION, 1.0),
    "m": (Kind.DURATION, 60.0),
    "h": (Kind.DURATION, 3600.0),
    "d": (Kind.DURATION, 86400.0),
    "kB": (Kind.SIZE, 1e3),
    "MB": (Kind.SIZE, 1e6),
    "GB": (Kind.SIZE, 1e9),
    "TB": (Kind.SIZE, 1e12),
    "KiB": (Kind.SIZE, 2.0**10),
    "MiB": (Kind.SIZE, 2.0**20),
    "GiB": (Kind.SIZE, 2.0**30),
    "TiB": (Kind.SIZE, 2.0**40),
}
"""Units of literals (`90s`, `1.5h`, `10GiB`): kind and factor."""


class Metric(NamedTuple):
    """Declaration of one metric."""

    name: str
    kind: Kind = Kind.NUMBER
    unit: str = ""
    """Unit for display: %, USD, tokens. Rules compare plain numbers in this unit."""
    goal: Goal | None = None
    """Direction of better values; None if the metric has none."""
    low: float = -math.inf
    high: float = math.inf
    clock: bool = False
    """True if the metric changes with every step; such a metric makes a rule due only if the rule reads nothing else.
    """
    meaning: str = ""
    control_plane: bool = False
    """True if the control plane alone knows the metric."""
    reduce: Reduce | None = None
    """Declared reduction over processes; see `reduced_by`."""

    @property
    def reduced_by(self) -> Reduce:
        """Reduction over processes: as declared; otherwise the mean of numbers, and the maximum of durations and sizes
        (all processes wait for the slowest) and of booleans (true in one process is true).
        """
        return self.reduce or ("mean" if self.kind is Kind.NUMBER else "max")


def _number(name: str, unit: str = "", goal: Goal | None = None, **more: object) -> Metric:
    return Metric(name, Kind.NUMBER, unit, goal, **more)  # type: ignore[arg-type]


_BUILT_IN = (
    _number("loss", goal="min", meaning="training loss, before any filter for logs"),
    _number("eval.loss", goal="min", meaning="loss of the newest evaluation"),
    _number("grad_norm", low=0, meaning="norm of the gradients, before clipping"),
    _number("lr", low=0, meaning="learning rate"),
    _number("step", low=0, clock=True, meaning="training step"),
    _number("epoch", low=0, clock=True, meaning="pass over the data, with its fraction"),
    _number("tokens", low=0, clock=True, meaning="tokens trained on so far"),
    _number("throughput", "1/s", goal="max", low=0, meaning="samples or tokens per second"),
    _number("gpu.util", "%", goal="max", low=0, high=100, meaning="share of time in which the GPU was busy"),
    Metric("gpu.mem", Kind.SIZE, "bytes", low=0, meaning="GPU memory in use"),
    _number("gpu.temp", "°C", low=-273, meaning="temperature of the GPU", reduce="max"),
    _number("host.cpu", "%", low=0, high=100, meaning="share of the host's processors in use", reduce="max"),
    Metric("host.mem", Kind.SIZE, "bytes", low=0, meaning="host memory in use"),
    Metric("step.time", Kind.DURATION, "s", "min", 0, meaning="duration of the newest step"),
    Metric("data.wait", Kind.DURATION, "s", "min", 0, meaning="time that the newest step waited for its batch"),
    _number("data.reuse", low=0, meaning="how often a sample was trained on, in the mean"),
    Metric("data.age", Kind.DURATION, "s", "min", 0, meaning="age of the newest batch's samples, in the mean"),
    _number("ring.fill", "%", low=0, high=100, meaning="share of a ring in which samples can be read"),
    _number("ring.put_rate", "1/s", goal="max", low=0, meaning="samples that become readable in a ring, per second"),
    _number("ring.get_rate", "1/s", goal="max", low=0, meaning="samples that all trainings read from it, per second"),
    _number("ring.idle", "%", goal="min", low=0, high=100, meaning="share of its time that a generator waits for them"),
    Metric("ring.put_bytes", Kind.SIZE, "bytes", low=0, meaning="what a generator has stored so far"),
    _number("ring.orphans", goal="min", low=0, meaning="objects that dead generators stored and never claimed"),
    _number("ring.quarantined", goal="min", low=0, meaning="damaged objects that a training has met and does without"),
    _number("world.loss", goal="min", meaning="mean training loss of all nodes of an elastic job, weighted by tokens"),
    _number("world.nodes", goal="max", low=0, meaning="members of an elastic job's newest round"),
    _number("world.round", low=0, clock=True, meaning="newest round of an elastic job"),
    Metric("world.round_s", Kind.DURATION, "s", "min", 0, meaning="time between the two newest rounds"),
    _number("world.stall", "%", goal="min", low=0, high=100, meaning="share of its time that a node waits for rounds"),
    _number("world.tokens_per_s", "1/s", goal="max", low=0, meaning="tokens of all nodes per second, by rounds"),
    Metric("world.sent_bytes", Kind.SIZE, "bytes", low=0, meaning="bytes that a node has sent in a round"),
    _number("world.link_mbit_s", "Mbit/s", "max", low=0, meaning="speed of a node's uplink in a round", reduce="min"),
    Metric("ckpt.age", Kind.DURATION, "s", "min", 0, clock=True, meaning="time since the newest checkpoint was taken"),
    Metric("wall", Kind.DURATION, "s", None, 0, clock=True, meaning="time that the job has run, all attempts together"),
    _number("cost", "USD", low=0, clock=True, meaning="what the job has cost so far", control_plane=True),
    Metric(
        "heartbeat.age",
        Kind.DURATION,
        "s",
        "min",
        0,
        meaning="time since the newest heartbeat",
        control_plane=True,
    ),
    Metric(
        "queue.age",
        Kind.DURATION,
        "s",
        "min",
        0,
        meaning="time that the job has been waiting for a worker",
        control_plane=True,
    ),
    _number("failures", goal="min", low=0, meaning="failed attempts so far", control_plane=True),
    _number("interruptions", goal="min", low=0, meaning="lost machines so far", control_plane=True),
)
BUILT_IN: Mapping[str, Metric] = {metric.name: metric for metric in _BUILT_IN}


class MetricCatalog(Mapping[str, Metric]):
    """Metrics that a rule document may name.

    While the reported names are unknown (`open`), any other name counts as a number of the user.
    """

    def __init__(self, declared: Iterable[Metric] = (), *, reported: Iterable[str] | None = None) -> None:
        """Collect the built-in metrics, the `declared` ones, and the `reported` names."""
        self._known = {**BUILT_IN, **{metric.name: metric for metric in declared}}
        self.open = reported is None
        for name in map(canonical_name, reported or ()):
            self._known.setdefault(name, Metric(name))

    def __getitem__(self, name: str) -> Metric:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def is_name(text: str) -> bool:
    """Check whether `text` can name a metric."""
    fits = len(text) <= MAX_NAME_CHARS and NAME.fullmatch(text) is not None and text not in RESERVED
    return fits and not any(part.startswith("__") for part in text.split("."))


ALIASES: Mapping[str, str] = {
    "learning_rate": "lr",
    "eval_loss": "eval.loss",
    "num_input_tokens_seen": "tokens",
}
"""Names that training loops report, and their names in rules."""


def name_in_rules(reported: str) -> str:
    """Return the name in rules of a reported metric, aliases included."""
    return canonical_name(ALIASES.get(reported, reported))


def explain_doubt(name: str, metrics: MetricCatalog) -> tuple[str, str] | None:
    """Explain why an undeclared name is probably a mistake, with a remedy; None if the name is plausible."""
    if name in ALIASES:
        return f"rules call the reported {name} {ALIASES[name]}", f"Write {ALIASES[name]}."
    close = find_typo(name, metrics) or find_nearest(name, metrics, cutoff=0.86)
    if close is None and not name.startswith(SIGNALS):
        return None
    category = "signal of this document" if name.startswith(SIGNALS) else "built-in metric"
    reason = f"{name} is no {category}; rules treat it as a metric that the training reports"
    return reason, f"Did you mean {close}?" if close else "Add its text to 'signals' if lines are to be counted."


def canonical_name(reported: str) -> str:
    """Return the canonical name: `train/loss` becomes `train.loss`, `f1-macro` becomes `f1_macro`."""
    parts = [part.replace("-", "_") for part in reported.replace("/", ".").split(".") if part]
    return ".".join(parts)
