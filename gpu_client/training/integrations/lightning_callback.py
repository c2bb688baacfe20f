"""Lightning's Trainer: progress, directives, checkpoints and exact resume (optional extra `lightning`).

::

    session = Session.start()
    callback = LightningCallback(session, every=500)
    trainer = Trainer(callbacks=[callback], enable_checkpointing=False, ...)
    trainer.fit(model, ckpt_path=callback.resume_from)
    if session.finishing or not session.should_stop:
        ...  # write the outputs

A checkpoint is what `trainer.save_checkpoint` writes (model, optimizers, schedulers, loops, callbacks) with the random
states of all processes and the counters of rules in it. Between two batches of an epoch a training can be continued
exactly only if its loader has a state, as `ResumableLoader` and the loader of a ring (both with `limit_train_batches=`)
and torchdata's have. Rules know the loss of `training_step` as `loss`, raw, and what is logged by its name; what a
validation logs as `val_loss` is `eval.loss`. Rules and commands can stop, save, validate and turn the learning rate. A
step is one of the optimizer.
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

from gpu_client.controller.knobs import LearningRate
from gpu_client.training.checkpoint import checkpoint_directory
from gpu_client.training.checkpoint.state_files import is_same_state
from gpu_client.training.integrations.batch_sampler import ResumableLoader
from gpu_client.training.session.data_sources import has_source
from gpu_client.training.session.session import Session

log = logging.getLogger("baton.training")

FILE = "lightning.ckpt"
"""In a checkpoint's directory."""
_EVALUATED = re.compile(r"(?:val|valid|validation|eval)[_/.-]")


class LightningCallback(Callback):  # type: ignore[misc]  # lightning is not followed
    """Connects a Trainer to the session. Use one per Trainer, on every rank."""

    def __init__(self, session: Session, *, every: int | None = None) -> None:
        """every: a checkpoint each so many steps; without it when asked to, and before stopping."""
        self._session = session
        self._every = every
        self._step = 0
        self._total: int | None = None
        self._losses: list[Any] = []
        """Of the batches since the last step."""
        self._new: dict[str, object] = {}
        """What they have logged."""
        self._validated = 0
        """Batches of the validation under way."""
        self._shown: dict[str, object] = {}
        self._seen: dict[str, Any] = {}
        self._saving: dict[str, Any] | None = None
        self._loaded: dict[str, Any] = {}
        self._handler: Any = None
        self._due = False
        self._sources: dict[str, Any] = {}
        """Loaders that are told of checkpoints."""
        self._asked: tuple[Any, Any] | None = None
        """When validations run by themselves, while one is asked for."""

    @property
    def resume_from(self) -> str | None:
        """For `trainer.fit(ckpt_path=...)`: the file of the verified checkpoint to continue from, None when fresh.

        Raises CheckpointDamagedError when the checkpoint is incomplete or altered.
        """
        directory = self._session.resume_from
        if directory is None:
            return None
        checkpoint_directory.verify(directory)
        return str(directory / FILE)

    # What Lightning's checkpoint holds of ours

    def state_dict(self) -> dict[str, Any]:
        """Random states and counters of rules; nothing in a checkpoint that is none of the session's."""
        return self._saving or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until the training begins: what is created before would draw random numbers."""
        self._loaded = state_dict

    # The course of a training

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before data is looked at: a new pass over it draws its order from the state that was saved."""
        self._handler = signal.getsignal(signal.SIGTERM)
        self._restore_random()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what rules may do, and go on with their counters."""
        steering = self._session.steering
        if trainer.optimizers:
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            steering.offer(knobs={"lr": LearningRate(_Groups(trainer.optimizers), *schedulers)})
        steering.offer(evaluate=bool(trainer.enable_validation))
        self._step, total = trainer.global_step, trainer.estimated_stepping_batches
        self._total = int(total) if math.isfinite(total) else None
        loaders = _flat(trainer.train_dataloader)
        if self._loaded and all(map(_has_state, loaders)):
            # They drew nothing of it; whatever the script drew to make them is undone.
            self._restore_random()
        for loader, state in zip(_endless(loaders), self._loaded.get("endless", ()), strict=False):
            # Lightning has given it to a loader whose epoch is under way.
            if not is_same_state(loader.state_dict(), state):
                loader.load_state_dict(state)
        self._sources = {str(number): loader for number, loader in enumerate(loaders) if has_source(loader)}
        if self._sources and math.isinf(trainer.num_training_batches):
            log.warning("Lightning takes a batch ahead: to be resumed exactly, give the Trainer limit_train_batches")
        self._session.sources.follow(self._sources)
        if self._step and self._loaded.get("steering"):
            steering.load_state_dict(self._loaded["steering"])
        self._loaded = {}
        steering.resumed(self._step, _endless(loaders), timed=True)
        if callable(self._handler) and threading.current_thread() is threading.main_thread():
            # Lightning would leave at once, without the checkpoint that the session asks for.
            signal.signal(signal.SIGTERM, self._handler)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning goes for its first batch."""
        self._session.steering.signals.awaiting()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Since whatever it did last Lightning waited for this batch; a validation that was asked for has been."""
        self._session.steering.signals.arrived()
        self._restore_pace(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the step, if this batch ends one; pass on what the session, a rule or a command wants."""
        self._batch_done(trainer, pl_module, outputs, batch_idx)
        self._session.steering.signals.awaiting()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What was put off at the last batch."""
        self._settle(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Its batches are counted."""
        self._validated = 0

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Say how far a validation is, lest it be taken for a training that stands still."""
        if trainer.sanity_checking or not self._step:
            return
        self._validated += 1
        total = sum(trainer.num_val_batches)
        self._session.phase("evaluation", self._validated, int(total) if math.isfinite(total) else 0)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A validation is done: `val_loss` is `eval.loss` in rules."""
        found = self._logged(trainer)
        if trainer.sanity_checking or not self._step:
            return
        self._restore_pace(trainer)
        self._shown |= found
        self._report({}, event="none")  # the step has been reported
        evaluated = {_EVALUATED.sub("", name, count=1): value for name, value in found.items()}
        self._session.steering.evaluated(self._step, evaluated)
        if self._session.alone:  # several agree once a step
            self._due = self._session.checkpoint_due(self._step) or self._due
        if not trainer.is_last_batch:
            self._settle(trainer)
        self._session.steering.signals.awaiting()

    # Inside

    def _batch_done(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            # Lightning has divided it, for gradients that are accumulated.
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
            trainer.limit_val_batches = 0  # the machine is wanted: no validation before it is left
        # Between the last batch and the end of its epoch Lightning's loops cannot be taken up again, and a validation
        # that is due would not be made up for.
        if not (trainer.is_last_batch or _validates_next(trainer)):
            self._settle(trainer)

    def _report(self, new: Mapping[str, object], event: str = "") -> None:
        self._shown |= new
        shown = {name: value for name, value in self._shown.items() if name not in ("step", "total")}
        # Where nobody knows the end, there is at least one more.
        total = self._step + 1 if self._total is None else self._total
        self._session.report_new(self._step, total, new, shown=shown, event=event)

    def _logged(self, trainer: Trainer) -> dict[str, object]:
        """What has been logged since the last call: Lightning keeps what is older beside it."""
        found: dict[str, object] = {}
        for name, value in trainer.callback_metrics.items():
            before = self._seen.get(name)
            # Each time it is logged there is a new tensor, and each look gives another view of the newest one.
            if before is None or before.data_ptr() != value.data_ptr():
                self._seen[name] = found[name] = value
        return {name: value for name, value in found.items() if name not in ("step", "total", "epoch")}

    def _settle(self, trainer: Trainer) -> None:
        """Do what is wanted, where it can be done."""
        if self._due:
            self._due = False
            self._save(trainer)
        if self._session.steering.evaluation_due and self._asked is None:
            self._asked = trainer.val_check_batch, trainer.check_val_every_n_epoch
            trainer.val_check_batch, trainer.check_val_every_n_epoch = 1, 1
        if self._session.should_stop:
            # Also ahead of what was meant to be the least.
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
        # Behind an epoch Lightning begins with the first batch: an endless order goes on.
        endless = [loader.state_dict() for loader in _endless(_flat(trainer.train_dataloader))]
        self._saving = {"random": session.gather_randoms(), "endless": endless}
        if steering.has_state:
            self._saving["steering"] = steering.state_dict()
        try:
            trainer.save_checkpoint(staged / FILE, weights_only=False)
        finally:
            self._saving = None
        session.mark_complete(step, self._shown, staged=staged)
        session.sources.saved(self._sources)

    def _restore_random(self) -> None:
        randoms = self._loaded.get("random")
        if randoms:
            self._session.restore_randoms(randoms)


class _Groups:
    """The parameter groups of all optimizers, to a knob that turns their rates together."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[Any]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


def _validates_next(trainer: Trainer) -> bool:
    """Whether a validation follows this batch at once."""
    loop = trainer.fit_loop
    look = getattr(loop.epoch_loop, "_should_check_val_fx", None)
    return callable(look) and bool(look(getattr(loop, "_data_fetcher", None)))


def _flat(loaders: Any) -> list[Any]:
    """All that Lightning was given, in its order."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    return [one for part in loaders for one in _flat(part)] if isinstance(loaders, list | tuple) else [loaders]


def _endless(loaders: Iterable[Any]) -> list[Any]:
    return [one for one in loaders if isinstance(one, ResumableLoader) or has_source(one)]


def _has_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
