"""Execute the actions of rules and commands, within the capabilities of the training loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpu_client.controller.learning_rate import Knob
from gpu_client.controller.orders import Order, Outcome

log = logging.getLogger("baton.rules")

MAX_ERROR_CHARS = 500


class TrainingLoop(Protocol):
    """Interface of a training loop with a session."""

    def request_stop(self, reason: str, *, checkpoint: bool) -> None: ...

    def request_save(self, tag: str = "") -> None: ...

    def settle(self) -> None:
        """Read the unread reports of all ranks on the last step."""

    @property
    def stopping(self) -> bool:
        """Return True after a stop request."""


class UserHook(Protocol):
    """Action of a user, called between two steps; an exception becomes the outcome `action.failed`."""

    def __call__(self, order: Order, /) -> object:
        """Run the action. `order` contains the rule, the step, the hook's name, and in `why` the operands."""


class UserMetric(Protocol):
    """Metric of a user, read at each step if a rule reads the metric."""

    def __call__(self) -> float | None:
        """Return the value, or None if the value is unknown."""


class Profiler(Protocol):
    """Recorder of some steps in detail."""

    @property
    def active(self) -> bool: ...

    def begin(self, steps: int, step: int, on_done: Callable[[bool, str], object]) -> str:
        """Begin after `step`. Raises UnsupportedActionError or the profiler's error. `on_done` receives the outcome."""

    def stepped(self, step: int) -> None: ...

    def close(self) -> None: ...


@dataclass
class LoopCapabilities:
    """Capabilities of a training loop besides stopping and saving."""

    knobs: dict[str, Knob] = field(default_factory=dict)
    hooks: dict[str, UserHook] = field(default_factory=dict)
    metrics: dict[str, UserMetric] = field(default_factory=dict)
    profiler: Profiler | None = None
    evaluates: bool = False
    skips_batches: bool = False


class UnsupportedActionError(Exception):
    """Error of an impossible action; the text is the reason."""


class ActionExecutor:
    """Executor of orders. `leave` receives an order that ends the attempt."""

    def __init__(
        self,
        loop: TrainingLoop,
        capabilities: LoopCapabilities,
        leave: Callable[[Order], bool],
        on_outcome: Callable[[Order, Outcome, str], object],
    ) -> None:
        """`leave` returns False if no agent can carry out the order. `on_outcome` receives the outcome of an order that
        takes several steps.
        """
        self._loop = loop
        self._leave = leave
        self._on_outcome = on_outcome
        self.capabilities = capabilities
        self.evaluation_requested = False
        self.skip_requested = False
        self.finishing = False
        self._ended = ""
        """Action that ends the training; only the first such action counts."""

    @property
    def stopped(self) -> bool:
        """Return True if the job ends with the training, complete or failed."""
        return self._ended == "stop"

    def execute(self, order: Order) -> tuple[Outcome, str]:
        """Execute one order; return its outcome and a text. Never raises."""
        do = _DO.get(order.action)
        if do is None:
            return "rejected", f"there is no action {order.action!r} here"
        try:
            done = do(self, order.arguments, order)
        except UnsupportedActionError as error:
            return "rejected", str(error)
        except Exception as error:  # noqa: BLE001 - a knob or a hook is the user's code: the training continues
            return "failed", format_error(error)
        return "applied", done

    def _stop(self, arguments: Mapping[str, Any], order: Order) -> str:
        self._require_not_ending()
        self._leave(order)
        self._ended = order.action
        self.finishing = arguments.get("outcome") != "failed"
        self._loop.request_stop("rule", checkpoint=bool(arguments.get("save", True)))
        return f"the training stops: {arguments.get('outcome') or 'complete'}"

    def _end_attempt(self, arguments: Mapping[str, Any], order: Order) -> str:
        self._require_not_ending()
        if not self._leave(order):
            raise UnsupportedActionError(f"{order.action} needs an agent; this training runs without one")
        self._ended = order.action
        self._loop.request_stop("rule", checkpoint=order.action != "rollback")
        return f"the job is handed back: {order.action}"

    def _require_not_ending(self) -> None:
        if self._ended:
            raise UnsupportedActionError(f"the training is ending already: {self._ended}")

    def _save(self, arguments: Mapping[str, Any], order: Order) -> str:
        tag = str(arguments.get("tag") or "")
        self._loop.request_save(tag)
        return f"a checkpoint is due: {tag}" if tag else "a checkpoint is due"

    def _evaluate(self, arguments: Mapping[str, Any], order: Order) -> str:
        if not self.capabilities.evaluates:
            raise UnsupportedActionError(
                "this training does not evaluate when asked: session.steering.offer(evaluate=True)"
            )
        self.evaluation_requested = True
        return "an evaluation is due"

    def _skip_batch(self, arguments: Mapping[str, Any], order: Order) -> str:
        if not self.capabilities.skips_batches:
            raise UnsupportedActionError("this training does not skip batches: session.steering.offer(skip_batch=True)")
        self.skip_requested = True
        return "the batch is skipped"

    def _log(self, arguments: Mapping[str, Any], order: Order) -> str:
        log.info("[%s] %s", order.rule, arguments["text"])
        return str(arguments["text"])

    def _alert(self, arguments: Mapping[str, Any], order: Order) -> str:
        log.warning("[%s] %s", order.rule, arguments["text"])
        return str(arguments["text"])

    def _set(self, arguments: Mapping[str, Any], order: Order) -> str:
        name = str(arguments.get("knob"))
        knob = self.capabilities.knobs.get(name)
        if knob is None:
            there = ", ".join(sorted(self.capabilities.knobs)) or "none"
            remedy = "session.steering.offer(knobs=...)"
            raise UnsupportedActionError(f"this training has no knob {name!r} (it has {there}): {remedy}")
        before, factor = float(knob.read()), arguments.get("factor")
        wanted = float(arguments["value"]) if factor is None else before * float(factor)
        low, high = arguments.get("min"), arguments.get("max")
        wanted = wanted if high is None else min(wanted, float(high))
        wanted = wanted if low is None else max(wanted, float(low))
        if factor is not None and float(factor) != 1:
            # A bound never turns the knob in the opposite direction, therefore a value beyond the bound stays.
            wanted = min(wanted, before) if (float(factor) < 1) == (before >= 0) else max(wanted, before)
        if not math.isfinite(wanted):
            raise UnsupportedActionError(f"{name} cannot be {wanted}")
        knob.write(wanted)
        return f"{name}: {before:.6g} -> {knob.read():.6g}"

    def _hook(self, arguments: Mapping[str, Any], order: Order) -> str:
        hook = self.capabilities.hooks.get(str(arguments.get("name")))
        if hook is None:
            there = ", ".join(sorted(self.capabilities.hooks)) or "none"
            raise UnsupportedActionError(f"this training has no hook {arguments.get('name')!r} (it has {there})")
        hook(order)
        return f"{arguments['name']} was called"

    def _profile(self, arguments: Mapping[str, Any], order: Order) -> str:
        if self.capabilities.profiler is None:
            raise UnsupportedActionError("this training cannot be profiled")
        return self.capabilities.profiler.begin(
            int(arguments["steps"]),
            order.step,
            lambda succeeded, text: self._on_outcome(order, "applied" if succeeded else "failed", text),
        )

    def _elsewhere(self, arguments: Mapping[str, Any], order: Order) -> str:
        raise UnsupportedActionError(f"{order.action} is not done by a training process")


def format_error(error: BaseException) -> str:
    """Format an exception, also one whose `__str__` raises."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
    except Exception:  # noqa: BLE001 - any __str__ at all
        return type(error).__name__


_Do = Callable[[ActionExecutor, Mapping[str, Any], Order], str]
_DO: Mapping[str, _Do] = {
    "stop": ActionExecutor._stop,
    "rollback": ActionExecutor._end_attempt,
    "pause": ActionExecutor._end_attempt,
    "requeue": ActionExecutor._end_attempt,
    "save": ActionExecutor._save,
    "evaluate": ActionExecutor._evaluate,
    "skip_batch": ActionExecutor._skip_batch,
    "log": ActionExecutor._log,
    "alert": ActionExecutor._alert,
    "set": ActionExecutor._set,
    "hook": ActionExecutor._hook,
    "scale": ActionExecutor._elsewhere,
    "profile": ActionExecutor._profile,
}
