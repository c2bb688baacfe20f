"""Copy a model's parameters between the processes of a machine and one flat tensor in shared memory.

The first process commands, as if it held the whole model; each process copies the parts that it holds. No process ever
holds the whole model on its GPU.
"""

from __future__ import annotations

import hashlib
import json
from enum import IntEnum

import torch

from gpu_client.elastic.errors import ElasticError, ElasticSetupError
from gpu_client.elastic.machine.local_ranks import LocalRanks, map_shared_values
from gpu_client.elastic.parameters import Stripes, TrainedParameters, find_sharded_modules, has_finite_state

SHARED_TENSORS = 3
"""Outer parameters, delta and shift."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NONE = -1
_NO_STRIPES = Stripes(0, 0, 0)
_NUMBERS = 6
"""Numbers of a message: command, places of two tensors, stripes."""


class MachineCommand(IntEnum):
    """Command of the first process. READ, WRITE and ADD name one or two of the shared tensors."""

    READ = 0
    WRITE = 1
    ADD = 2
    FORGET = 3
    FINISH = 4
    """The call of the script is done; its numbers follow."""
    FAIL = 5
    """The call has raised an error, whose text follows."""


class MachineParameters(TrainedParameters):
    """Parameters of one node, whose parts several processes hold.

    The first process calls the methods of `TrainedParameters`; meanwhile each other process is in `follow`. Raises
    ElasticSetupError, at all processes alike, if the processes hold different models or too few parts.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: LocalRanks) -> None:
        super().__init__(model.named_parameters(), ranks.rank, find_sharded_modules(model))
        self._optimizer = optimizer
        self._ranks = ranks
        described = json.dumps([one.model_dump() for one in self.describe()])
        digest = int.from_bytes(hashlib.sha256(described.encode()).digest()[:7], "big")
        rows = ranks.gather(digest, self.read_values, self.has_stripes)
        if len({row[0] for row in rows}) > 1:
            problem = "the processes of this node hold models with different parameters"
            raise ElasticSetupError(problem, "Build the same model in each process, then shard it or wrap it in DDP")
        self.read_values = sum(row[1] for row in rows)
        self.has_stripes = all(row[2] for row in rows)
        self.require_whole()
        self._shared = map_shared_values(ranks, self.values, SHARED_TENSORS)
        self._free = iter(self._shared)

    # --- first process -----------------------------------------------------------------------------------------------

    def allocate(self) -> torch.Tensor:
        """Return one of the shared tensors."""
        return next(self._free)

    def read(self, flat: torch.Tensor, stripes: Stripes | None = None) -> None:
        """Copy the parts of all processes into a shared tensor. Raises ElasticError if replicas differ."""
        self._command(MachineCommand.READ, flat, stripes=stripes)

    def write(self, flat: torch.Tensor, less: torch.Tensor | None = None, stripes: Stripes | None = None) -> None:
        """Set the parts of all processes to a shared tensor, or to the difference of two."""
        self._command(MachineCommand.WRITE, flat, less, stripes=stripes)

    def add(self, flat: torch.Tensor, stripes: Stripes | None = None) -> None:
        """Add a shared tensor to the parts of all processes."""
        self._command(MachineCommand.ADD, flat, stripes=stripes)

    def forget_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the states of all processes' optimizers if any of them is not finite."""
        self._command(MachineCommand.FORGET)

    def finish(self, *numbers: int) -> None:
        """End `follow` at the other processes, which returns the three numbers."""
        self._ranks.share([MachineCommand.FINISH, *numbers, *[_NONE] * (_NUMBERS - 1 - len(numbers))])

    def fail(self, error: BaseException) -> None:
        """End `follow` at the other processes with an error."""
        self._ranks.share([MachineCommand.FAIL, *[_NONE] * (_NUMBERS - 1)])
        self._ranks.share_text(f"{type(error).__name__}: {error}")

    def _command(self, command: MachineCommand, *tensors: torch.Tensor | None, stripes: Stripes | None = None) -> None:
        places = [self._place(one) for one in tensors]
        numbers = [*places, *[_NONE] * (2 - len(places)), *(stripes or _NO_STRIPES)]
        self._ranks.share([command, *numbers])
        self._perform(command, numbers)

    def _place(self, tensor: torch.Tensor | None) -> int:
        if tensor is None:
            return _NONE
        return next(place for place, one in enumerate(self._shared) if one.data_ptr() == tensor.data_ptr())

    # --- other processes ---------------------------------------------------------------------------------------------

    def follow(self) -> list[int]:
        """Perform the first process's commands until the end of the call, and return the numbers of `finish`.

        Raises ElasticError if the call fails in the first process.
        """
        while True:
            command, *numbers = self._ranks.share([0] * _NUMBERS)
            if command == MachineCommand.FINISH:
                return numbers[:3]
            if command == MachineCommand.FAIL:
                raise ElasticError(f"the first process of this node has failed: {self._ranks.share_text()}")
            self._perform(MachineCommand(command), numbers)

    # --- all processes -----------------------------------------------------------------------------------------------

    def _perform(self, command: MachineCommand, numbers: list[int]) -> None:
        """Perform a command on this process's parts, and wait for all other processes."""
        first, second = (self._shared[place] if place != _NONE else None for place in numbers[:2])
        found = Stripes(*numbers[2:])
        stripes = None if found == _NO_STRIPES else found
        answer = 0
        if command is MachineCommand.FORGET:
            answer = int(has_finite_state(self._optimizer))
        elif first is not None:
            if command is MachineCommand.READ:
                super().read(first, stripes)
                answer = self._sum_replicas(stripes)
            elif command is MachineCommand.WRITE:
                super().write(first, second, stripes)
            else:
                super().add(first, stripes)
        answers = {row[0] for row in self._ranks.gather(answer)}
        if command is MachineCommand.FORGET and 0 in answers:
            # The states of one optimizer are in one checkpoint, therefore all processes drop theirs.
            self._optimizer.state.clear()
        if command is MachineCommand.READ and len(answers) > 1 and self._ranks.is_first:
            raise ElasticSetupError(
                "the processes of this node hold different values of the same parameters",
                "Wrap the model in DistributedDataParallel, or shard it with fully_shard",
            )

    def _sum_replicas(self, stripes: Stripes | None) -> int:
        """Return a sum of the bits of the parameters that each process holds whole."""
        parts = (one for one in self.parts if not one.box)
        whole = [part.values for one in parts for part in ([one] if stripes is None else one.cut(stripes))]
        return sum(int(one.view(_INTEGERS[one.element_size()]).sum(dtype=torch.int64)) for one in whole) % (1 << 62)
