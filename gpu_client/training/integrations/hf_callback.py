"""Connect the Hugging Face Trainer: progress, directives and exact resume (optional extra `hf`).

::

    session = Session.start()
    callback = BatonCallback(session)
    trainer = Trainer(model, TrainingArguments(str(session.output_dir), ...), callbacks=[callback], ...)
    trainer.train(resume_from_checkpoint=callback.resume_from)

The Trainer writes `checkpoint-<step>/` itself, with its optimizer, scheduler and random states; then the callback marks
the directory as complete and reports the directory to the agent. Rules read logged and evaluated metrics; rules and
commands can stop, save, evaluate (if the Trainer has evaluation data) and change the learning rate. After
`trainer.train`, `session.finishing` is true if a rule ended the training as complete.

`BatonCallback(session, elastic={"inner_steps": 100})` trains one model on all nodes of a job (docs/elastic.md); other
keys are options of `session.elastic`. The training ends after `max_steps // inner_steps` rounds.

A loader with a data source, such as a ring's loader, resumes exactly if the Trainer's `get_train_dataloader` returns
the loader. Set `max_steps` and `ignore_data_skip=True`, because the loader restores its own position.
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

from baton.contract.checkpoints.marker import MARKER
from gpu_client.controller.learning_rate import LearningRate
from gpu_client.training.checkpoint import checkpoint_directory, state_files
from gpu_client.training.errors import SessionError
from gpu_client.training.integrations.trainer_rounds import ELASTIC, TrainerRounds
from gpu_client.training.session.data_sources import has_source
from gpu_client.training.session.session import Session

STEERING_FILE = "steering.json"
"""File with the counters of rules, in a checkpoint of the Trainer."""
LOADER = "train"
"""Name of the loader's state, in a checkpoint of the Trainer."""
EVALUATED = "eval_"
PRESET = "preset-nonfinite"
"""Preset that watches every job unless the job's rules turn the preset off."""

log = logging.getLogger("baton.training")


class BatonCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Callback that connects a Trainer to the session. Use one callback per Trainer, on every rank.

    elastic: options of `session.elastic`, at least `inner_steps`, for an elastic training.
    """

    def __init__(self, session: Session, elastic: Mapping[str, Any] | None = None) -> None:
        self._session = session
        self._elastic = elastic
        self._rounds: TrainerRounds | None = None
        self._logged: dict[str, float] = {}
        self._predicted = 0
        """Number of finished batches of the present evaluation."""
        self._loaders: dict[str, Any] = {}
        """The training's loader by name, if the loader has a data source."""
        self._losses = NonfiniteLosses()
        self._filtered = False
        """True if the session has switched off the Trainer's filter for nonfinite losses."""

    @property
    def resume_from(self) -> str | None:
        """Return the verified checkpoint for `trainer.train(resume_from_checkpoint=...)`; None for a fresh start.

        Raises CheckpointDamagedError if the checkpoint is incomplete or altered.
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
        """Check the output directory, declare the loop's capabilities, restore the counters of rules."""
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
        steering.resume(state.global_step, self._loaders.values(), timed=True)
        if self._elastic is not None:
            self._rounds = TrainerRounds(self._session, args, state, more["model"], more["optimizer"], **self._elastic)
            self._rounds.start(args, directory, more.get("train_dataloader"))
        self._losses.unwatch()
        self._watch_losses(args, more.get("model"))
        return control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Restore the script's model and arguments; leave an elastic training."""
        self._losses.unwatch()
        if self._filtered:
            args.logging_nan_inf_filter = True
            self._filtered = False
        if self._rounds is not None:
            self._rounds.leave()
            if not control.should_training_stop:
                self._rounds.require_end()
        return control

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Start measuring the wait for the first batch."""
        self._session.steering.signals.wait_started()
        return control

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """End the measured wait, because the batches of a step have arrived."""
        self._session.steering.signals.wait_ended()
        return control

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> TrainerControl:
        """Keep the model of a finished elastic training, because the Trainer makes one step before it stops."""
        if self._rounds is not None and self._rounds.is_over:
            more["model"].zero_grad()
        return control

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> TrainerControl:
        """Count an inner step of an elastic training."""
        if self._rounds is not None:
            self._rounds.step(args, state, more["lr_scheduler"])
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Leave an elastic training that stops, and save its last round."""
        if self._rounds is not None:
            if control.should_training_stop:
                self._rounds.leave()
            control.should_save = self._rounds.needs_save(state)
        return control

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> TrainerControl:
        """Report the step, with a nonfinite loss, and pass requests on to the Trainer."""
        new = {} if state.epoch is None else {"epoch": state.epoch}
        if control.should_log and self._session.alone:
            self._losses.clear()  # The Trainer logs the loss next; a loss must count once.
        elif (nonfinite := self._losses.take_nonfinite()) is not None:
            new["loss"] = nonfinite
            self._logged = self._logged | {"loss": nonfinite}
        self._session.report_new(state.global_step, state.max_steps, new, shown=self._logged, event="step")
        self._watch_losses(args, more.get("model"))
        self._apply_requests(state, control)
        self._session.steering.signals.wait_started()
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> TrainerControl:
        """Report the metrics that the Trainer logs: loss, learning rate, evaluation."""
        if self._rounds is not None and logs is not None:
            self._rounds.correct_loss(state, logs)
        numbers = _numbers(logs)
        self._logged = self._logged | numbers
        # on_evaluate reports an evaluation as an event of its own.
        new, event = ({}, "none") if any(name.startswith(EVALUATED) for name in numbers) else (numbers, "log")
        self._session.report_new(state.global_step, state.max_steps, new, shown=self._logged, event=event)
        self._apply_requests_if_alone(state, control)
        self._session.steering.signals.wait_started()
        return control

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **_: Any,
    ) -> TrainerControl:
        """Report the progress of an evaluation, so that presets do not report a stuck training."""
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
        """Report an evaluation; in rules, `eval_loss` is `eval.loss` and `eval_val_loss` is `eval.val_loss`."""
        found = {name.removeprefix(EVALUATED): value for name, value in _numbers(metrics).items()}
        self._session.steering.evaluated(state.global_step, found)
        self._apply_requests_if_alone(state, control)
        self._session.steering.signals.wait_started()
        return control

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Commit the directory that the Trainer has finished writing."""
        logged = state.log_history[-1] if state.log_history else {}
        metrics = _numbers(logged) if logged.get("step") == state.global_step else {}
        steering = self._session.steering
        directory = checkpoint_directory.checkpoint_path(self._session.output_dir, state.global_step)
        if state.is_world_process_zero and directory.is_dir():
            if steering.has_state:
                (directory / STEERING_FILE).write_text(json.dumps(steering.state_dict()), encoding="utf-8")
            states = self._loaders | ({} if self._rounds is None else {ELASTIC: self._rounds.outer})
            if states:
                state_files.save_states(directory, state_files.collect(states), [])
        if self._rounds is not None:
            self._rounds.note_save(state)
        self._session.mark_complete(state.global_step, metrics)
        self._session.sources.checkpoint_saved(self._loaders)
        steering.signals.wait_started()
        return control

    def _apply_requests(self, state: TrainerState, control: TrainerControl) -> None:
        if self._session.checkpoint_due(state.global_step):
            control.should_save = True
        if self._rounds is not None:  # One node saves after each round; requests and `save_steps` add nothing.
            control.should_save = self._rounds.needs_save(state)
        if self._session.steering.evaluation_due:
            control.should_evaluate = True
        if self._session.should_stop:
            control.should_training_stop = True

    def _apply_requests_if_alone(self, state: TrainerState, control: TrainerControl) -> None:
        """Pass requests on within the step, in a training with a single rank.

        Several ranks agree once per step instead, because a script may log on a single rank.
        """
        if self._session.alone and state.global_step:
            self._apply_requests(state, control)

    def _follow(self, args: TrainingArguments, loader: Any, directory: Path | None) -> None:
        """Restore the position of a loader with a data source from the checkpoint."""
        if not has_source(loader):
            return
        if directory is not None:
            if not args.ignore_data_skip:
                raise SessionError(
                    f"the Trainer would skip batches of a {type(loader).__name__}, which restores its own position",
                    "Use TrainingArguments(ignore_data_skip=True)",
                )
            if (directory / state_files.BUNDLE).exists():
                state_files.load_states(directory, {LOADER: "tensors"}, {LOADER: loader})
            else:
                log.warning("%s has no position of the loader: the loader starts over", directory)
        self._loaders = {LOADER: loader}
        self._session.sources.follow(self._loaders)

    def _watch_losses(self, args: TrainingArguments, model: Any) -> None:
        """Switch the Trainer's loss filter off and watch the losses, if rules or the preset read losses.

        By default the Trainer hides nonfinite losses and logs rarely. All ranks decide equally, by the job's
        environment and rules, because each rank filters its own part of the mean. The filter waits for each loss,
        therefore reading the losses once per step instead costs no more. If the script has switched the filter off,
        only rules justify the cost.
        """
        engine = self._session.steering.engine
        preset_reads = bool(self._session.job_id) and PRESET not in engine.presets_off
        read = "loss" in engine.reads
        if args.logging_nan_inf_filter and (preset_reads or read):
            args.logging_nan_inf_filter = False
            self._filtered = True
            log.info("logging_nan_inf_filter is off: rules or presets read the loss, also when it is no number")
        if model is not None and (read or (preset_reads and self._filtered)):
            self._losses.watch(model)
        else:
            self._losses.unwatch()


def _numbers(logs: dict[str, Any] | None) -> dict[str, float]:
    """Return the reportable numbers, without `step` and `total`, which belong to the report."""
    return {
        name: value
        for name, value in (logs or {}).items()
        if isinstance(value, int | float) and name not in ("step", "total")
    }


class NonfiniteLosses:
    """Recorder of one step's losses that finds nonfinite losses.

    A hook on the model receives the loss of each forward pass; a loss counts when gradients reach the loss. Losses of
    evaluations, and losses that the Trainer replaces by its own, do not count.
    """

    def __init__(self) -> None:
        self._trained: list[torch.Tensor] = []
        self._handle: Any = None

    def watch(self, model: nn.Module) -> None:
        """Watch a model from the next forward pass on. Idempotent."""
        if self._handle is None:
            self._handle = model.register_forward_hook(self)

    def unwatch(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        self._trained.clear()

    def __call__(self, model: nn.Module, inputs: object, outputs: object) -> None:
        """Record a forward pass.

        The call is a no-op in a copy, and while torch.compile traces the model, whose graph the hook would break.
        """
        if torch.compiler.is_compiling() or self._handle is None:
            return
        loss: object = None
        if isinstance(outputs, Mapping):
            loss = outputs.get("loss")
        elif isinstance(outputs, tuple | list) and outputs:
            loss = outputs[0]
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.register_hook(partial(self._record, loss.detach()))

    def _record(self, loss: torch.Tensor, gradient: torch.Tensor) -> None:
        self._trained.append(loss)

    def clear(self) -> None:
        """Drop the losses of a step without reading the losses."""
        self._trained.clear()

    def take_nonfinite(self) -> float | None:
        """Return the sum of the nonfinite losses since the last call, or None. Waits for the GPU."""
        nonfinite = [value for value in map(_value, self._trained) if not math.isfinite(value)]
        self._trained.clear()
        return sum(nonfinite) if nonfinite else None

    def __reduce__(self) -> tuple[type[NonfiniteLosses], tuple[()]]:
        """Reduce to an empty recorder, so that a copied or pickled model records nothing."""
        return NonfiniteLosses, ()


def _value(loss: torch.Tensor) -> float:
    # The mean of losses per sample is nonfinite if any loss is.
    return float(loss.mean().item())
