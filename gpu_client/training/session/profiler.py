"""Run the action `profile`: profile a few steps with torch's profiler, and publish the trace as an artifact."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_client.controller.action_executor import UnsupportedActionError, format_error

MAX_STEPS = 100
MAX_TRACE_BYTES = 64 * 1024**2
"""Size limit of a trace in bytes, which is the limit of artifacts before a job's end."""
FOLDER = "profile"
"""Folder of the traces in the output directory."""

log = logging.getLogger("baton.training")

OnDone = Callable[[bool, str], object]


class StepProfiler:
    """Profiler of one process; only the first rank profiles. Costs nothing while `active` is False."""

    def __init__(self, output_dir: Path, show: Callable[[Path], object], *, first: bool) -> None:
        """`show` receives the finished trace."""
        self._folder = output_dir / FOLDER
        self._show = show
        self._first = first
        self._profile: Any = None
        self._on_done: OnDone | None = None
        self._began_at = 0
        self._at = 0
        self._until = 0

    @property
    def active(self) -> bool:
        """Return True during a profile."""
        return self._profile is not None

    def begin(self, steps: int, step: int, on_done: OnDone) -> str:
        """Profile the next `steps` steps after `step`; `on_done` receives success and a text at the end.

        Raises UnsupportedActionError, and the errors of the profiler.
        """
        if not self._first:
            return "the first process profiles"
        if self.active:
            raise UnsupportedActionError(f"a profile is under way, until step {self._until}")
        if not 1 <= steps <= MAX_STEPS:
            raise UnsupportedActionError(f"{steps} steps are too many to profile: at most {MAX_STEPS}")
        try:
            profiler = importlib.import_module("torch.profiler")
        except ImportError as error:
            raise UnsupportedActionError(f"there is no torch.profiler here: {error}") from error
        self._folder.mkdir(parents=True, exist_ok=True)
        profile = profiler.profile(activities=sorted(profiler.supported_activities(), key=str))
        profile.start()
        self._profile, self._on_done = profile, on_done
        self._began_at, self._at, self._until = step + 1, step, step + steps
        return f"steps {step + 1} to {step + steps} are profiled"

    def stepped(self, step: int) -> None:
        """Record the end of a step. Never raises."""
        if step == self._at or self._profile is None:
            return
        self._at = step
        try:
            if step < self._until:
                self._profile.step()
                return
            succeeded, text = True, self._finish(step)
        except Exception as error:  # noqa: BLE001 - a profiler that fails must not end the training
            succeeded, text = False, f"the profile is lost: {format_error(error)}"
            if step < self._until:
                self._stop()
        self._profile, on_done = None, self._on_done
        if on_done is not None:
            on_done(succeeded, text)

    def close(self) -> None:
        """Drop an incomplete profile at the end of the training, and report the loss."""
        if self._profile is None:
            return
        self._stop()
        if self._on_done is not None:
            self._on_done(False, f"the training ended before step {self._until}: the profile is dropped")

    def _stop(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            try:
                profile.stop()
            except Exception as error:  # noqa: BLE001 - see above
                log.warning("the profiler could not be stopped: %s", format_error(error))

    def _finish(self, step: int) -> str:
        self._profile.stop()
        trace = self._folder / f"step-{self._began_at:06}-{step:06}.json.gz"
        self._profile.export_chrome_trace(str(trace))
        size_bytes = trace.stat().st_size
        if size_bytes > MAX_TRACE_BYTES:
            trace.unlink()
            raise ValueError(
                f"the trace has {size_bytes} bytes; at most {MAX_TRACE_BYTES} are kept: profile fewer steps"
            )
        self._show(trace)
        return f"{FOLDER}/{trace.name}, {size_bytes} bytes: open it in https://ui.perfetto.dev"
