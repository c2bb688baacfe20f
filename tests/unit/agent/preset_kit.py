"""Provide a training process as presets see it, on a test's clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpu_client.agent.control.channel_messages import Point, TrainingProgress
from gpu_client.agent.control.preset_monitor import PresetMonitor
from tests.kits.clock import Clock

HOUR_S = 3600.0


class Probe:
    """GPUs with a scripted utilization; None: the driver reports nothing."""

    def __init__(self) -> None:
        self.util: float | None = None
        self.started = self.stopped = 0
        self.full = False

    def start(self) -> None:
        if self.full:
            raise RuntimeError("can't start new thread")
        self.started += 1

    def stop(self) -> None:
        self.stopped += 1

    def take(self) -> dict[str, float]:
        return {} if self.util is None else {"gpu.util": self.util}


class Training:
    """Training process with its channel, its preset monitor, and the decisions."""

    def __init__(self, attempt: int = 1, base: int = 0) -> None:
        self.clock = Clock()
        self.reports: list[tuple[float, Any]] = []
        self.decided: list[dict[str, Any]] = []
        self.log: list[str] = []
        self.probe = Probe()
        self.storing = False
        self.missed = 0
        self.step = 0
        self.total: int | None = 10**9
        self.watch = PresetMonitor(
            self.decided.append,
            attempt=attempt,
            clock=self.clock,
            make_probe=lambda: self.probe,  # type: ignore[arg-type,return-value]
        )
        self.begin(base)

    def begin(self, base: int = 0) -> None:
        self.watch.attach(
            self, base=base, storing=lambda: self.storing, log_line=self.log.append, missed=lambda: self.missed
        )

    def take_reports(self) -> list[tuple[float, Any]]:
        taken, self.reports = self.reports, []
        return taken

    def say(self, report: Any) -> None:
        self.reports.append((self.clock.now, report))
        self.watch.poll()

    def report(self, step: int, metrics: Mapping[str, float] | None = None, **more: Any) -> None:
        self.step = step
        odd = {name: str(value) for name, value in (metrics or {}).items() if not math.isfinite(value)}
        fine = {name: value for name, value in (metrics or {}).items() if name not in odd}
        points = () if "phase" in more else (Point(step, {**fine, **odd}),)
        self.say(TrainingProgress(step, self.total, fine, nonfinite=odd, points=points, **more))

    def train(self, steps: int, *, step_s: float = 0.4, **metrics: Any) -> None:
        """Report steps. Each metric may be a function of the step; `wait` is each step's wait for data."""
        wait = metrics.pop("wait", None)
        for step in range(self.step + 1, self.step + 1 + steps):
            self.clock.now += step_s
            found = {name: value(step) if callable(value) else value for name, value in metrics.items()}
            signals = {"step.time": step_s} if wait is None else {"step.time": step_s, "data.wait": wait}
            self.report(step, found, signals=signals)

    def stand_still(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now = min(self.clock.now + 5, until)
            self.watch.poll()

    def told(self, what: str = "rule.fired") -> list[str]:
        return [one["rule"] for one in self.decided if one["decision"] == what]
