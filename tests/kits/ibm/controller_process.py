"""Run IBM's trainer controller by lines of JSON: `python -m tests.kits.ibm.controller_process`.

It is the package fms-hf-tuning as the index has it, on the transformers and simpleeval of this environment. Nothing
of it is replaced: what it does is read from the lines that it logs, and from the trainer's own flags.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from tuning.trainercontroller import TrainerControllerCallback

FLAGS = [field.name for field in fields(TrainerControl) if field.name.startswith("should_")]
EVENTS = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_epoch_end", "on_train_end")
Config = dict[str, Any]


class Recorder(logging.Handler):
    """Recorder of the controller's log lines: which rule acted at which event, and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.number = -1
        """Number of the current event."""
        self.taken: list[tuple[int, str, str]] = []
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.endswith(".operation"):
            action, controller, _ = record.args  # type: ignore[misc]
            self.taken.append((self.number, controller, action))  # type: ignore[arg-type]
        else:
            self.lines.append((self.number, record.getMessage()))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        loggers = [
            logging.getLogger(f"tuning.trainercontroller.operations.{name}") for name in ("operation", "logcontrol")
        ]
        for logger in loggers:
            logger.setLevel(1)
            logger.propagate = False
            logger.addHandler(self)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(self)


class Controllers:
    """Controllers of one training after another."""

    def __init__(self, scratch: str) -> None:
        self._scratch = scratch
        self._arguments = TrainingArguments(output_dir=scratch, use_cpu=True, report_to=[])

    def decide(self, config: Config, moments: list[dict[str, Any]]) -> dict[str, Any]:
        """Decide each event of a training with the trainer's own state and control objects."""
        recorder, flags, died = Recorder(), [], None
        with recorder.listening():
            try:
                for raised in self._events(config, moments, recorder):
                    flags.append(raised)
            except Exception as error:
                died = f"{type(error).__name__}: {error}"
        return {"taken": recorder.taken, "lines": recorder.lines, "flags": flags, "died": died, "at": recorder.number}

    def _events(self, config: Config, moments: list[dict[str, Any]], recorder: Recorder) -> Iterator[list[str]]:
        """List the flags that are set after each event."""
        state = TrainerState(epoch=0, max_steps=len(moments))
        callback = TrainerControllerCallback(config)
        callback.on_init_end(self._arguments, state, TrainerControl())
        handler = CallbackHandler([DefaultFlowCallback], None, None, None, None)
        handler.callbacks = [callback]
        for number, moment in enumerate(moments):
            recorder.number = number
            state.global_step, state.epoch = moment["step"], moment["epoch"]
            state.num_input_tokens_seen = moment["tokens"]
            control = TrainerControl()
            event, more = moment["event"], {}
            if event == "on_log":
                state.log_history.append(moment["entry"])
                more["logs"] = {key: value for key, value in moment["entry"].items() if key != "step"}
            elif event == "on_evaluate":
                more["metrics"] = moment["metrics"]
            if moment["final"]:
                # the last save is not the Trainer's: the package's own program does it so
                callback.on_save(self._arguments, state, control, path=self._scratch, is_final=True)
            else:
                getattr(handler, event)(self._arguments, state, control, **more)
            yield [flag for flag in FLAGS if getattr(control, flag)]
        recorder.number = len(moments)

    def train(self, config: Config) -> dict[str, Any]:
        """Run a real training under the controller; returns its events for `decide`, and the controller's actions."""
        recorder = Recorder()
        watch = Watch(recorder)
        trainer = training(self._scratch, watch)
        callback = TrainerControllerCallback(config)
        callback.on_init_end(trainer.args, trainer.state, trainer.control)
        trainer.add_callback(callback)
        with recorder.listening():
            trainer.train()
            watch.saw("on_save", trainer.state, final=True)
            callback.on_save(trainer.args, trainer.state, trainer.control, path=self._scratch, is_final=True)
        return {"moments": watch.moments, "taken": recorder.taken}


class Watch(TrainerCallback):
    """Recorder of a training's events before the controller gets them."""

    def __init__(self, recorder: Recorder) -> None:
        self.moments: list[dict[str, Any]] = []
        self._recorder = recorder
        for event in EVENTS:
            setattr(self, event, self._noted(event))

    def _noted(self, event: str) -> Any:
        def noted(args: Any, state: TrainerState, control: Any, metrics: Any = None, **_: Any) -> None:
            entry = dict(state.log_history[-1]) if event == "on_log" else None
            self.saw(event, state, metrics=metrics and dict(metrics), entry=entry)

        return noted

    def saw(self, event: str, state: TrainerState, **more: Any) -> None:
        self._recorder.number = len(self.moments)
        now = {"step": state.global_step, "epoch": state.epoch, "tokens": state.num_input_tokens_seen}
        self.moments.append({"event": event, **now, **more})


class Line(torch.nn.Module):
    """Model of two parameters."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        self._line = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self._line(x)
        return {"loss": ((found - labels) ** 2).mean(), "logits": found}


def training(scratch: str, watch: Watch) -> Trainer:
    """Make a training of 30 steps in 5 epochs whose loss rises and falls."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = [{"x": torch.tensor([at / 10]), "labels": torch.tensor([at / 5 + 1])} for at in range(12)]
    arguments = TrainingArguments(
        output_dir=scratch,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=4,
        save_only_model=True,
        num_train_epochs=5,
        per_device_train_batch_size=2,
        learning_rate=0.05,
        include_num_input_tokens_seen="all",
    )
    return Trainer(Line(), arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[watch])


def main() -> None:
    """Serve commands until the end of standard input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # it says at each event which rules it passes over
    logging.getLogger("tuning.trainercontroller.callback").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        controllers = Controllers(scratch)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            answers.write(json.dumps(getattr(controllers, name)(*arguments)) + "\n")


if __name__ == "__main__":
    main()
