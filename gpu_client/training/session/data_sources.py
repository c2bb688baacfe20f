"""States that know where a training's data come from, as the loader of a ring does: what they measure, what they keep.

Any object among the states that has these is one:

- `data_metrics()`, plain numbers of the newest batch: they go out with each report (`data.wait`, `data.reuse`,
  `data.age`).
- `checkpointed(state)`: data that a training would need which goes on from an older state need not be kept any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any


class Sources:
    """Those of one session. Where another library holds the loaders, its callback names them here."""

    def __init__(self, keep_last: int) -> None:
        """What checkpoints need that the session keeps itself, the newest `keep_last`, is kept; two at least: the
        newest may not be stored elsewhere yet, or turn out damaged."""
        self._measuring: list[Any] = []
        self._states: deque[dict[str, Any]] = deque(maxlen=max(keep_last, 2))
        """Of the newest checkpoints, oldest first."""

    def follow(self, stateful: Mapping[str, object]) -> None:
        """The states of the training, as it begins or goes on from a checkpoint."""
        self._measuring = list(_having("data_metrics", stateful.values()))
        self._keep(stateful)

    def beside(
        self, new: Mapping[str, object], shown: Mapping[str, object]
    ) -> tuple[Mapping[str, object], Mapping[str, object]]:
        """A report's metrics, `new` and `shown`, with what is measured; the script's own are preferred."""
        if not self._measuring:
            return new, shown
        found: dict[str, object] = {}
        for source in self._measuring:
            found.update(source.data_metrics())
        with_new = {**found, **new}
        return with_new, with_new if shown is new else {**found, **shown}

    def saved(self, stateful: Mapping[str, Any]) -> None:
        """A checkpoint with these states was taken, and nothing was read since."""
        self._keep(stateful)
        oldest = self._states[0] if self._states else {}
        for name, state in stateful.items():
            if name in oldest:
                state.checkpointed(oldest[name])

    def _keep(self, stateful: Mapping[str, Any]) -> None:
        states = {name: one.state_dict() for name, one in stateful.items() if _has(one, "checkpointed")}
        if any(states.values()):  # what has read nothing yet has none
            self._states.append(states)


def has_source(loader: object) -> bool:
    """Whether a loader is one that is told of checkpoints: endless, with a state."""
    return _has(loader, "checkpointed")


def _having(name: str, states: Iterable[object]) -> Iterable[object]:
    return (state for state in states if _has(state, name))


def _has(state: object, name: str) -> bool:
    # Of the class: a module may well have a part that is called so.
    return callable(getattr(type(state), name, None))
