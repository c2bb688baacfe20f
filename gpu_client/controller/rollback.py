"""Change a training that restarts after a rollback: skip batches, lower the learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpu_client.controller.action_executor import format_error
from gpu_client.controller.learning_rate import Knob


class RollbackResult(NamedTuple):
    """Type and text of the resulting decision."""

    type: str
    message: str


class RollbackTracker:
    """Tracker of a job's rollbacks, and of the rollbacks that the state of the training contains."""

    def __init__(self) -> None:
        self._known: list[Mapping[str, Any]] = []
        self.done = 0
        """Number of the newest rollback in the state."""

    def begin(self, known: Iterable[Mapping[str, Any]]) -> None:
        """Set the job's rollbacks, each as a baton.contract.worker.control.RolledBack."""
        self._known = list(known)

    def apply_missing(self, knobs: Mapping[str, Knob], states: list[object]) -> Iterator[dict[str, Any]]:
        """Apply the rollbacks that the restored states do not contain; yield a decision for each."""
        for one in self._known:
            if int(one["number"]) > self.done:
                self.done = int(one["number"])
                result = apply_rollback(one, knobs, states)
                decision = {"type": result.type, "message": result.message}
                yield {**decision, "rule": str(one.get("rule", "")), "actions": ["rollback"]}


def apply_rollback(one: Mapping[str, Any], knobs: Mapping[str, Knob], states: Iterable[object]) -> RollbackResult:
    """Apply a rollback (baton.contract.worker.control.RolledBack) to restored states. Never raises.

    The learning rate needs a knob `lr` with `scale(factor)`, the batches need a state with `skip(batches)`.
    """
    done: list[str] = []
    lacks: list[str] = []
    factor, skip = float(one.get("lr_factor", 1.0)), int(one.get("skip", 0))
    if factor != 1.0:
        scale = getattr(knobs.get("lr"), "scale", None)
        if scale is None:
            lacks.append("the learning rate stays: no knob 'lr' that can scale is offered before session.resume()")
        else:
            _try(scale, factor, f"learning rate times {factor:g}", done, lacks)
    if skip:
        # A module may have a submodule named `skip`, therefore the search covers the class only.
        data = [state for state in states if callable(getattr(type(state), "skip", None))]
        if not data:
            lacks.append(f"{skip} batches are not skipped: no state has skip(batches)")
        for state in data:
            _try(state.skip, skip, f"{skip} batches skipped", done, lacks)  # type: ignore[attr-defined]
    kind = "action.failed" if lacks else "action.applied"
    return RollbackResult(kind, "; ".join((*done, *lacks)) or "no change")


def _try(do: Any, value: float, text: str, done: list[str], lacks: list[str]) -> None:
    try:
        do(value)
    except Exception as error:  # noqa: BLE001 - the user's code: the training continues
        lacks.append(f"not {text}: {format_error(error)}")
    else:
        done.append(text)
