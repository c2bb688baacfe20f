"""Agreement between the processes of one training run (torchrun, accelerate launch); without effect in a single
process.

Every rank has to leave its loop at the same step, because the others would wait for it for ever. Therefore all ranks
learn of a request at one agreed call per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gpu_client.training.errors import SessionError


class _Board:
    """Buffers for equally many numbers of each rank; allocated once, because fresh memory is slow at every step."""

    def __init__(self, size: int, width: int) -> None:
        self.width = width
        self.mine = torch.zeros(width, dtype=torch.float64)
        self.values = self.mine.numpy()
        self.table = torch.zeros(size, width, dtype=torch.float64)
        self.rows = list(self.table)


class PendingGather:
    """Numbers of all ranks in transit."""

    def __init__(self, work: Any, board: _Board, arrived: Callable[[_Board], object]) -> None:
        """`work`: torch's handle, which fills the board; `arrived` receives the board for reuse."""
        self._work = work
        self._board = board
        self._arrived = arrived

    def rows(self, timeout_s: float | None = None) -> list[list[float]]:
        """Return the numbers of each rank in rank order, after all have arrived. Call once.

        Raises RuntimeError if a rank is gone, or has not sent within `timeout_s` seconds (None: torch's own limit).
        """
        if timeout_s is None:
            self._work.wait()
        else:
            self._work.wait(timedelta(seconds=timeout_s))
        rows: list[list[float]] = self._board.table.tolist()
        self._arrived(self._board)
        return rows


class Ranks:
    """Rank and size of the run, from RANK and WORLD_SIZE as launchers set them, and its collective operations."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises SessionError if RANK or WORLD_SIZE are no whole numbers."""
        try:
            self.rank = int(environment.get("RANK") or 0)
            self.size = int(environment.get("WORLD_SIZE") or 1)
            self.one_machine = int(environment.get("LOCAL_WORLD_SIZE") or self.size) == self.size
        except ValueError as error:
            raise SessionError(
                "RANK and WORLD_SIZE must be whole numbers", "Start with torchrun or accelerate launch"
            ) from error
        self._group: Any = None
        self._board: _Board | None = None
        """Buffers of the last gathering, after its arrival."""

    @property
    def first(self) -> bool:
        """True on the rank that commits checkpoints and talks to the agent."""
        return self.rank == 0

    def agree(self, *values: int) -> list[int]:
        """Return the maximum of each value over all ranks. Every rank must call this equally often."""
        if self.size == 1:
            return list(values)
        votes = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._ready_group())
        agreed: list[int] = votes.tolist()
        return agreed

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Gather the values of all ranks in rank order on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        group = self._ready_group()
        gathered: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, gathered, dst=0, group=group)
        return gathered

    def begin_gathering(self, values: Sequence[float]) -> PendingGather:
        """Start sending equally many numbers from each rank to all. Does not block; every rank must call this equally
        often.
        """
        group = self._ready_group()
        board, self._board = self._board, None
        if board is None or board.width != len(values):
            board = _Board(self.size, len(values))
        board.values[:] = values
        # dist.all_gather takes twice the time of this call.
        return PendingGather(group.allgather([board.rows], [board.mine]), board, self._keep)

    def _keep(self, board: _Board) -> None:
        self._board = board

    def share(self, value: Any) -> Any:
        """Broadcast the first rank's value (plain JSON) to all ranks."""
        if self.size == 1:
            return value
        boxed = [value]
        dist.broadcast_object_list(boxed, src=0, group=self._ready_group())
        return boxed[0]

    def _ready_group(self) -> Any:
        if self._group is None:
            if not (dist.is_available() and dist.is_initialized()):
                raise SessionError(
                    f"this is one of {self.size} processes, but torch.distributed is not initialized",
                    "Create the Accelerator (or call torch.distributed.init_process_group) before the first step",
                )
            # A group on the CPU does not wait for the GPU's queue, as NCCL would.
            self._group = dist.new_group(backend="gloo")
        return self._group

    def close(self) -> None:
        """Drop the group; torch ends it with the process."""
        self._group = None
