"""Hugging Face Trainer: progress, directives and exact resume (optional extra `hf`).

::

    session = Session.start()
    callback = BatonCallback(session)
    trainer = Trainer(model, TrainingArguments(str(session.output_dir), ...), callbacks=[callback], ...)
    trainer.train(resume_from_checkpoint=callback.resume_from)

The Trainer writes `checkpoint-<step>/` itself, with its optimizer, scheduler and random states; the callback then
marks the directory complete and tells the agent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gpu_client.training import commit
from gpu_client.training.errors import SessionError
from gpu_client.training.session import Session


class BatonCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Connects a Trainer to the session. Use one per Trainer, on every rank."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._logged: dict[str, float] = {}

    @property
    def resume_from(self) -> str | None:
        """For `trainer.train(resume_from_checkpoint=...)`: the verified checkpoint to continue from, None when fresh.

        Raises CheckpointDamagedError when the checkpoint is incomplete or altered.
        """
        directory = self._session.resume_from
        if directory is None:
            return None
        if (directory / commit.MARKER).exists() or not self._session.job_id:
            commit.verify(directory)
        return str(directory)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Refuse an output directory that nobody watches."""
        if Path(args.output_dir).absolute() != self._session.output_dir:
            raise SessionError(
                f"the Trainer writes to {args.output_dir}, the session to {self._session.output_dir}",
                "Use TrainingArguments(output_dir=str(session.output_dir))",
            )
        return control

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Report the step; pass on a wish for a checkpoint or a stop."""
        if state.is_world_process_zero:
            self._session.report(state.global_step, state.max_steps, **self._logged)
        if self._session.checkpoint_due(state.global_step):
            control.should_save = True
        if self._session.should_stop:
            control.should_training_stop = True
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> TrainerControl:
        """Report what the Trainer logs: loss, learning rate, evaluation."""
        if state.is_world_process_zero:
            self._logged |= _numbers(logs)
            self._session.report(state.global_step, state.max_steps, **self._logged)
        return control

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """The Trainer has finished writing: commit the directory."""
        logged = state.log_history[-1] if state.log_history else {}
        metrics = _numbers(logged) if logged.get("step") == state.global_step else {}
        self._session.mark_complete(state.global_step, metrics)
        return control


def _numbers(logs: dict[str, Any] | None) -> dict[str, float]:
    """What can be reported: `step` and `total` are the report's own."""
    return {
        name: value
        for name, value in (logs or {}).items()
        if isinstance(value, int | float) and name not in ("step", "total")
    }
