"""Mix batches from several sources by weight: a live ring, a recorded data set, a folder.

Each batch comes from one source. The seed and the number of the batch determine the source, therefore a resumed
training draws equal sources.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gpu_client.ring.errors import RingError

Source = Iterable[Any]
"""Iterable of batches, restarted at its end. `state_dict` and `load_state_dict` make it exactly resumable."""


class MixedLoader:
    """Loader of endless batches from several sources. `name`: source of the newest batch."""

    def __init__(self, sources: Mapping[str, tuple[Source, float]], *, seed: int = 0) -> None:
        """`sources`: source and weight by name. Raises RingError for invalid weights."""
        if not sources or any(not 0 <= weight < float("inf") for _, weight in sources.values()):
            raise RingError("the weights of a mixture must be numbers from 0 on", "Give each source a weight")
        if not sum(weight for _, weight in sources.values()):
            raise RingError("all weights of a mixture are 0", "Give a source a positive weight")
        self._sources = {name: source for name, (source, _) in sources.items()}
        self._weights = [weight for _, weight in sources.values()]
        self._seed = seed
        self._batch = 0
        self.name = ""

    def __iter__(self) -> Iterator[Any]:
        names = list(self._sources)
        under_way: dict[str, Iterator[Any]] = {}
        while True:
            chance = random.Random(f"{self._seed}:{self._batch}")  # noqa: S311 - an order, not a secret
            name = chance.choices(names, self._weights)[0]
            batch = self._next(name, under_way)
            self._batch += 1
            self.name = name
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the newest batch."""
        states = {name: source.state_dict() for name, source in self._resumable().items()}
        return {"version": 1, "batch": self._batch, "sources": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state at the next iteration."""
        self._batch = state["batch"]
        for name, source in self._resumable().items():
            if name in state["sources"]:
                source.load_state_dict(state["sources"][name])

    def checkpointed(self, state: Mapping[str, Any] | None = None) -> None:
        """Forward the call to the sources with a method `checkpointed`, such as `RingLoader`."""
        states = {} if state is None else state["sources"]
        for name, source in self._sources.items():
            forward: Callable[[Any], object] | None = getattr(source, "checkpointed", None)
            if forward is not None and (state is None or name in states):
                forward(states.get(name))

    @property
    def waited_s(self) -> float:
        """Return the total seconds of waiting for sources that measure their waits."""
        return float(sum(getattr(source, "waited_s", 0.0) for source in self._sources.values()))

    def data_metrics(self) -> dict[str, float]:
        """Return the metrics of the newest batch; {} if its source has no metrics."""
        measured: Callable[[], dict[str, float]] | None = getattr(self._sources.get(self.name), "data_metrics", None)
        return measured() if measured is not None else {}

    def _next(self, name: str, under_way: dict[str, Iterator[Any]]) -> Any:
        for _ in range(2):
            iterator = under_way.get(name)
            if iterator is None:
                iterator = under_way[name] = iter(self._sources[name])
            try:
                return next(iterator)
            except StopIteration:
                del under_way[name]
        raise RingError(
            f"the source {name} is empty, or cannot be restarted",
            "Give the source weight 0, or an iterable that can be restarted",
        )

    def _resumable(self) -> dict[str, Any]:
        return {name: source for name, source in self._sources.items() if hasattr(source, "state_dict")}
