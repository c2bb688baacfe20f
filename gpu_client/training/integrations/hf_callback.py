"""Hugging Face Trainer: progress, directives and exact resume (optional extra `hf`).

::

    session = Session.start()
    callback = BatonCallback(session)
    trainer = Trainer(model, TrainingArguments(str(session.output_dir), ...), callbacks=[callback], ...)
    trainer.train(resume_from_checkpoint=callback.resume_from)

The Trainer writes `checkpoint-<step>/` itself, with its optimizer, scheduler and random states; the callback then
marks the directory complete and tells the agent. Rules hear what is logged and evaluated; they and commands can stop,
save, evaluate (if the Trainer has something to evaluate on) and turn the learning rate. Whether a rule ended the
training as complete says `session.finishing`, after `trainer.train`.

A loader that knows where its data come from, as that of a ring does, is resumed exactly: give it as the Trainer's
`get_train_dataloader`, with `max_steps` and `ignore_data_skip=True`, since it goes on by itself.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from baton.contract.checkpoint_marker import MARKER
from gpu_client.controller.knobs import LearningRate
from gpu_client.training.checkpoint import checkpoint_directory, state_files
from gpu_client.training.errors import SessionError
from gpu_client.training.session.data_sources import has_source
from gpu_client.training.session.session import Session

STEERING_FILE = "steering.json"
"""Counters of rules, in a checkpoint that the Trainer writes."""
LOADER = "train"
"""Under this name the states of a checkpoint that the Trainer writes have where the loader is, if it says so."""
EVALUATED = "eval_"
PRESET = "preset-nonfinite"
"""On for every job unless its rules switch it off."""

log = logging.getLogger("baton.training")


class BatonCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Connects a Trainer to the session. Use one per Trainer, on every rank."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._logged: dict[str, float] = {}
        self._predicted = 0
        """Batches of the evaluation under way."""
        self._loaders: dict[str, Any] = {}
        """That of the training, if it has a state of its own and is told of checkpoints."""
        self._losses = OddLosses()
        self._filtered = False
        """Whether the Trainer waited for each loss, until the session made it log those that are no numbers."""

    @property
    def resume_from(self) -> str | None:
        """For `trainer.train(resume_from_checkpoint=...)`: the verified checkpoint to continue from, None when fresh.

        Raises CheckpointDamagedError when the checkpoint is incomplete or altered.
        """
        directory = self._session.resume_from
        if directory is None:
            return None
        if (directory / MARKER).exists() or not self._session.job_id:
            checkpoint_directory.verify(directory)
        return str(directory)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> TrainerControl:
        """Refuse an output directory that nobody watches; say what rules may do, and go on with their counters."""
        if Path(args.output_dir).absolute() != self._session.output_dir:
            raise SessionError(
                f"the Trainer writes to {args.output_dir}, the session to {self._session.output_dir}",
                "Use TrainingArguments(output_dir=str(session.output_dir))",
            )
        steering = self._session.steering
        if more.get("optimizer") is not None:
            schedulers = [one for one in (more.get("lr_scheduler"),) if one is not None]
            steering.offer(knobs={"lr": LearningRate(more["optimizer"], *schedulers)})
        steering.offer(evaluate=bool(args.do_eval) or args.eval_strategy != "no")
        directory = self._session.resume_from if state.global_step else None
        if directory is not None and (directory / STEERING_FILE).exists():
            steering.load_state_dict(json.loads((directory / STEERING_FILE).read_text(encoding="utf-8")))
        self._follow(args, more.get("train_dataloader"), directory)
        steering.resumed(state.global_step, self._loaders.values(), timed=True)
        self._losses.leave()
        self._show_losses(args, more.get("model"))
        return control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Its model and arguments are the script's again."""
        self._losses.leave()
        if self._filtered:
            args.logging_nan_inf_filter = True
            self._filtered = False
        return control

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """The Trainer goes for its first batch."""
        self._session.steering.signals.awaiting()
        return control

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """It has the batches of a step: since whatever it did last it was waiting for them."""
        self._session.steering.signals.arrived()
        return control

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> TrainerControl:
        """Report the step, and its loss if that is no number; pass on what the session, a rule or a command wants."""
        new = {} if state.epoch is None else {"epoch": state.epoch}
        if control.should_log and self._session.alone:
            self._losses.forget()  # the Trainer tells of it next: it is to count once
        elif (odd := self._losses.of_step()) is not None:
            new["loss"] = odd
            self._logged = self._logged | {"loss": odd}
        self._session.report_new(state.global_step, state.max_steps, new, shown=self._logged, event="step")
        self._show_losses(args, more.get("model"))
        self._obey(state, control)
        self._session.steering.signals.awaiting()
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
        numbers = _numbers(logs)
        self._logged = self._logged | numbers
        # An evaluation is an event of its own: rules hear of it in on_evaluate.
        new, event = ({}, "none") if any(name.startswith(EVALUATED) for name in numbers) else (numbers, "log")
        self._session.report_new(state.global_step, state.max_steps, new, shown=self._logged, event=event)
        self._obey_alone(state, control)
        self._session.steering.signals.awaiting()
        return control

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **_: Any,
    ) -> TrainerControl:
        """Say how far an evaluation is, lest it be taken for a training that stands still."""
        total = len(eval_dataloader) if eval_dataloader is not None and has_length(eval_dataloader) else 0
        self._predicted = 1 if self._predicted >= total > 0 else self._predicted + 1
        self._session.phase("evaluation", self._predicted, total)
        return control

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **_: Any,
    ) -> TrainerControl:
        """An evaluation is done: `eval_loss` is `eval.loss` in rules, and `eval_val_loss` is `eval.val_loss`."""
        found = {name.removeprefix(EVALUATED): value for name, value in _numbers(metrics).items()}
        self._session.steering.evaluated(state.global_step, found)
        self._obey_alone(state, control)
        self._session.steering.signals.awaiting()
        return control

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """The Trainer has finished writing: commit the directory."""
        logged = state.log_history[-1] if state.log_history else {}
        metrics = _numbers(logged) if logged.get("step") == state.global_step else {}
        steering = self._session.steering
        directory = checkpoint_directory.checkpoint_path(self._session.output_dir, state.global_step)
        if state.is_world_process_zero and directory.is_dir():
            if steering.has_state:
                (directory / STEERING_FILE).write_text(json.dumps(steering.state_dict()), encoding="utf-8")
            if self._loaders:
                state_files.save_states(directory, state_files.collect(self._loaders), [])
        self._session.mark_complete(state.global_step, metrics)
        self._session.sources.saved(self._loaders)
        steering.signals.awaiting()
        return control

    def _obey(self, state: TrainerState, control: TrainerControl) -> None:
        if self._session.checkpoint_due(state.global_step):
            control.should_save = True
        if self._session.steering.evaluation_due:
            control.should_evaluate = True
        if self._session.should_stop:
            control.should_training_stop = True

    def _obey_alone(self, state: TrainerState, control: TrainerControl) -> None:
        """At once, within the same step. Several processes agree once a step: a script may log on one of them only."""
        if self._session.alone and state.global_step:
            self._obey(state, control)

    def _follow(self, args: TrainingArguments, loader: Any, directory: Path | None) -> None:
        """Go on where the loader was in that checkpoint, if it can say where it is."""
        if not has_source(loader):
            return
        if directory is not None:
            if not args.ignore_data_skip:
                raise SessionError(
                    f"the Trainer would pass over batches of a {type(loader).__name__}, which goes on by itself",
                    "Use TrainingArguments(ignore_data_skip=True)",
                )
            if (directory / state_files.BUNDLE).exists():
                state_files.load_states(directory, {LOADER: "tensors"}, {LOADER: loader})
            else:
                log.warning("%s does not say where the loader was: it begins anew", directory)
        self._loaders = {LOADER: loader}
        self._session.sources.follow(self._loaders)

    def _show_losses(self, args: TrainingArguments, model: Any) -> None:
        """By default the Trainer logs a loss that is NaN or infinite as if it had not been, and seldom.

        All ranks decide alike, by what the job's environment and its rules say: each filters what it adds to the mean.
        Its filter waits for each loss. To look at them once a step, instead of that, is no dearer; where the script has
        switched it off, only rules are worth that.
        """
        engine = self._session.steering.engine
        told = bool(self._session.job_id) and PRESET not in engine.presets_off
        read = "loss" in engine.reads
        if args.logging_nan_inf_filter and (told or read):
            args.logging_nan_inf_filter = False
            self._filtered = True
            log.info("logging_nan_inf_filter is off: rules or presets read the loss, also when it is no number")
        if model is not None and (read or (told and self._filtered)):
            self._losses.watch(model)
        else:
            self._losses.leave()


def _numbers(logs: dict[str, Any] | None) -> dict[str, float]:
    """What can be reported: `step` and `total` are the report's own."""
    return {
        name: value
        for name, value in (logs or {}).items()
        if isinstance(value, int | float) and name not in ("step", "total")
    }


class OddLosses:
    """A model's losses of one step, to find those that are NaN or infinite.

    A hook on the model sees the loss of each forward; one counts that gradients came to. Those of evaluations do not,
    nor does a loss that the Trainer replaces by one of its own.
    """

    def __init__(self) -> None:
        self._trained: list[torch.Tensor] = []
        self._handle: Any = None

    def watch(self, model: nn.Module) -> None:
        """From the next forward on, of this model alone; again for the same one costs nothing."""
        if self._handle is None:
            self._handle = model.register_forward_hook(self)

    def leave(self) -> None:
        """Take the hook away."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        self._trained.clear()

    def __call__(self, model: nn.Module, inputs: object, outputs: object) -> None:
        """The hook. Does nothing while torch.compile traces the model, whose graph it would break, nor in a copy."""
        if torch.compiler.is_compiling() or self._handle is None:
            return
        loss: object = None
        if isinstance(outputs, Mapping):
            loss = outputs.get("loss")
        elif isinstance(outputs, tuple | list) and outputs:
            loss = outputs[0]
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.register_hook(partial(self._came, loss.detach()))

    def _came(self, loss: torch.Tensor, gradient: torch.Tensor) -> None:
        self._trained.append(loss)

    def forget(self) -> None:
        """A step is over whose loss is known otherwise: nothing is read."""
        self._trained.clear()

    def of_step(self) -> float | None:
        """The sum of those that are not finite since it was asked last; None where all are. Waits for the GPU."""
        odd = [value for value in map(_value, self._trained) if not math.isfinite(value)]
        self._trained.clear()
        return sum(odd) if odd else None

    def __reduce__(self) -> tuple[type[OddLosses], tuple[()]]:
        """A copy of the model, or a file of it, has a hook that keeps nothing, for nobody asks it."""
        return OddLosses, ()


def _value(loss: torch.Tensor) -> float:
    # Of a loss for each sample the mean: it is as little a number as any of them.
    return float(loss.mean().item())
