"""Connect the training processes of one machine: small messages over gloo, and memory that all of them map."""

from __future__ import annotations

import mmap
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gpu_client.elastic.errors import ElasticSetupError, ProcessLostError

PROCESS_TIMEOUT_S = 600.0
"""Longest wait of the first process for another one, as long as torch's own limit for a step of NCCL."""
ROUND_TIMEOUT = timedelta(days=7)
"""Longest wait for the first process, which may itself wait for a round of the world."""


class LocalRanks:
    """Processes of one machine, of which rank 0 is the first. All processes make the same calls in the same order.

    Raises ElasticSetupError if torch.distributed has not been initialized.
    """

    def __init__(self, rank: int, size: int) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ElasticSetupError(
                f"this is one of {size} processes, but torch.distributed is not initialized",
                "Create the Accelerator (or call torch.distributed.init_process_group) before session.elastic",
            )
        self.rank, self.size = rank, size
        # NCCL would wait for the GPU's queue, therefore the group uses the CPU.
        self._group = dist.new_group(backend="gloo", timeout=ROUND_TIMEOUT)

    @property
    def is_first(self) -> bool:
        """Return True in the process that speaks for the node."""
        return self.rank == 0

    def gather(self, *numbers: int) -> list[list[int]]:
        """Return the numbers of all processes, in rank order. Raises ProcessLostError."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(dist.all_gather(rows, mine, group=self._group, async_op=True))
        return [row.tolist() for row in rows]

    def share(self, numbers: list[int]) -> list[int]:
        """Return the first process's numbers; every process passes equally many. Raises ProcessLostError."""
        values = torch.tensor(numbers, dtype=torch.int64)
        self._wait(dist.broadcast(values, src=0, group=self._group, async_op=True))
        shared: list[int] = values.tolist()
        return shared

    def share_text(self, text: str = "") -> str:
        """Return the first process's text. Raises ProcessLostError."""
        data = text.encode()
        (size,) = self.share([len(data)])
        if not size:
            return ""
        values = torch.tensor(list(data) if self.is_first else [0] * size, dtype=torch.uint8)
        self._wait(dist.broadcast(values, src=0, group=self._group, async_op=True))
        return bytes(values.tolist()).decode()

    def _wait(self, work: Any) -> None:
        try:
            work.wait(timedelta(seconds=PROCESS_TIMEOUT_S) if self.is_first else ROUND_TIMEOUT)
        except RuntimeError as error:
            raise ProcessLostError(str(error)) from error


def map_shared_values(ranks: LocalRanks, values: int, count: int) -> list[torch.Tensor]:
    """Return `count` float32 tensors of zeros, each with `values` elements, in memory that all processes map.

    The memory has no name, therefore it ends with the processes, however they end; and the size of /dev/shm, which is
    small in containers, does not limit it. Pages take up memory once a process has written to them.
    """
    if sys.platform != "linux":
        problem = f"several processes of a node share memory that {sys.platform} does not have"
        raise ElasticSetupError(problem, "Start one process, or use Linux")
    size_bytes = 4 * values * count
    descriptor, path, problem = -1, "", ""
    if ranks.is_first:
        descriptor = os.memfd_create("baton-elastic")
        os.ftruncate(descriptor, size_bytes)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
    path = ranks.share_text(path)
    try:
        descriptor = descriptor if ranks.is_first else os.open(path, os.O_RDWR)
        mapped = mmap.mmap(descriptor, size_bytes)
    except OSError as error:
        problem = f"the memory of the node's first process cannot be opened ({error})"
    if not all(is_open for (is_open,) in ranks.gather(not problem)):
        problem = problem or "another process of the node cannot open the memory of the first process"
        raise ElasticSetupError(problem, "Run the processes of a node as one user, in one container")
    os.close(descriptor)
    return list(torch.frombuffer(mapped, dtype=torch.float32).split(values))
