"""Collect the metrics of data sources (states that read a ring or a similar source), and release their data.

A state is a data source if its class has one of these methods:

- `data_metrics()`: returns plain numbers for each report: of the newest batch (`data.wait`, `data.reuse`), or of the
  newest round (`world.loss`).
- `checkpointed(state)`: releases the data that only trainings before `state` would need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any


class DataSources:
    """Data sources of one session. A callback adds the loaders that another library owns."""

    def __init__(self, keep_last: int) -> None:
        """Retain the data for the newest `keep_last` checkpoints, at least two.

        The newest checkpoint may be damaged or not yet uploaded, therefore a training may resume from the one before.
        """
        self._measuring: list[Any] = []
        self._lasting: list[Any] = []
        """Sources that no state names."""
        self._states: deque[dict[str, Any]] = deque(maxlen=max(keep_last, 2))
        """States of the newest checkpoints, oldest first."""

    def measure(self, source: object) -> None:
        """Report the metrics of a source, whether a state or not."""
        self._lasting.append(source)
        self._measuring.append(source)

    def follow(self, stateful: Mapping[str, object]) -> None:
        """Follow the states of a training that begins or resumes."""
        lasting = {id(one) for one in self._lasting}
        found = [one for one in _having("data_metrics", stateful.values()) if id(one) not in lasting]
        self._measuring = [*self._lasting, *found]
        self._keep(stateful)

    def merge_metrics(
        self, new: Mapping[str, object], shown: Mapping[str, object]
    ) -> tuple[Mapping[str, object], Mapping[str, object]]:
        """Add the sources' metrics to the metrics `new` and `shown` of a report; the script's own take precedence."""
        if not self._measuring:
            return new, shown
        found: dict[str, object] = {}
        for source in self._measuring:
            found.update(source.data_metrics())
        with_new = {**found, **new}
        return with_new, with_new if shown is new else {**found, **shown}

    def checkpoint_saved(self, stateful: Mapping[str, Any]) -> None:
        """Record a checkpoint with the states, and release the data that no kept checkpoint needs."""
        self._keep(stateful)
        oldest = self._states[0] if self._states else {}
        for name, state in stateful.items():
            if name in oldest:
                state.checkpointed(oldest[name])

    def _keep(self, stateful: Mapping[str, Any]) -> None:
        states = {name: one.state_dict() for name, one in stateful.items() if _has(one, "checkpointed")}
        if any(states.values()):  # A source without reads has no state.
            self._states.append(states)


def has_source(loader: object) -> bool:
    """Return True if a loader is endless, has a state, and releases data after checkpoints."""
    return _has(loader, "checkpointed")


def _having(name: str, states: Iterable[object]) -> Iterable[object]:
    return (state for state in states if _has(state, name))


def _has(state: object, name: str) -> bool:
    # A module may have a submodule of the method's name, therefore the search covers the class only.
    return callable(getattr(type(state), name, None))
