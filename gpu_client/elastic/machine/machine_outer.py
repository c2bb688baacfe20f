"""Run one outer loop for all training processes of a machine.

Every process makes the same calls. The first process carries them out with its `ElasticOuter`; the other processes
follow its commands until the call is done, and then know the same round. Therefore all processes apply the same moves
after the same step, and a node commits a round as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import Any

import torch

from gpu_client.elastic.data.shard_plan import Shard, ShardPlan
from gpu_client.elastic.errors import ElasticSetupError, ProcessLostError
from gpu_client.elastic.machine.local_ranks import LocalRanks
from gpu_client.elastic.machine.machine_parameters import MachineParameters
from gpu_client.elastic.machine.machine_shards import MachineShards
from gpu_client.elastic.outer import ElasticOuter


class MachineCall(IntEnum):
    """Call of the training script."""

    OPEN = 0
    START = 1
    STEP = 2
    LEAVE = 3
    SHARD = 4


class MachineOuter:
    """Outer loop of one node with several processes; the interface of `ElasticOuter`.

    begin: returns the node's outer loop, in the first process. after_step: called at the end of each step, in all
    processes.
    """

    copies_state = True
    """`load_state_dict` keeps no given tensor, which may therefore map a file."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: LocalRanks,
        begin: Callable[[MachineParameters], ElasticOuter],
        after_step: Callable[[], object],
    ) -> None:
        self._ranks = ranks
        self._after_step = after_step
        self._parameters = MachineParameters(model, optimizer, ranks)
        self._leader: ElasticOuter | None = None
        self._round = self._tokens = 0
        self._is_checkpoint_due = False
        self._node = ""

        def open_leader(_: int) -> None:
            self._leader = begin(self._parameters)
            self._node = self._leader.node

        self._run(MachineCall.OPEN, open_leader)
        self._node = ranks.share_text(self._node)

    # --- the training loop -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the world, and set the model's parameters to the group's state. Raises ElasticError."""
        self._run(MachineCall.START, lambda _: self._first.start())

    def step(self, tokens: int = 1) -> None:
        """Count one finished inner step; take part in a round if a round is due. Raises ElasticError.

        tokens: of this process's own batch; the sum over all processes is the weight of the step. Of the processes that
        share a batch, all but one pass 0.
        """
        self._run(MachineCall.STEP, lambda total: self._first.step(tokens=total), tokens)
        self._after_step()

    def leave(self, timeout_s: float | None = None) -> None:
        """Contribute the progress since the newest round, leave the group, and end the round thread."""
        self._run(MachineCall.LEAVE, lambda _: self._first.leave(timeout_s))

    def shards(self, plan: ShardPlan) -> MachineShards:
        """Return the shards of the node. Raises ElasticSetupError."""
        digests = self._ranks.gather(int(plan.sha256[:15], 16))
        if any(one != digests[0] for one in digests):
            raise ElasticSetupError("the processes of this node name different data", "Name the same files in each")
        leased = self._leader.shards(plan) if self._leader is not None else None
        return MachineShards(plan, leased, self._take_shard)

    def _take_shard(self, leased: Iterator[Shard]) -> tuple[int, int] | None:
        """Return position and offset of the first process's next shard; None at the end."""
        found = [-1, 0]

        def take(_: int) -> None:
            shard = next(leased, None)
            if shard is not None:
                found[:] = shard.position, shard.offset

        self._run(MachineCall.SHARD, take)
        position, offset = self._ranks.share(found)
        return (position, offset) if position >= 0 else None

    def limit_steps(self, steps: float, rounds: int) -> None:
        """Make steps wait for due rounds, so that the remaining steps suffice for all rounds."""
        if self._leader is not None:
            self._leader.limit_steps(steps, rounds)

    def close(self) -> None:
        """End the round thread at once, without the other processes."""
        if self._leader is not None:
            self._leader.close()

    @property
    def _first(self) -> ElasticOuter:
        assert self._leader is not None
        return self._leader

    def _run(self, call: MachineCall, perform: Callable[[int], object], tokens: int = 0) -> None:
        """Perform a call in the first process, which receives the sum of all tokens, and follow it in all others."""
        rows = self._ranks.gather(call, tokens)
        if len({row[0] for row in rows}) > 1:
            names = ", ".join(f"{MachineCall(row[0]).name.lower()} in process {rank}" for rank, row in enumerate(rows))
            raise ElasticSetupError(f"the processes of this node are in different calls: {names}", "Make equal calls")
        if not self._ranks.is_first:
            self._agree(*self._parameters.follow())
            return
        try:
            perform(sum(row[1] for row in rows))
        except ProcessLostError:
            raise
        except Exception as error:
            self._parameters.fail(error)
            raise
        agreed = self._first.round, self._first.tokens, self._first.checkpoint_due
        self._parameters.finish(*agreed)
        self._agree(*agreed)

    def _agree(self, number: int, tokens: int, is_checkpoint_due: int) -> None:
        self._round, self._tokens, self._is_checkpoint_due = number, tokens, bool(is_checkpoint_due)

    # --- metrics -----------------------------------------------------------------------------------------------------

    def note_metrics(self, metrics: Mapping[str, object]) -> None:
        """Remember metrics that the first process reports."""
        if self._leader is not None:
            self._leader.note_metrics(metrics)

    def data_metrics(self) -> dict[str, float]:
        """Return the metrics of the newest round in the first process; {} in the others."""
        return {} if self._leader is None else self._leader.data_metrics()

    # --- state, equal in all processes -------------------------------------------------------------------------------

    @property
    def node(self) -> str:
        """Return the id of the node in the world."""
        return self._node

    @property
    def round(self) -> int:
        """Return the number of committed rounds at the end of the last call."""
        return self._round

    @property
    def tokens(self) -> int:
        """Return the weight of the progress since the newest delta."""
        return self._tokens

    @property
    def checkpoint_due(self) -> bool:
        """Return True at one member after each round, until this member has saved the state."""
        return self._is_checkpoint_due

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the outer state in the first process, which saves the state; {} in the others."""
        self._is_checkpoint_due = False
        return {} if self._leader is None else self._leader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; call before `start` and the first step."""
        if self._leader is not None:
            self._leader.load_state_dict(state)
        self._round, self._tokens = int(state["round"]), int(torch.as_tensor(state["tokens"]).max())
