"""Connect Lightning's Trainer: progress, directives, checkpoints, exact resume (optional extra `lightning`).

::

    session = Session.start()
    callback = LightningCallback(session, every=500)
    trainer = Trainer(callbacks=[callback], enable_checkpointing=False, ...)
    trainer.fit(model, ckpt_path=callback.resume_from)
    if session.finishing or not session.should_stop:
        ...  # write the outputs

A checkpoint is the file of `trainer.save_checkpoint` (model, optimizers, schedulers, loops, callbacks), with the random
states of all ranks and the counters of rules. Between two batches of an epoch, a training resumes exactly only with a
loader that has a state: `ResumableLoader` or a ring's loader (both with `limit_train_batches=`), or torchdata's. In
rules, `loss` is the raw loss of `training_step`, logged metrics have their names, and a validation's `val_loss` is
`eval.loss`. Rules and commands can stop, save, validate and change the learning rate. A step is an optimizer step.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
import signal
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from gpu_client.controller.learning_rate import LearningRate
from gpu_client.training.checkpoint import checkpoint_directory
from gpu_client.training.checkpoint.state_files import is_same_state
from gpu_client.training.resumable_loader import ResumableLoader
from gpu_client.training.session.data_sources import has_source
from gpu_client.training.session.session import Session

log = logging.getLogger("baton.training")

FILE = "lightning.ckpt"
"""File in a checkpoint's directory."""
_EVALUATED = re.compile(r"(?:val|valid|validation|eval)[_/.-]")


class LightningCallback(Callback):  # type: ignore[misc]  # lightning is not followed
    """Callback that connects a Trainer to the session. Use one callback per Trainer, on every rank."""

    state_key = "BatonCallback"
    """Key of this callback's state in Lightning's checkpoints.

    Lightning's default is the class's name, under which a renamed class would miss the state of earlier checkpoints."""

    def __init__(self, session: Session, *, every: int | None = None) -> None:
        """every: interval of checkpoints in steps; None: only checkpoints on request and before a stop."""
        self._session = session
        self._every = every
        self._step = 0
        self._total: int | None = None
        self._losses: list[Any] = []
        """Losses of the batches since the last step."""
        self._new: dict[str, object] = {}
        """Metrics logged by the batches since the last step."""
        self._validated = 0
        """Number of finished batches of the present validation."""
        self._shown: dict[str, object] = {}
        self._seen: dict[str, Any] = {}
        self._saving: dict[str, Any] | None = None
        self._loaded: dict[str, Any] = {}
        self._handler: Any = None
        self._due = False
        self._sources: dict[str, Any] = {}
        """Loaders with a data source, by name."""
        self._asked: tuple[Any, Any] | None = None
        """The Trainer's validation interval, which a requested validation replaces for a while."""

    @property
    def resume_from(self) -> str | None:
        """Return the verified file for `trainer.fit(ckpt_path=...)`; None for a fresh start.

        Raises CheckpointDamagedError if the checkpoint is incomplete or altered.
        """
        directory = self._session.resume_from
        if directory is None:
            return None
        checkpoint_directory.verify(directory)
        return str(directory / FILE)

    # The session's part of Lightning's checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return random states and counters of rules; {} in a checkpoint without the session."""
        return self._saving or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the training begins, because objects created earlier draw random numbers."""
        self._loaded = state_dict

    # Hooks of the training

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the random states before a new pass over the data draws its order."""
        self._handler = signal.getsignal(signal.SIGTERM)
        self._restore_random()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Declare the loop's capabilities, restore the loaders and the counters of rules."""
        steering = self._session.steering
        if trainer.optimizers:
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            steering.offer(knobs={"lr": LearningRate(_Groups(trainer.optimizers), *schedulers)})
        steering.offer(evaluate=bool(trainer.enable_validation))
        self._step, total = trainer.global_step, trainer.estimated_stepping_batches
        self._total = int(total) if math.isfinite(total) else None
        loaders = _flat(trainer.train_dataloader)
        if self._loaded and all(map(_has_state, loaders)):
            # Loaders with a state draw no random numbers; the restore undoes the script's own draws.
            self._restore_random()
        for loader, state in zip(_endless(loaders), self._loaded.get("endless", ()), strict=False):
            # Lightning has already restored the loader of an unfinished epoch.
            if not is_same_state(loader.state_dict(), state):
                loader.load_state_dict(state)
        self._sources = {str(number): loader for number, loader in enumerate(loaders) if has_source(loader)}
        if self._sources and math.isinf(trainer.num_training_batches):
            log.warning("Lightning prefetches a batch: for an exact resume, set limit_train_batches of the Trainer")
        self._session.sources.follow(self._sources)
        if self._step and self._loaded.get("steering"):
            steering.load_state_dict(self._loaded["steering"])
        self._loaded = {}
        steering.resume(self._step, _endless(loaders), timed=True)
        if callable(self._handler) and threading.current_thread() is threading.main_thread():
            # Lightning's handler would end the training at once, without the session's checkpoint.
            signal.signal(signal.SIGTERM, self._handler)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring the wait for the first batch."""
        self._session.steering.signals.wait_started()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """End the measured wait, and restore the validation interval after a requested validation."""
        self._session.steering.signals.wait_ended()
        self._restore_pace(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the step that this batch ends, if any, and pass requests on to Lightning."""
        self._batch_done(trainer, pl_module, outputs, batch_idx)
        self._session.steering.signals.wait_started()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the requests that waited for the end of the epoch."""
        self._apply_requests(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the count of validation batches."""
        self._validated = 0

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Report the progress of a validation, so that presets do not report a stuck training."""
        if trainer.sanity_checking or not self._step:
            return
        self._validated += 1
        total = sum(trainer.num_val_batches)
        self._session.phase("evaluation", self._validated, int(total) if math.isfinite(total) else 0)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a validation; in rules, `val_loss` is `eval.loss`."""
        found = self._logged(trainer)
        if trainer.sanity_checking or not self._step:
            return
        self._restore_pace(trainer)
        self._shown |= found
        self._report({}, event="none")  # The step was already reported.
        evaluated = {_EVALUATED.sub("", name, count=1): value for name, value in found.items()}
        self._session.steering.evaluated(self._step, evaluated)
        if self._session.alone:  # Several ranks agree once per step.
            self._due = self._session.checkpoint_due(self._step) or self._due
        if not trainer.is_last_batch:
            self._apply_requests(trainer)
        self._session.steering.signals.wait_started()

    # Internals

    def _batch_done(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            # Lightning has divided the loss for gradient accumulation.
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._losses.append(loss.detach() * parts if parts > 1 else loss.detach())
        self._new |= self._logged(trainer)
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        new, self._new = self._new, {}
        if self._losses:
            new["loss"] = self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).mean()
            self._losses = []
        batches = trainer.num_training_batches
        if batches and math.isfinite(batches):
            new["epoch"] = trainer.current_epoch + (batch_idx + 1) / batches
        self._report(new)
        self._due = self._session.checkpoint_due(self._step, self._every)
        if self._session.should_stop and not self._session.finishing:
            trainer.limit_val_batches = 0  # The machine is needed: no validation before the stop.
        # Lightning's loops cannot resume between the last batch and the end of an epoch, and would not repeat a due
        # validation.
        if not (trainer.is_last_batch or _validates_next(trainer)):
            self._apply_requests(trainer)

    def _report(self, new: Mapping[str, object], event: str = "") -> None:
        self._shown |= new
        shown = {name: value for name, value in self._shown.items() if name not in ("step", "total")}
        # With an unknown end, at least one more step follows.
        total = self._step + 1 if self._total is None else self._total
        self._session.report_new(self._step, total, new, shown=shown, event=event)

    def _logged(self, trainer: Trainer) -> dict[str, object]:
        """Return the metrics logged since the last call; Lightning also keeps older metrics."""
        found: dict[str, object] = {}
        for name, value in trainer.callback_metrics.items():
            before = self._seen.get(name)
            # Each log call makes a new tensor; each read returns another view of the newest tensor.
            if before is None or before.data_ptr() != value.data_ptr():
                self._seen[name] = found[name] = value
        return {name: value for name, value in found.items() if name not in ("step", "total", "epoch")}

    def _apply_requests(self, trainer: Trainer) -> None:
        """Apply the pending requests at a point where Lightning can resume."""
        if self._due:
            self._due = False
            self._save(trainer)
        if self._session.steering.evaluation_due and self._asked is None:
            self._asked = trainer.val_check_batch, trainer.check_val_every_n_epoch
            trainer.val_check_batch, trainer.check_val_every_n_epoch = 1, 1
        if self._session.should_stop:
            # The stop also overrides the minimum lengths.
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
            trainer.should_stop = True

    def _restore_pace(self, trainer: Trainer) -> None:
        if self._asked is not None:
            trainer.val_check_batch, trainer.check_val_every_n_epoch = self._asked
            self._asked = None

    def _save(self, trainer: Trainer) -> None:
        session, step = self._session, self._step
        staged = checkpoint_directory.staging_path(session.output_dir, step)
        if trainer.is_global_zero:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir()
        trainer.strategy.barrier("baton")
        steering = session.steering
        # After an epoch Lightning starts at the first batch, while an endless order continues.
        endless = [loader.state_dict() for loader in _endless(_flat(trainer.train_dataloader))]
        self._saving = {"random": session.gather_randoms(), "endless": endless}
        if steering.has_state:
            self._saving["steering"] = steering.state_dict()
        try:
            trainer.save_checkpoint(staged / FILE, weights_only=False)
        finally:
            self._saving = None
        session.mark_complete(step, self._shown, staged=staged)
        session.sources.checkpoint_saved(self._sources)

    def _restore_random(self) -> None:
        randoms = self._loaded.get("random")
        if randoms:
            self._session.restore_randoms(randoms)


class _Groups:
    """Parameter groups of all optimizers, for one knob."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[Any]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


def _validates_next(trainer: Trainer) -> bool:
    """Return True if a validation follows this batch."""
    loop = trainer.fit_loop
    should_validate = getattr(loop.epoch_loop, "_should_check_val_fx", None)
    return callable(should_validate) and bool(should_validate(getattr(loop, "_data_fetcher", None)))


def _flat(loaders: Any) -> list[Any]:
    """List all loaders in Lightning's order."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    return [one for part in loaders for one in _flat(part)] if isinstance(loaders, list | tuple) else [loaders]


def _endless(loaders: Iterable[Any]) -> list[Any]:
    return [one for one in loaders if isinstance(one, ResumableLoader) or has_source(one)]


def _has_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
