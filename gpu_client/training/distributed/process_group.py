"""Agreement between the processes of one training run (torchrun, accelerate launch); a no-op for a single process.

Only rank 0 talks to the agent and commits checkpoints, but every rank has to leave its loop at the same step, or the
others wait for it for ever. So directives become visible to all ranks together, at one agreed call per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gpu_client.training.errors import SessionError


class _Board:
    """Room for as many numbers of each rank: made once, since memory that is new is slow at every step."""

    def __init__(self, size: int, width: int) -> None:
        self.width = width
        self.mine = torch.zeros(width, dtype=torch.float64)
        self.values = self.mine.numpy()
        self.table = torch.zeros(size, width, dtype=torch.float64)
        self.rows = list(self.table)


class Underway:
    """Numbers of all ranks that are on their way."""

    def __init__(self, work: Any, board: _Board, arrived: Callable[[_Board], object]) -> None:
        """`work` is torch's handle; it fills the board, which `arrived` gets back."""
        self._work = work
        self._board = board
        self._arrived = arrived

    def rows(self, timeout_s: float | None = None) -> list[list[float]]:
        """What each rank sent, in their order, once all of them have. To be asked once.

        Raises RuntimeError when one of them is gone, or has not sent in that time (None: torch's own limit).
        """
        if timeout_s is None:
            self._work.wait()
        else:
            self._work.wait(timedelta(seconds=timeout_s))
        rows: list[list[float]] = self._board.table.tolist()
        self._arrived(self._board)
        return rows


class Ranks:
    """This process's place among the processes of the run, from RANK and WORLD_SIZE as launchers set them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises SessionError when RANK or WORLD_SIZE are no numbers."""
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
        """Of the last gathering, once that has arrived."""

    @property
    def first(self) -> bool:
        """Whether this process commits checkpoints and talks to the agent."""
        return self.rank == 0

    def agree(self, *values: int) -> list[int]:
        """The highest of each value over all ranks. Every rank must call this the same number of times."""
        if self.size == 1:
            return list(values)
        votes = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._ready_group())
        agreed: list[int] = votes.tolist()
        return agreed

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]] | None:
        """The values of all ranks in rank order, on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        group = self._ready_group()
        gathered: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, gathered, dst=0, group=group)
        return gathered

    def begin_gathering(self, values: Sequence[float]) -> Underway:
        """Send these numbers to all ranks, as many from each. Waits for nobody; every rank must call this as often."""
        group = self._ready_group()
        board, self._board = self._board, None
        if board is None or board.width != len(values):
            board = _Board(self.size, len(values))
        board.values[:] = values
        # Not dist.all_gather: what that does besides takes twice as long as all the rest.
        return Underway(group.allgather([board.rows], [board.mine]), board, self._keep)

    def _keep(self, board: _Board) -> None:
        self._board = board

    def share(self, value: Any) -> Any:
        """The first rank's value (plain JSON), on all of them."""
        if self.size == 1:
            return value
        boxed = [value]
        dist.broadcast_object_list(boxed, src=0, group=self._ready_group())
        return boxed[0]

    def _ready_group(self) -> Any:
        if self._group is None:
            if not (dist.is_available() and dist.is_initialized()):
                raise SessionError(
                    f"this is one of {self.size} processes, but torch.distributed is not initialised",
                    "Create the Accelerator (or call torch.distributed.init_process_group) before the first step",
                )
            # A group on the CPU: agreeing must not wait for the GPU's queue, as it would with NCCL.
            self._group = dist.new_group(backend="gloo")
        return self._group

    def close(self) -> None:
        """Forget the group; torch ends it with the process."""
        self._group = None
