"""Doing what rules and commands want, as far as the training loop has said that it can be done."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpu_client.controller.knobs import Knob
from gpu_client.controller.orders import Order, Outcome

log = logging.getLogger("baton.rules")

MAX_SAID_CHARS = 500


class Loop(Protocol):
    """What can be asked of any training loop that has a session."""

    def ask_to_stop(self, reason: str, *, checkpoint: bool) -> None: ...

    def ask_to_save(self, tag: str = "") -> None: ...

    def settle(self) -> None:
        """Have what all of several processes reported after the last step, if that is still to be heard."""

    @property
    def stopping(self) -> bool:
        """Whether it was asked to leave."""


class Hook(Protocol):
    """An action of the user's own, called between two steps. What it raises is told, and goes no further."""

    def __call__(self, order: Order, /) -> object:
        """`order` has the rule, the step, the name it was called by, and in `why` the values that led to it."""


class Source(Protocol):
    """A metric of the user's own, asked at each step if a rule reads it."""

    def __call__(self) -> float | None:
        """None where it is not known."""


class Profiler(Protocol):
    """Looks closely at some steps."""

    @property
    def active(self) -> bool: ...

    def begin(self, steps: int, step: int, told: Callable[[bool, str], object]) -> str:
        """Begin behind `step`; raises NotOfferedError or anything else if it cannot. `told` hears what came of it."""

    def stepped(self, step: int) -> None: ...

    def close(self) -> None: ...


@dataclass
class Offer:
    """What this loop can do besides stopping and saving."""

    knobs: dict[str, Knob] = field(default_factory=dict)
    hooks: dict[str, Hook] = field(default_factory=dict)
    metrics: dict[str, Source] = field(default_factory=dict)
    profiler: Profiler | None = None
    evaluates: bool = False
    skips_batches: bool = False


class NotOfferedError(Exception):
    """It cannot be done here; the text says why."""


class Performer:
    """Carries orders out. `leave` is told how the training is to end, where it does not just go on."""

    def __init__(
        self, loop: Loop, offer: Offer, leave: Callable[[Order], bool], came_of: Callable[[Order, Outcome, str], object]
    ) -> None:
        """`leave` is False where nobody is there who could do what the end is for. `came_of` hears what became of an
        order that takes some steps."""
        self._loop = loop
        self._leave = leave
        self._came_of = came_of
        self.offer = offer
        self.evaluation_wanted = False
        self.batch_unwanted = False
        self.finishing = False
        self._ended = ""
        """By what, if the training ends: only the first end counts."""

    @property
    def stopped(self) -> bool:
        """Whether the job ends with the training, complete or failed."""
        return self._ended == "stop"

    def perform(self, order: Order) -> tuple[Outcome, str]:
        """Do it; what became of it. Never raises."""
        do = _DO.get(order.action)
        if do is None:
            return "rejected", f"there is no action {order.action!r} here"
        try:
            done = do(self, order.arguments, order)
        except NotOfferedError as error:
            return "rejected", str(error)
        except Exception as error:  # noqa: BLE001 - a knob or a hook is the user's code: the training goes on
            return "failed", said_of(error)
        return "applied", done

    def _stop(self, arguments: Mapping[str, Any], order: Order) -> str:
        self._require_going_on()
        self._leave(order)
        self._ended = order.action
        self.finishing = arguments.get("outcome") != "failed"
        self._loop.ask_to_stop("rule", checkpoint=bool(arguments.get("save", True)))
        return f"the training stops: {arguments.get('outcome') or 'complete'}"

    def _hand_back(self, arguments: Mapping[str, Any], order: Order) -> str:
        self._require_going_on()
        if not self._leave(order):
            raise NotOfferedError(f"{order.action} needs an agent; this training runs without one")
        self._ended = order.action
        self._loop.ask_to_stop("rule", checkpoint=order.action != "rollback")
        return f"the job is handed back: {order.action}"

    def _require_going_on(self) -> None:
        if self._ended:
            raise NotOfferedError(f"the training is ending already: {self._ended}")

    def _save(self, arguments: Mapping[str, Any], order: Order) -> str:
        tag = str(arguments.get("tag") or "")
        self._loop.ask_to_save(tag)
        return f"a checkpoint is due: {tag}" if tag else "a checkpoint is due"

    def _evaluate(self, arguments: Mapping[str, Any], order: Order) -> str:
        if not self.offer.evaluates:
            raise NotOfferedError("this training does not evaluate when asked: session.steering.offer(evaluate=True)")
        self.evaluation_wanted = True
        return "an evaluation is due"

    def _skip_batch(self, arguments: Mapping[str, Any], order: Order) -> str:
        if not self.offer.skips_batches:
            raise NotOfferedError("this training does not skip batches: session.steering.offer(skip_batch=True)")
        self.batch_unwanted = True
        return "the batch is skipped"

    def _log(self, arguments: Mapping[str, Any], order: Order) -> str:
        log.info("[%s] %s", order.rule, arguments["text"])
        return str(arguments["text"])

    def _alert(self, arguments: Mapping[str, Any], order: Order) -> str:
        log.warning("[%s] %s", order.rule, arguments["text"])
        return str(arguments["text"])

    def _set(self, arguments: Mapping[str, Any], order: Order) -> str:
        name = str(arguments.get("knob"))
        knob = self.offer.knobs.get(name)
        if knob is None:
            there = ", ".join(sorted(self.offer.knobs)) or "none"
            remedy = "session.steering.offer(knobs=...)"
            raise NotOfferedError(f"this training has no knob {name!r} (it has {there}): {remedy}")
        before, factor = float(knob.read()), arguments.get("factor")
        wanted = float(arguments["value"]) if factor is None else before * float(factor)
        low, high = arguments.get("min"), arguments.get("max")
        wanted = wanted if high is None else min(wanted, float(high))
        wanted = wanted if low is None else max(wanted, float(low))
        if factor is not None and float(factor) != 1:
            # A bound that is passed already does not turn the knob the other way.
            wanted = min(wanted, before) if (float(factor) < 1) == (before >= 0) else max(wanted, before)
        if not math.isfinite(wanted):
            raise NotOfferedError(f"{name} cannot be {wanted}")
        knob.write(wanted)
        return f"{name}: {before:.6g} -> {knob.read():.6g}"

    def _hook(self, arguments: Mapping[str, Any], order: Order) -> str:
        hook = self.offer.hooks.get(str(arguments.get("name")))
        if hook is None:
            there = ", ".join(sorted(self.offer.hooks)) or "none"
            raise NotOfferedError(f"this training has no hook {arguments.get('name')!r} (it has {there})")
        hook(order)
        return f"{arguments['name']} was called"

    def _profile(self, arguments: Mapping[str, Any], order: Order) -> str:
        if self.offer.profiler is None:
            raise NotOfferedError("this training cannot be profiled")
        return self.offer.profiler.begin(
            int(arguments["steps"]),
            order.step,
            lambda well, said: self._came_of(order, "applied" if well else "failed", said),
        )

    def _elsewhere(self, arguments: Mapping[str, Any], order: Order) -> str:
        raise NotOfferedError(f"{order.action} is not done by a training process")


def said_of(error: BaseException) -> str:
    """What an exception says. User's exceptions may not even be able to say it."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_SAID_CHARS]
    except Exception:  # noqa: BLE001 - any __str__ at all
        return type(error).__name__


_Do = Callable[[Performer, Mapping[str, Any], Order], str]
_DO: Mapping[str, _Do] = {
    "stop": Performer._stop,
    "rollback": Performer._hand_back,
    "pause": Performer._hand_back,
    "requeue": Performer._hand_back,
    "save": Performer._save,
    "evaluate": Performer._evaluate,
    "skip_batch": Performer._skip_batch,
    "log": Performer._log,
    "alert": Performer._alert,
    "set": Performer._set,
    "hook": Performer._hook,
    "scale": Performer._elsewhere,
    "profile": Performer._profile,
}
