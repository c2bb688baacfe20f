"""Trainings by Hugging Face's Trainer with given losses, under rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from baton import Session


class Model(torch.nn.Module):
    """A model of one weight, whose loss is the batch's value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * 0 + x).sum(), "logits": x}


class Losses(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A data set in which item n is the loss of step n + 1."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def __len__(self) -> int:
        return len(self.losses)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(self.losses[index]), "labels": torch.tensor(0.0)}


class Trained:
    """A Trainer's run under rules, with the recorded decisions."""

    def __init__(
        self, tmp_path: Path, rules: str, losses: list[float], *, resume: bool = False, job: bool = False, **more: Any
    ) -> None:
        file = tmp_path / "rules.yaml"
        file.write_text(rules)
        variables: dict[str, str] = {}
        if job:
            control = tmp_path / "control.json"
            control.write_text(json.dumps({"rules": {"revision": 1, "text": rules} if rules else None}))
            variables = {"BATON_JOB_ID": "j1", "BATON_CONTROL": str(control)}
        from baton import BatonCallback

        self.decisions: list[tuple[str, str, int]] = []
        self.logged: list[dict[str, float]] = []
        self.shown: list[Any] = []
        """The displayed loss after each step."""
        self.filtered: set[bool] = set()
        """States of the Trainer's filter after steps."""
        with Session.start(output_dir=tmp_path / "output", rules=file, resume=resume, variables=variables) as session:
            tell = session.steering.engine._on_decision

            def told(decision: dict[str, Any]) -> None:
                self.decisions.append((decision["type"], decision.get("rule", ""), decision["step"]))
                tell(decision)

            session.steering.engine._on_decision = told
            callback = BatonCallback(session)
            evaluated, others = more.pop("eval_dataset", None), more.pop("callbacks", lambda _: [])(session)
            seen = self

            class Look(transformers.TrainerCallback):  # type: ignore[misc]
                def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                    seen.shown.append(session._last_report[2].get("loss"))
                    seen.filtered.add(args.logging_nan_inf_filter)
                    if state.global_step == more.get("kill_at"):
                        control.should_training_stop = True

                def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                    seen.logged.append(dict(logs))

            dataset, model, trainer_type = (
                more.pop("dataset", Losses),
                more.pop("model", None),
                more.pop("trainer", Ordered),
            )
            options = {name: value for name, value in more.items() if name != "kill_at"}
            arguments = transformers.TrainingArguments(
                str(session.output_dir), per_device_train_batch_size=1, learning_rate=0.1, max_steps=len(losses),
                report_to=[], use_cpu=True, disable_tqdm=True,
                **{"logging_steps": 1, "save_strategy": "no", "lr_scheduler_type": "linear", **options},
            )  # fmt: skip
            trainer = trainer_type(
                model or Model(),
                arguments,
                train_dataset=dataset(losses),
                eval_dataset=evaluated,
                callbacks=[callback, Look(), *others],
            )
            trainer.train(resume_from_checkpoint=callback.resume_from)
            self.step = trainer.state.global_step
            self.finishing = session.finishing
            self.arguments = trainer.args
            self.hooks = len(trainer.model._forward_hooks)

    def fired(self) -> list[tuple[str, int]]:
        return [(rule, step) for kind, rule, step in self.decisions if kind == "rule.fired"]


class Ordered(transformers.Trainer):  # type: ignore[misc]
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)
