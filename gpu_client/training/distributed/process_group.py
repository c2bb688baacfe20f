"""Run collective operations of one training run (torchrun, accelerate launch); no-ops in a single process.

All ranks have to leave their loops at one step, because ranks in the loop would wait forever for a rank that has left.
Therefore all ranks learn of a request at one agreed call per step.

A single process does not load torch, whose import takes two seconds of a generator of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from gpu_client.training.errors import SessionError


class _Board:
    """Buffers for equally many numbers of each rank, reused because fresh memory is slow."""

    def __init__(self, size: int, width: int) -> None:
        import torch

        self.width = width
        self.mine = torch.zeros(width, dtype=torch.float64)
        self.values = self.mine.numpy()
        self.table = torch.zeros(size, width, dtype=torch.float64)
        self.rows = list(self.table)


class PendingGather:
    """Numbers of all ranks in transit."""

    def __init__(self, work: Any, board: _Board, arrived: Callable[[_Board], object]) -> None:
        """`work`: torch's handle of the operation that fills the board. `arrived` receives the board for reuse."""
        self._work = work
        self._board = board
        self._arrived = arrived

    def rows(self, timeout_s: float | None = None) -> list[list[float]]:
        """Wait for the numbers of all ranks, and return them in rank order. Call once.

        Raises RuntimeError if a rank has ended, or has not sent within `timeout_s` seconds (None: torch's own limit).
        """
        if timeout_s is None:
            self._work.wait()
        else:
            self._work.wait(timedelta(seconds=timeout_s))
        rows: list[list[float]] = self._board.table.tolist()
        self._arrived(self._board)
        return rows


class Ranks:
    """Rank and size of the run, from the launcher's RANK and WORLD_SIZE, and its collective operations."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Read the variables. Raises SessionError if RANK or WORLD_SIZE are no whole numbers."""
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
        """Buffers of the last gathering, available for reuse."""

    @property
    def first(self) -> bool:
        """Return True on the rank that commits checkpoints and sends messages to the agent."""
        return self.rank == 0

    def agree(self, *values: int) -> list[int]:
        """Return the maximum of each value over all ranks. Collective: every rank must call this equally often."""
        if self.size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        votes = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._ready_group())
        agreed: list[int] = votes.tolist()
        return agreed

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Gather the values of all ranks in rank order on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        group = self._ready_group()
        gathered: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, gathered, dst=0, group=group)
        return gathered

    def begin_gathering(self, values: Sequence[float]) -> PendingGather:
        """Start sending equally many numbers from each rank to all ranks, without blocking.

        Collective: every rank must call this equally often.
        """
        group = self._ready_group()
        board, self._board = self._board, None
        if board is None or board.width != len(values):
            board = _Board(self.size, len(values))
        board.values[:] = values
        # dist.all_gather would take twice the time.
        return PendingGather(group.allgather([board.rows], [board.mine]), board, self._keep)

    def _keep(self, board: _Board) -> None:
        self._board = board

    def share(self, value: Any) -> Any:
        """Broadcast the first rank's value (plain JSON) to all ranks."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        boxed = [value]
        dist.broadcast_object_list(boxed, src=0, group=self._ready_group())
        return boxed[0]

    def _ready_group(self) -> Any:
        if self._group is None:
            import torch.distributed as dist

            if not (dist.is_available() and dist.is_initialized()):
                raise SessionError(
                    f"this is one of {self.size} processes, but torch.distributed is not initialized",
                    "Create the Accelerator (or call torch.distributed.init_process_group) before the first step",
                )
            # NCCL would wait for the GPU's queue, therefore the group uses the CPU.
            self._group = dist.new_group(backend="gloo")
        return self._group

    def close(self) -> None:
        """Drop the group, which torch ends with the process."""
        self._group = None
