"""After a rollback the training goes on otherwise than before: with other batches, at a lower rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gpu_client.controller.knobs import Knob
from gpu_client.controller.performing import said_of


class Adjusted(NamedTuple):
    """What came of it: the decision's type, and words."""

    type: str
    message: str


def adjusted(one: Mapping[str, Any], knobs: Mapping[str, Knob], states: Iterable[object]) -> Adjusted:
    """Do what this rollback (contract.steering.RolledBack) asks of the states that were just taken back. Never raises.

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
