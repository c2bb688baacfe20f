"""Evaluate the presets of a training in the agent, because only the agent can detect a stuck training loop.

The presets read the training's usual reports and report decisions. Presets never change the training.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from statistics import median
from typing import Any, Protocol

from baton.contract.base import MAX_STEP
from baton.contract.rules.document.actions import Alert
from baton.contract.rules.document.loader import load
from baton.contract.rules.document.presets import DOCUMENT, NAMES
from baton.contract.rules.document.rule import RuleSet
from baton.contract.rules.engine.rule_evaluator import Evaluator
from baton.contract.rules.engine.verdicts import State, Verdict
from baton.contract.rules.language.messages import Message
from baton.contract.rules.metrics import Kind, canonical_name
from baton.contract.rules.numbers import encode
from gpu_client.agent.control.channel_messages import CheckpointNotice, TrainingProgress
from gpu_client.controller.hardware_sampler import HardwareSampler

logger = logging.getLogger("baton.job")

TICK_S = 10.0
MAX_FIRINGS = 3
"""Limit of a preset's reported firings in one attempt."""
QUIET_AFTER_ATTEMPTS = 10
"""Number of the attempt from which on each preset reports one firing and no clearing, because a job's history is
finite."""
USUAL_OF, USUAL_FROM = 50, 20
"""Maximum and minimum number of gaps between new steps whose median is the usual gap."""
STUCK = "preset-stuck"
_LOSSES = ("loss", "train_loss", "train.loss", "training_loss")
_EVALUATIONS = ("eval.loss", "eval_loss", "val_loss", "val.loss", "validation_loss")

_MEASURED = ("step.time", "data.wait")

TREND_POINTS = 20
"""Losses whose median is one level. Spikes of up to ten reports do not change a level."""
TREND_NEWEST = 4
"""Newest levels that must all be high, because a spike ends within 80 reports."""
TREND_LAG = 8
"""Distance, in levels, between the newest levels and the level of the comparison."""
TREND_MIN_LEVELS = 16
"""Levels (320 reports) before the first result."""
TREND_CHANGES = 500
"""Changes (10,000 reports) whose median is the usual change."""
TREND_MIN_CHANGE = 1e-3
TREND_MIN_PROGRESS = 0.1
"""Minimum progress as a share of the loss's magnitude, because a constant loss has neither change nor progress."""

Decide = Callable[[dict[str, Any]], object]


class ReportSource(Protocol):
    """Source of the training's reports; the channel server is one."""

    def take_reports(self) -> list[tuple[float, TrainingProgress | CheckpointNotice]]: ...


@cache
def load_preset_rules() -> RuleSet:
    """Return all presets."""
    rules = load(DOCUMENT, presets=True).rules
    assert rules is not None
    return rules


class PresetMonitor:
    """Evaluator of one attempt's presets, for one thread. No method raises. `clock`: the channel's monotonic clock."""

    def __init__(
        self,
        decide: Decide,
        *,
        attempt: int = 1,
        clock: Callable[[], float] = time.monotonic,
        make_probe: Callable[[], HardwareSampler] = lambda: HardwareSampler(TICK_S, gpus_only=True),
    ) -> None:
        """`decide` receives each decision, in the training's format. `attempt`: number of the attempt."""
        self._decide = decide
        self._attempt = attempt
        self._clock = clock
        self._make_probe = make_probe
        self._off: frozenset[str] = frozenset()
        self._fired_counts: Counter[str] = Counter()
        self._active: set[str] = set()
        """Presets that have fired and not cleared."""
        self._stuck = False
        """True while the condition of preset-stuck holds, beyond the limits of its reports."""
        self._training: _TrainingState | None = None
        self._probe: HardwareSampler | None = None
        self._broken = False

    def set_rules(self, text: str) -> bool:
        """Apply the job's rules, which may switch presets off; returns True if the job has rules of its own.

        Unreadable rules change nothing.
        """
        try:
            rules = load(text).rules if text.strip() else RuleSet()
        except Exception:
            # Catch all: `load` returns faults, but the YAML library may be missing, and presets must not fail an
            # attempt.
            logger.exception("cannot read which presets are switched off")
            return True
        if rules is None:
            return True
        self._off = rules.presets_off
        return bool(rules.rules)

    def attach(
        self,
        channel: ReportSource,
        *,
        base: int,
        storing: Callable[[], bool],
        log_line: Callable[[str], object],
        missed: Callable[[], int] = lambda: 0,
    ) -> None:
        """Start the evaluation of the next training process.

        base: job steps before this recipe step. storing: returns True during a checkpoint's upload, for which the
        training may wait. log_line: writes a line into the job's log. missed: returns the number of checkpoints that
        the training deleted before the agent could stage them.
        """
        self.detach()
        self._active.clear()
        self._stuck = False
        try:
            self._training = _TrainingState(channel, base, storing, log_line, self._clock, missed=missed)
        except Exception:
            # Catch all, as in `poll`: a bug in the presets must not cost the attempt.
            logger.exception("presets cannot be evaluated")

    def detach(self) -> None:
        """Stop the evaluation of an ended process."""
        self._training = None
        if self._probe is not None:
            self._probe.stop()
            self._probe = None

    def stuck_s(self) -> float:
        """Return the seconds without progress while preset-stuck holds; 0.0 otherwise."""
        return self._training.still_s() if self._training is not None and self._stuck else 0.0

    def poll(self) -> None:
        """Evaluate the reports and the time since the last call. Cheap enough for every poll."""
        training = self._training
        if training is None or self._broken or len(self._off) == len(NAMES):
            return
        try:
            for verdict in training.poll(self._sample):
                self._handle_verdict(verdict, training)
        except Exception:
            # Catch all: a bug in the presets must not cost the attempt.
            self._broken = True
            logger.exception("presets are not evaluated any more in this attempt")

    def _sample(self) -> Mapping[str, float]:
        if "preset-gpu-idle" in self._off:
            return {}
        if self._probe is None:
            probe = self._make_probe()
            try:
                probe.start()
            except RuntimeError as error:  # The machine is out of threads.
                logger.warning("gpu.util is not measured: %s", error)
                return {}
            self._probe = probe
        return self._probe.take()

    def _handle_verdict(self, verdict: Verdict, training: _TrainingState) -> None:
        name = verdict.rule
        if name in self._off:
            return
        if name == STUCK and verdict.state in (State.FIRED, State.CLEARED):
            self._stuck = verdict.state is State.FIRED
        quiet = self._attempt > QUIET_AFTER_ATTEMPTS
        if verdict.state is State.FIRED and self._fired_counts[name] < (1 if quiet else MAX_FIRINGS):
            self._fired_counts[name] += 1
            self._active.add(name)
            message = "; ".join(training.render(one.text) for one in verdict.actions if isinstance(one, Alert))
            logger.warning("%s: %s", name, message)
            training.log_line(f"[baton] {name}: {message}")
            self._emit("rule.fired", verdict, training, actions=["alert"], message=message)
        elif verdict.state is State.CLEARED and name in self._active:
            self._active.discard(name)
            if not quiet:
                self._emit("rule.cleared", verdict, training)
        elif verdict.state is State.ERROR:
            logger.error("%s cannot be evaluated: %s", name, verdict.reason)

    def _emit(self, decision: str, verdict: Verdict, training: _TrainingState, **details: Any) -> None:
        operands = {one.text: encode(one.value) for one in verdict.operands}
        fields = {"rule": verdict.rule, "step": training.step, "severity": verdict.severity, "operands": operands}
        fields |= {} if training.epoch is None else {"training_epoch": training.epoch}
        self._decide({"type": "decision", "decision": decision, **fields, **details})


class _TrainingState:
    """State of one training process, from its reports."""

    def __init__(
        self,
        channel: ReportSource,
        base: int,
        storing: Callable[[], bool],
        log_line: Callable[[str], object],
        clock: Callable[[], float],
        *,
        missed: Callable[[], int],
    ) -> None:
        self._channel = channel
        self._base = base
        self._storing = storing
        self.log_line = log_line
        self._missed = missed
        self._clock = clock
        rules = load_preset_rules()
        self._kinds = {metric.name: metric.kind for metric in rules.metrics().values()}
        self._evaluator = Evaluator(rules)
        self._ticked_at = clock()
        self._trend = LossTrend()
        self._newest: dict[str, float] = {}
        """Newest losses by the training's names; an equal value in the next report is no new loss."""
        self._trend_of = len(_LOSSES)
        """Index in `_LOSSES` of the trend's metric; mixed metrics would cause jumps."""
        self._gaps: deque[float] = deque(maxlen=USUAL_OF)
        self._names: dict[str, str] = {}
        self.step = base
        self.epoch: float | None = None
        """Pass over the data; None if the training does not report one."""
        self._step: int | None = None
        self._stepped_at = 0.0
        self._moved_at = 0.0
        """Time of the last step, phase or checkpoint."""
        self._phase: tuple[str, int] | None = None
        self._storing_since: float | None = None
        self._last = False
        self._still_s = 0.0
        """Seconds without progress at the last tick."""

    def poll(self, sample: Callable[[], Mapping[str, float]]) -> Iterator[Verdict]:
        """Yield the verdicts of each report, evaluated at the report's own time."""
        for at, report in self._channel.take_reports():
            if isinstance(report, CheckpointNotice):
                self._moved_at = max(self._moved_at, at)
                continue
            for point in report.points:
                # A decision must not contain NaN, therefore only a finite epoch counts.
                if math.isfinite(epoch := float(point.metrics.get("epoch", math.nan))):
                    self.epoch = epoch
            if metrics := self._new_values(report, at):
                yield from self._evaluator.observe(metrics, step=self.step, now=at)
        now = self._clock()
        if now - self._ticked_at >= TICK_S:
            self._ticked_at = now
            yield from self._evaluator.observe({**self._measure_ages(now), **sample()}, step=self.step, now=now)

    def still_s(self) -> float:
        """Return the seconds without progress. A report since the last tick ends them at once."""
        return min(self._still_s, self._clock() - self._moved_at)

    def render(self, message: Message) -> str:
        """Render a preset's text, with durations such as `14 min`."""
        values = self._evaluator.values()
        parts = []
        for part in message.parts:
            if isinstance(part, str):
                parts.append(part)
            elif self._kinds.get(part.metric) is Kind.DURATION and values.get(part.metric) is not None:
                parts.append(_format_duration(values[part.metric] or 0.0))
            else:
                parts.append(Message("", (part,)).render(values))
        return "".join(parts)

    def _new_values(self, report: TrainingProgress, at: float) -> dict[str, float]:
        found = self._extract_losses(report)
        if report.step != self._step:
            found |= self._measure_step_times(report, at)
            self._step, self._stepped_at, self._moved_at = report.step, at, at
            self.step = min(report.step + self._base, MAX_STEP)
            # After the last step, the remaining work may take any time and counts as no stall.
            self._last = report.total is not None and report.step >= report.total
            self._phase = None
        if report.phase is not None and report.phase != self._phase:
            self._moved_at = at
            name, done = report.phase
            complete = done >= report.metrics.get(f"{name}_total", math.inf)
            self._phase = None if complete else report.phase
        return found

    def _extract_losses(self, report: TrainingProgress) -> dict[str, float]:
        """Return the new losses by preset name. Among several losses, a nonfinite loss wins, then the first."""
        found: dict[str, float] = {}
        trend: float | None = None
        for metric_name, number in (one for point in report.points for one in point.metrics.items()):
            name = self._names.get(metric_name) or self._preset_name(metric_name)
            if name == "-":
                continue
            value, before = float(number), self._newest.get(metric_name)
            if value == before or (before is not None and math.isnan(value) and math.isnan(before)):
                continue
            self._newest[metric_name] = value
            if name == "loss" and (place := _LOSSES.index(canonical_name(metric_name))) <= self._trend_of:
                self._trend_of, trend = place, value
            if name not in found or not math.isfinite(value):
                found[name] = value
        if trend is not None:
            found.update(self._trend.push(trend) or {})
        return found

    def _preset_name(self, metric_name: str) -> str:
        """Return the presets' name for a metric; "-" if no preset reads the metric."""
        if len(self._names) >= 4096:
            self._names.clear()
            self._newest.clear()
        name = canonical_name(metric_name)
        known = "loss" if name in _LOSSES else "eval.loss" if name in _EVALUATIONS else "-"
        self._names[metric_name] = known
        return known

    def _measure_step_times(self, report: TrainingProgress, at: float) -> dict[str, float]:
        """Return step times in seconds, as measured by the session or else by the agent's clock."""
        measured = {name: value for name, value in report.signals.items() if name in _MEASURED}
        if self._step is not None:
            gap = measured["step.gap"] = at - self._stepped_at
            self._gaps.append(gap)
            if "step.time" not in measured and report.step > self._step:
                measured["step.time"] = gap / (report.step - self._step)
        return measured

    def _measure_ages(self, now: float) -> dict[str, float | None]:
        """Return the seconds without progress, and their explanation."""
        if self._storing():
            self._storing_since = self._storing_since or now
        elif self._storing_since is not None:
            self._storing_since, self._moved_at = None, now  # The upload has ended: the training can continue.
        since = self._moved_at
        if self._step is None:
            still_s = 0.0
        elif self._phase is not None:
            still_s = now - since
        elif self._storing_since is not None:
            still_s = now - max(since, self._storing_since)
        else:
            still_s = 0.0 if self._last else now - since
        self._still_s = still_s
        explained = self._phase is not None or self._storing_since is not None
        return {
            "step.age": 0.0 if explained else still_s,
            "phase.age": still_s if explained else 0.0,
            "still": still_s,
            "checkpoints.missed": float(self._missed()),
            "step.usual": median(self._gaps) if len(self._gaps) >= USUAL_FROM else None,
        }


def _format_duration(seconds: float) -> str:
    """Format seconds as `14 min` or `0.4 s`."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


class LossTrend:
    """Detector of a falling loss that suddenly rises and stays high.

    Each value costs constant time and memory, and every 20th value a median of 500 numbers.
    """

    def __init__(self) -> None:
        self._points: list[float] = []
        self._newest: deque[float] = deque(maxlen=TREND_LAG + 1)
        self._changes: deque[float] = deque(maxlen=TREND_CHANGES)
        self._late: deque[float] = deque(maxlen=TREND_LAG)
        """Newest changes, not yet part of the usual change."""
        self._levels = 0
        self._best = math.inf
        self._worst = -math.inf
        """Worst level among the levels that are at least `TREND_LAG` old."""

    def push(self, value: float) -> dict[str, float] | None:
        """Add a loss; returns the new levels after each `TREND_POINTS` finite values, else None.

        loss.level: the lowest of the newest levels. loss.before: the level of the comparison. loss.jump: their
        difference in usual changes. loss.lost: lost share of the progress from the worst to the best level.
        """
        if not math.isfinite(value):
            return None
        self._points.append(value)
        if len(self._points) < TREND_POINTS:
            return None
        level = median(self._points)
        self._points.clear()
        return self._leveled(level)

    def _leveled(self, level: float) -> dict[str, float] | None:
        newest, late = self._newest, self._late
        if newest:
            if len(late) == TREND_LAG:
                self._changes.append(late[0])
            late.append(abs(level - newest[-1]))
        newest.append(level)
        self._best = min(self._best, level)
        if len(newest) == TREND_LAG + 1:
            self._worst = max(self._worst, newest[0])
        self._levels += 1
        if self._levels < TREND_MIN_LEVELS:
            return None
        now, before = min(list(newest)[-TREND_NEWEST:]), newest[0]
        magnitude = max(abs(self._best), abs(self._worst))
        usual = max(median(self._changes), TREND_MIN_CHANGE * magnitude)
        progress = max(self._worst - self._best, TREND_MIN_PROGRESS * magnitude)
        return {
            "loss.level": now,
            "loss.before": before,
            "loss.jump": (now - before) / usual if usual else 0.0,
            "loss.lost": (now - self._best) / progress if progress else 0.0,
        }
