"""How far a training without Baton is, in lines: under Baton `baton watch` tells it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

log = logging.getLogger("baton.training")

EVERY_S = 30.0
"""Between two lines. Each reads the loss, for which a GPU is waited for."""


class ProgressLines:
    """Says step, loss and time left after the first step of this run, then now and then, and after the last; and
    where no step is left, that it is so."""

    def __init__(self, done: int, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._done, self._total, self._clock = done, total, clock
        self._began_at = clock()
        self._said_at: float | None = None
        if done >= total:
            log.info("all %d steps are trained already: the training is complete, its files are written again", done)

    def after(self, step: int, loss: torch.Tensor) -> None:
        """To be called after every step."""
        now = self._clock()
        if self._said_at is not None and now - self._said_at < EVERY_S and step < self._total:
            return
        self._said_at = now
        left_s = (now - self._began_at) / (step - self._done) * (self._total - step)
        left = f", about {left_s / 60:.0f} min left" if left_s >= 60 else ""
        log.info("step %d of %d, loss %.4f%s", step, self._total, loss.item(), left)
