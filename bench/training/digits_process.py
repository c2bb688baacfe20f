"""Digits example with a stopwatch around its training loop; `overhead` and the agent start it.

The loop is timed from the first batch that is drawn to the switch to evaluation, so the checkpoint of the last step is
inside and imports, reading images and the final report are outside.
"""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from baton import BatchSampler
from bench.training.stopwatch import Stopwatch, run, session_of
from gpu_client.training import digits


def instrument(watch: Stopwatch, mode: str) -> None:
    """Install the stopwatch in the example, and for `bare` the session without effect."""

    class TimedBatches(BatchSampler):
        def __next__(self) -> Any:
            watch.begin()
            return super().__next__()

    class TimedModel(nn.Sequential):
        def eval(self) -> Self:
            watch.end()
            return super().eval()

    make_model = digits.make_model
    digits.BatchSampler = TimedBatches  # type: ignore[misc]
    digits.make_model = lambda hidden: TimedModel(*make_model(hidden))
    digits.Session = session_of(mode, watch)  # type: ignore[misc]


if __name__ == "__main__":
    run(instrument, digits.main)
