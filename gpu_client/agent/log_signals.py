"""Texts that a job's rules want counted in what the training prints: `signals` of docs/rules.md."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from baton.contract.rules.document.rule import Signal
from baton.contract.rules.metrics import name_in_rules
from baton.contract.steering import RulesInForce
from gpu_client.checkpoints.metrics import MAX_METRICS

logger = logging.getLogger("baton.job")


class LogSignals:
    """How many lines of an attempt had each of the texts. Without any, a line costs nothing.

    Lines are counted in the thread that reads them, all else comes from the heartbeats'.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._revision = 0
        self._counts: dict[Signal, int] = {}
        self._heard: dict[str, float] = {}

    def count(self, lines: Sequence[str]) -> None:
        """Look through new lines."""
        if not self._counts:
            return
        with self._lock:
            for signal in self._counts:
                self._counts[signal] += sum(signal.text in line for line in lines)

    def follow(self, rules: RulesInForce | None) -> None:
        """Count what these rules want, unless they are older than those before or cannot be used.

        A signal that was there before with the same text goes on; others count from now.
        """
        if rules is None or rules.revision <= self._revision:
            return
        self._revision = rules.revision
        wanted = _signals_of(rules)
        if wanted is not None:
            with self._lock:
                self._counts = {signal: self._counts.get(signal, 0) for signal in wanted}

    def beside(self, metrics: Mapping[str, float]) -> dict[str, float] | None:
        """The counts as metrics, and those of the training, as many as a heartbeat takes; None if there are none."""
        counts = self._metrics()
        if not counts:
            return dict(metrics) or None
        others = [(name, value) for name, value in metrics.items() if name_in_rules(name) not in counts]
        return {**dict(others[: MAX_METRICS - len(counts)]), **counts}

    def heard(self, metrics: Mapping[str, float] | None) -> None:
        """The control plane has these."""
        if self._counts:
            self._heard = dict(metrics or {})

    @property
    def unheard(self) -> bool:
        """Whether a line has come that the control plane has not heard of: perhaps it is why the training ends."""
        return any(self._heard.get(name, 0.0) != count for name, count in self._metrics().items())

    def _metrics(self) -> dict[str, float]:
        if not self._counts:
            return {}
        with self._lock:
            return {signal.metric.name: float(count) for signal, count in self._counts.items()}


def _signals_of(rules: RulesInForce) -> Sequence[Signal] | None:
    """None: the rules cannot be used, and those before stay in force."""
    if "signals" not in rules.text:
        return ()
    from baton.contract.rules.document.loader import load

    try:
        found = load(rules.text).rules
    except ImportError as error:
        logger.warning("signals of the rules are not counted: %s", error)
        return ()
    return found.signals if found is not None else None
