"""Dreambooth script with a stopwatch around its training loop; `dreambooth` and the agent start it.

The loop is timed from the first loss that is computed to the end of the last step: loading the models, filling the
caches and writing the result are outside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bench.training.stopwatch import Stopwatch, run, session_of
from gpu_client.training import dreambooth_lora
from gpu_client.training.dreambooth.model.lora import Lora


def instrument(watch: Stopwatch, mode: str) -> None:
    """Install the stopwatch in the script, and for `bare` the session without effect."""
    compute_denoising_loss = dreambooth_lora.compute_denoising_loss

    def timed_loss(*arguments: Any) -> torch.Tensor:
        watch.begin()
        return compute_denoising_loss(*arguments)

    class TimedLora(Lora):
        def export(self, path: Path, metadata: Any) -> None:
            watch.end()
            super().export(path, metadata)

    dreambooth_lora.compute_denoising_loss = timed_loss
    dreambooth_lora.Lora = TimedLora  # type: ignore[misc]
    dreambooth_lora.Session = session_of(mode, watch)  # type: ignore[misc]


if __name__ == "__main__":
    run(instrument, lambda: dreambooth_lora.main([]))
