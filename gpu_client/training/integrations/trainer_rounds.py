"""Run the rounds of an elastic training inside the loop of Hugging Face's Trainer."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from gpu_client.training.checkpoint import state_files
from gpu_client.training.errors import CheckpointMismatchError, SessionError
from gpu_client.training.integrations.trainer_shards import ShardBatches
from gpu_client.training.session.session import Session

ELASTIC = "elastic"
"""Name of the outer state, in a checkpoint of the Trainer."""
SEAT_STRIDE = 1_000_003
"""Distance between the seeds of two nodes, because the sampler adds the epoch to the seed."""

log = logging.getLogger("baton.training")


class TrainerRounds:
    """Rounds of one training by the Trainer, which ends after `max_steps // inner_steps` rounds at all nodes.

    The Trainer's `global_step` follows the group: in round r, `global_step` is between r * inner_steps and
    (r + 1) * inner_steps. Therefore a node that has joined late, or has missed a round, reports, names its checkpoints,
    schedules its learning rate and ends as the other nodes do. The Trainer has batches for max_steps steps of a node; a
    node that has made inner_steps steps before a round waits, if the batches would not suffice otherwise.
    """

    def __init__(
        self,
        session: Session,
        args: TrainingArguments,
        state: TrainerState,
        model: nn.Module,
        optimizer: Any,
        *,
        inner_steps: int,
        **options: Any,
    ) -> None:
        if args.load_best_model_at_end:
            raise SessionError(
                "load_best_model_at_end would give each node a model of its own", "Use load_best_model_at_end=False"
            )
        self.outer = session.elastic(model, optimizer, inner_steps=inner_steps, **options)
        fragments = int(options.get("fragments", 1))
        self._inner_steps = inner_steps // fragments
        """Steps between rounds."""
        self._steps_left: float = state.max_steps - state.global_step
        """Steps of a node for which the Trainer has batches."""
        self._rounds = int(state.max_steps // inner_steps) * fragments
        if not self._rounds:
            raise SessionError(
                f"max_steps is {state.max_steps}, and a round has {inner_steps} inner steps",
                "Train for at least one round: max_steps >= inner_steps",
            )
        state.max_steps = self._rounds * self._inner_steps
        self._tokens_seen = state.num_input_tokens_seen
        self._logged_at = self._saved_step = state.global_step
        self._steps = 0
        """Steps of this process since the last logged loss."""

    def start(self, args: TrainingArguments, directory: Path | None, loader: Any) -> None:
        """Restore the outer state from the checkpoint, draw batches of this node's own, and join the world."""
        if isinstance(loader, ShardBatches):
            loader.open(args)
        if directory is not None:
            if not (directory / f"{ELASTIC}.safetensors").exists():
                raise CheckpointMismatchError(
                    f"{directory} has no state of an elastic training", "Begin anew with the model of the checkpoint"
                )
            state_files.load_states(directory, {ELASTIC: "tensors"}, {ELASTIC: self.outer})
        seat = int(self.outer.node.partition(".")[0])
        if seat and not isinstance(loader, ShardBatches):
            sampler: Any = loader.get_sampler() if hasattr(loader, "get_sampler") else None
            if hasattr(sampler, "initial_seed"):
                sampler.initial_seed += SEAT_STRIDE * seat
            else:
                log.warning("a %s decides the batches: see that its nodes draw different ones", type(sampler).__name__)
        # The Trainer repeats the data of a loader without a length.
        self.outer.limit_steps(self._steps_left if has_length(loader) else math.inf, self._rounds)
        self.outer.start()

    @property
    def is_over(self) -> bool:
        """Return True once the group has committed all rounds."""
        return self.outer.round >= self._rounds

    def step(self, args: TrainingArguments, state: TrainerState, scheduler: Any) -> None:
        """Count the optimizer step that has just been made, and move `global_step` to the group's present round."""
        # The Trainer counts tokens only if `include_num_input_tokens_seen` is set; samples are the weight otherwise.
        # The Trainer counts those of all processes of this node.
        tokens = (state.num_input_tokens_seen - self._tokens_seen) // args.world_size
        self._tokens_seen = state.num_input_tokens_seen
        self._steps += 1
        if not self.is_over:
            self.outer.step(tokens=tokens or args.train_batch_size * args.gradient_accumulation_steps)
        begin = self.outer.round * self._inner_steps
        step = max(begin, min(state.global_step + 1, begin + self._inner_steps - 1))
        if self.is_over:
            step = state.max_steps
        for _ in range(state.global_step + 1, step):
            scheduler.step()
        state.global_step = step - 1  # The Trainer adds 1 after this call.

    def correct_loss(self, state: TrainerState, logs: dict[str, Any]) -> None:
        """Make the logged loss the mean over the steps of this process; the Trainer divides by moves of global_step."""
        if "loss" in logs and self._steps:
            logs["loss"] *= (state.global_step - self._logged_at) / self._steps
            state.log_history[-1]["loss"] = logs["loss"]
            self._logged_at, self._steps = state.global_step, 0

    def leave(self) -> None:
        """Contribute the last steps, and leave the group. Idempotent."""
        self.outer.leave()

    def needs_save(self, state: TrainerState) -> bool:
        """Return True if this node saves the newest round; equal in all processes of the node."""
        return self.outer.checkpoint_due and state.global_step != self._saved_step

    def note_save(self, state: TrainerState) -> None:
        """Note the save of a step, in all processes of the node."""
        self._saved_step = state.global_step
        if not state.is_world_process_zero:
            self.outer.state_dict()  # The first process saves the state, which the others count as saved.

    def require_end(self) -> None:
        """Raise SessionError if the Trainer has run out of data before the last round."""
        if not self.is_over:
            raise SessionError(
                f"the data ended in round {self.outer.round} of {self._rounds}, because no round took the deltas of "
                "some steps",
                "Look for deltas with NaN or infinity in the log",
            )
