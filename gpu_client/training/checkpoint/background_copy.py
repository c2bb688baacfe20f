"""Copy tensors, at once or in a background thread.

The parameters and the state of an optimizer change only in its `step()`. Therefore a background thread may copy both
while the script continues, if the optimizer waits for the thread before its next step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from gpu_client.training.checkpoint.safetensors_file import SMALL_BYTES
from gpu_client.training.checkpoint.shared_memory import Pairs

log = logging.getLogger("baton.training")


def copy_all(pairs: Pairs) -> None:
    """Copy all pairs, and return when every copy is complete. GPU tensors use a stream of their own."""
    _Copy(pairs).run()


class _Copy:
    """Copies of one checkpoint. The training thread creates the object, so that GPU streams wait for earlier work."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self._streams: dict[torch.device, Any] = {}
        for device in {source.device for _, source in pairs if source.is_cuda}:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream

    def run(self) -> None:
        for target, source in self._pairs:
            stream = self._streams.get(source.device)
            if stream is None:
                target.copy_(source)
            else:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for stream in self._streams.values():
            stream.synchronize()


class BackgroundCopy:
    """Thread that copies the pairs and then calls `done`, or `failed` after an error.

    Each of `optimizers` waits for the thread before its next step.
    """

    def __init__(
        self,
        pairs: Pairs,
        optimizers: Iterable[torch.optim.Optimizer],
        done: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._copy = _Copy(pairs)
        self._done = done
        self._failed = failed
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.wait())  # type: ignore[no-untyped-call,unused-ignore]
            for optimizer in optimizers
        ]
        self._thread = threading.Thread(target=self._run, name="baton-copy", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Return True until the thread has ended."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the thread has called `done` or `failed`."""
        self._thread.join()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _run(self) -> None:
        try:
            self._copy.run()
            self._done()
        except Exception as error:  # noqa: BLE001 - no error may be lost with the thread
            self._failed(error)


def find_optimizers(states: Iterable[object]) -> list[torch.optim.Optimizer]:
    """Return the optimizers in `states` that can wait before a step."""
    return [
        state
        for state in states
        if isinstance(state, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in vars(state)
    ]


def split_pairs(pairs: Pairs, optimizers: Iterable[torch.optim.Optimizer]) -> tuple[Pairs, Pairs]:
    """Split pairs into pairs to copy at once, and large tensors of `optimizers` for the background thread."""
    owned = {
        (tensor.device, tensor.untyped_storage().data_ptr())
        for optimizer in optimizers
        for tensor in _tensors_of([optimizer.param_groups, list(optimizer.state.values())])
    }
    at_once: Pairs = []
    later: Pairs = []
    for target, source in pairs:
        waits = source.nbytes >= SMALL_BYTES and (source.device, source.untyped_storage().data_ptr()) in owned
        (later if waits else at_once).append((target, source))
    return at_once, later


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_of(item)
