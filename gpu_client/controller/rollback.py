"""After a rollback the training goes on otherwise than before: with other batches, at a lower rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpu_client.controller.action_executor import said_of
from gpu_client.controller.knobs import Knob


class Adjusted(NamedTuple):
    """What came of it: the decision's type, and words."""

    type: str
    message: str


class Rollbacks:
    """Those of the job's life, and how many of them the training's state has in it."""

    def __init__(self) -> None:
        self._known: list[Mapping[str, Any]] = []
        self.done = 0
        """Number of the newest one that is in the state."""

    def begin(self, known: Iterable[Mapping[str, Any]]) -> None:
        """Each as baton.contract.steering.RolledBack says it."""
        self._known = list(known)

    def made_up_for(self, knobs: Mapping[str, Knob], states: list[object]) -> Iterator[dict[str, Any]]:
        """Adjust the states that were taken back by what they have not in them; what came of each, as a decision."""
        for one in self._known:
            if int(one["number"]) > self.done:
                self.done = int(one["number"])
                came_of = adjusted(one, knobs, states)
                told = {"type": came_of.type, "message": came_of.message}
                yield {**told, "rule": str(one.get("rule", "")), "actions": ["rollback"]}


def adjusted(one: Mapping[str, Any], knobs: Mapping[str, Knob], states: Iterable[object]) -> Adjusted:
    """Apply a rollback (baton.contract.steering.RolledBack) to the states that were just restored. Never raises.

    The rate needs a knob `lr` that can `scale(factor)`, the batches a state that can `skip(batches)`.
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
        # Of the class: a module may well have a part that is called so.
        data = [state for state in states if callable(getattr(type(state), "skip", None))]
        if not data:
            lacks.append(f"{skip} batches are not skipped: no state has skip(batches)")
        for state in data:
            _try(state.skip, skip, f"{skip} batches skipped", done, lacks)  # type: ignore[attr-defined]
    kind = "action.failed" if lacks else "action.applied"
    return Adjusted(kind, "; ".join((*done, *lacks)) or "goes on as it was")


def _try(do: Any, value: float, said: str, done: list[str], lacks: list[str]) -> None:
    try:
        do(value)
    except Exception as error:  # noqa: BLE001 - the user's code: the training goes on
        lacks.append(f"not {said}: {said_of(error)}")
    else:
        done.append(said)
