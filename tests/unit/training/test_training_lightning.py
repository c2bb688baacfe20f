"""Lightning's Trainer with a session: a run killed after any step ends like an uninterrupted one, and rules act."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from baton import BatchSampler, ResumableLoader, Session
from gpu_client.controller.measurements import Measurements
from gpu_client.controller.rollback import RollbackTracker
from gpu_client.controller.steering import Steering
from gpu_client.training.checkpoint.checkpoint_directory import read_marker, verify
from gpu_client.training.session import session as session_module
from tests.unit.controller.controller_kit import Clock

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings(
    # Lightning's advice on workers, logging and modules, and its own use of pytree.
    "ignore::lightning.fabric.utilities.rank_zero.LightningDeprecationWarning",
    "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning",
    "ignore:.*isinstance.treespec, LeafSpec.*",
    "ignore:.*val_dataloader.*",
)
from gpu_client.training.integrations.lightning_callback import FILE, LightningCallback  # noqa: E402 - only where Lightning is

BATCHES, EPOCHS = 4, 3
STEPS = BATCHES * EPOCHS


class KilledError(Exception):
    """The process is gone."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    before = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    yield
    for one, level in zip(loggers, before, strict=True):
        one.setLevel(level)


class Module(lightning.LightningModule):  # type: ignore[misc]
    """Dropout, momentum and a schedule: the result depends on all of what a checkpoint holds."""

    def __init__(self, losses: list[float] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.losses = losses
        self.validations: list[int] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        if self.losses is not None:
            loss = loss * 0 + self.losses[self.global_step]
        if index % 2:
            self.log("train/odd", loss * 2)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        if not self.trainer.sanity_checking and index == 0:
            self.validations.append(self.global_step)
        self.log("val_loss", self.net(batch).square().mean() + self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Look(lightning.Callback):  # type: ignore[misc]
    """Callback that records the state after each step, and dies or sends a signal after one step."""

    def __init__(self, folder: Path, kill_at: int | None, signal_at: int | None) -> None:
        self.folder, self.kill_at, self.signal_at = folder, kill_at, signal_at
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if trainer.global_step + 1 == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.die(trainer)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.die(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.die(trainer)

    def die(self, trainer: Any) -> None:
        if trainer.global_step == self.kill_at and (self.folder / f"checkpoint-{self.kill_at}").is_dir():
            raise KilledError


class Trained:
    """A process of a training."""

    options: dict[str, Any]

    def __init__(
        self,
        folder: Path,
        *,
        rules: str | None = None,
        losses: list[float] | None = None,
        every: int | None = 1,
        kill_at: int | None = None,
        signal_at: int | None = None,
        plain: bool = False,
        samples: Callable[[Any], Any] = list,
        **options: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        file = None
        if rules is not None:
            file = folder / "rules.yaml"
            file.write_text(rules)
        self.decisions: list[tuple[str, str, int]] = []
        self.reported: list[tuple[int, dict[str, object]]] = []
        self.phases: list[tuple[str, int, int]] = []
        with Session.start(output_dir=folder / "output", rules=file, resume=True, variables={}) as session:
            self._listen(session)
            callback = LightningCallback(session, every=every)
            self.look = Look(folder / "output", kill_at, signal_at)
            self.module = Module(losses)
            data = torch.linspace(-1, 1, 96).reshape(24, 4)
            train: Any = ResumableLoader(samples(data), BatchSampler(24, 3, seed=1))
            if plain:
                train = DataLoader(samples(data[:12]), batch_size=3, shuffle=True)  # type: ignore[arg-type]
            self.trainer = lightning.Trainer(
                **{"max_epochs": EPOCHS, "limit_train_batches": BATCHES, "num_sanity_val_steps": 1, **options},
                accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, callbacks=[callback, self.look], default_root_dir=folder,
            )  # fmt: skip
            resume_from = callback.resume_from
            try:
                self.trainer.fit(self.module, train, DataLoader(samples(data[:4]), batch_size=2), ckpt_path=resume_from)  # type: ignore[arg-type]
            except KilledError:
                session.steering._closed = True
            self.finishing, self.stopped = session.finishing, session.should_stop
        self.step, self.drawn = self.trainer.global_step, torch.rand(2).tolist()

    def _listen(self, session: Session) -> None:
        tell, report = session.steering._reporter.report_decision, session.report_new

        def told(decision: dict[str, Any]) -> None:
            self.decisions.append((decision["type"], decision.get("rule", ""), decision["step"]))
            tell(decision)

        def reported(step: int, total: int, new: Any, *, shown: Any, event: str = "") -> None:
            self.reported.append((step, {name: round(float(value), 4) for name, value in new.items()}))
            report(step, total, new, shown=shown, event=event)

        phase = session.phase

        def phased(name: str, done: int, total: int) -> None:
            self.phases.append((name, done, total))
            phase(name, done, total)

        session.phase = phased  # type: ignore[method-assign]
        session.steering._reporter.report_decision = session.steering.engine._on_decision = told  # type: ignore[method-assign]
        session.report_new = reported  # type: ignore[method-assign]

    def fired(self) -> list[tuple[str, int]]:
        return [(rule, step) for kind, rule, step in self.decisions if kind == "rule.fired"]

    def state(self) -> Any:
        weights = {name: value.tolist() for name, value in self.module.state_dict().items()}
        optimizer = self.trainer.optimizers[0].state_dict()
        moments = [part["exp_avg_sq"].tolist() for part in optimizer["state"].values()]
        return weights, moments, self.trainer.lr_scheduler_configs[0].scheduler.state_dict(), self.drawn


WAYS: dict[str, dict[str, Any]] = {
    "epochs": {},
    "often": {"val_check_interval": 2},
    "steps": {"max_epochs": -1, "max_steps": STEPS, "val_check_interval": 3, "check_val_every_n_epoch": None},
    "accumulated": {"accumulate_grad_batches": 2, "max_epochs": 2 * EPOCHS},
}


@pytest.fixture(scope="module", params=WAYS)
def through(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    torch.manual_seed(0)
    trained = Trained(tmp_path_factory.mktemp("through"), **WAYS[request.param])
    trained.options = WAYS[request.param]
    assert trained.step == STEPS and len(trained.module.validations) > 2
    return trained


@pytest.mark.parametrize("killed_at", [[3], [4], [8], list(range(1, STEPS))], ids=str)
def test_killed_after_any_step_it_ends_with_the_same_bits(
    tmp_path: Path, through: Trained, killed_at: list[int]
) -> None:
    """A training killed after any step, even an epoch's last, resumes Lightning's loops and validations exactly."""
    torch.manual_seed(0)
    rates: list[float] = []
    validations: list[int] = []
    for step in killed_at:
        killed = Trained(tmp_path / "job", kill_at=step, **through.options)
        assert killed.step == step
        rates += killed.look.rates
        validations += killed.module.validations
    torch.manual_seed(99)
    end = Trained(tmp_path / "job", **through.options)
    assert end.step == STEPS
    assert rates + end.look.rates == through.look.rates
    assert end.state() == through.state()
    assert [*validations, *end.module.validations] == through.module.validations


FLAT = [1.0] * STEPS
NAN = "rules: [{name: nan, when: not isfinite(loss), do: {stop: failed}}]"


def with_loss(at: int, value: float) -> list[float]:
    return [value if step == at else 1.0 for step in range(1, STEPS + 1)]


def test_checkpoints_keep_the_key_of_the_callbacks_state() -> None:
    """Lightning derives the key from the class's name, and says nothing when a checkpoint lacks the key."""
    assert LightningCallback.state_key == "BatonCallback"


def test_what_is_logged_is_reported_once_and_with_its_step(tmp_path: Path) -> None:
    """Lightning keeps what was logged before beside what is new: patience would count it twice."""
    trained = Trained(tmp_path, losses=[float(step) for step in range(STEPS)], every=None)
    found = [(step, new) for step, new in trained.reported if "loss" in new]
    assert [(step, new["loss"]) for step, new in found] == [(step, step - 1.0) for step in range(1, STEPS + 1)]
    assert [(step, new["train/odd"]) for step, new in found if "train/odd" in new] == [
        (step, 2 * (step - 1.0)) for step in range(2, STEPS + 1, 2)
    ]
    assert [new["epoch"] for _, new in found] == [step / BATCHES for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "resumable"])
def test_how_long_lightning_waited_for_batches_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    """`data.wait` is the time in which the loop waits for its loader, and no other time."""
    clock = Clock()
    monkeypatch.setattr(session_module, "Steering", partial(Steering, clock=clock))

    class Slow(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            clock.now += 1
            return super().__getitem__(index)

    waits: list[float] = []
    step_metrics, step = Measurements.step_metrics, Module.training_step

    def looked(self: Measurements, *given: Any, **more: Any) -> dict[str, object]:
        found = step_metrics(self, *given, **more)
        waits.extend(value for name, value in found.items() if name == "data.wait" and isinstance(value, float))
        return found

    def busy(self: Module, batch: torch.Tensor, index: int) -> torch.Tensor:
        clock.now += 8
        return step(self, batch, index)

    monkeypatch.setattr(Measurements, "step_metrics", looked)
    monkeypatch.setattr(Module, "training_step", busy)
    rules = "rules: [{name: r, when: data.wait > 100 * step.time, do: stop}]"
    trained = Trained(tmp_path, rules=rules, plain=plain, samples=Slow, val_check_interval=2)
    assert trained.step == STEPS and sum(waits) <= 3 * (STEPS + EPOCHS)
    assert len(waits) == STEPS and waits.count(3.0) >= STEPS - 2 * EPOCHS


def test_a_loss_is_the_mean_of_the_batches_of_its_step(tmp_path: Path) -> None:
    """Lightning divides each by their number."""
    options = {"accumulate_grad_batches": 2, "max_epochs": 2}
    trained = Trained(tmp_path, losses=FLAT, every=None, **options)
    assert [new["loss"] for _, new in trained.reported if "loss" in new] == [1.0] * 4


@pytest.mark.parametrize("at", [1, 3, 4, 5])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_is_seen_at_its_step(tmp_path: Path, at: int, value: float) -> None:
    trained = Trained(tmp_path, rules=NAN, losses=with_loss(at, value), every=None)
    assert trained.fired() == [("nan", at)] and trained.step == at and not trained.finishing
    assert verify(tmp_path / "output" / f"checkpoint-{at}").created_by == "session"


def test_a_rule_that_ends_it_as_complete_leaves_the_script_its_outputs(tmp_path: Path) -> None:
    rules = "rules: [{name: r, when: step >= 3, do: stop}]"
    trained = Trained(tmp_path, rules=rules, every=None, min_epochs=2)
    assert trained.step == 3 and trained.finishing, "also ahead of the least that the Trainer was told"


def test_rules_hear_of_validations_by_their_own_names(tmp_path: Path) -> None:
    """val_loss is the step here."""
    rules = "rules: [{name: r, when: eval.loss > 8 and eval.loss < 10, do: {save: {tag: good}}}]"
    trained = Trained(tmp_path, rules=rules, every=None)
    assert trained.fired() == [("r", 8)] and trained.step == STEPS
    marker = read_marker(tmp_path / "output" / "checkpoint-8")
    assert 8 < marker.metrics["val_loss"] < 10, "of this very step"
    assert marker.tag == "good"


def test_a_validation_says_how_far_it_is(tmp_path: Path) -> None:
    """A long one was taken for a training that stands still: by a preset, and by no_progress_timeout_s."""
    trained = Trained(tmp_path, every=None)
    assert trained.phases == [("evaluation", 1, 2), ("evaluation", 2, 2)] * EPOCHS


def test_a_step_that_a_validation_follows_is_checked_once(tmp_path: Path) -> None:
    """A step with a validation is checked once; its learning rate counted twice, so that 3 checks passed in 2 steps."""
    rules = "rules: [{name: r, when: lr > 0, on: step, for: 7 checks, do: stop}]"
    trained = Trained(tmp_path, rules=rules, every=None, losses=FLAT, val_check_interval=1)
    assert trained.fired() == [("r", 7)]


def test_what_is_logged_between_steps_is_not_of_the_validation(tmp_path: Path) -> None:
    """Gradients of four batches are one step; a validation amid them took what they had logged."""
    options = {"accumulate_grad_batches": 4, "val_check_interval": 2, "max_epochs": 2}
    rules = "rules: [{name: r, when: eval.train.odd > 0, do: {log: hm}}]"
    trained = Trained(tmp_path, rules=rules, every=None, losses=FLAT, **options)
    assert trained.fired() == []
    assert [(step, new["train/odd"]) for step, new in trained.reported if "train/odd" in new] == [(1, 2.0), (2, 2.0)]


def test_a_validation_can_be_asked_for_at_any_step(tmp_path: Path) -> None:
    rules = """rules:
- {name: ask, when: loss > 2, do: evaluate}
- {name: seen, when: eval.loss > 1, on: evaluate, do: {log: "{eval.loss}"}, cooldown: 1 checks}
"""
    trained = Trained(tmp_path, rules=rules, losses=with_loss(6, 3.0), every=None)
    assert trained.module.validations == [4, 6, 8, 12], "and then as before"
    assert ("ask", 6) in trained.fired() and ("action.applied", "ask", 6) in trained.decisions


def test_where_nothing_validates_that_is_said(tmp_path: Path) -> None:
    rules = "rules: [{name: ask, when: loss > 2, do: evaluate}]"
    trained = Trained(tmp_path, rules=rules, losses=with_loss(6, 3.0), every=None, limit_val_batches=0)
    assert ("action.rejected", "ask", 6) in trained.decisions and trained.step == STEPS


def test_a_rule_turns_the_learning_rate_and_the_schedule_goes_on(tmp_path: Path) -> None:
    plain = Trained(tmp_path / "plain", losses=FLAT, every=None)
    rules = "rules: [{name: r, when: loss > 2, do: {set: {knob: lr, factor: 0.5}}}]"
    halved = Trained(tmp_path / "halved", rules=rules, losses=with_loss(5, 3.0), every=None)
    assert halved.look.rates[:4] == plain.look.rates[:4]
    assert halved.look.rates[4:] == pytest.approx([rate / 2 for rate in plain.look.rates[4:]])


@pytest.mark.parametrize("killed_at", [3, 4, 5])
def test_counters_outlive_an_interruption(tmp_path: Path, killed_at: int) -> None:
    rules = "rules: [{name: r, when: loss > 2, for: 6 checks, do: stop}]"
    losses = [1.0] + [3.0] * (STEPS - 1)
    assert Trained(tmp_path, rules=rules, losses=losses, kill_at=killed_at).fired() == []
    second = Trained(tmp_path, rules=rules, losses=losses)
    assert second.fired() == [("r", 7)] and second.step == 7 and second.finishing


@pytest.mark.parametrize("at", [3, 4])
def test_a_sigterm_ends_in_a_checkpoint_and_without_a_validation(tmp_path: Path, through: Trained, at: int) -> None:
    """Lightning leaves at once, with neither."""
    torch.manual_seed(0)
    handler = signal.getsignal(signal.SIGTERM)
    stopped = Trained(tmp_path / "job", every=None, signal_at=at, **through.options)
    assert stopped.step == at and stopped.stopped and not stopped.finishing
    assert at not in stopped.module.validations
    assert [path.name for path in (tmp_path / "job/output").glob("checkpoint-*")] == [f"checkpoint-{at}"]
    assert signal.getsignal(signal.SIGTERM) == handler
    end = Trained(tmp_path / "job", **through.options)
    assert end.step == STEPS


def test_old_checkpoints_go_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    Trained(tmp_path, every=2)
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == ["checkpoint-10", "checkpoint-12"]
    (tmp_path / "output" / "checkpoint-12" / FILE).write_bytes(b"x")
    with pytest.raises(Exception, match=r"lightning\.ckpt"):
        Trained(tmp_path)


def test_a_plain_loader_goes_on_exactly_behind_an_epoch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    through = Trained(tmp_path / "through", plain=True, every=BATCHES)
    torch.manual_seed(0)
    Trained(tmp_path / "job", plain=True, every=BATCHES, kill_at=BATCHES)
    torch.manual_seed(99)
    end = Trained(tmp_path / "job", plain=True, every=BATCHES)
    assert end.state() == through.state() and end.step == STEPS


def test_a_checkpoint_of_somebody_elses_callback_has_none_of_it(tmp_path: Path) -> None:
    trained = Trained(tmp_path, every=None)
    trained.trainer.save_checkpoint(tmp_path / "own.ckpt", weights_only=False)
    callbacks = torch.load(tmp_path / "own.ckpt", weights_only=True)["callbacks"]
    assert json.dumps(callbacks).count("random") == 0


def test_behind_a_rollback_batches_are_skipped_and_the_rate_is_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loader was never asked: the bad batches came again."""
    skipped: list[int] = []
    monkeypatch.setattr(ResumableLoader, "skip", lambda self, batches: skipped.append(batches))
    rules = "rules: [{name: r, when: loss > 99, do: stop}]"
    first = Trained(tmp_path, rules=rules, kill_at=4)
    begin = RollbackTracker.begin
    back = [{"number": 1, "rule": "r", "skip": 2, "lr_factor": 0.5}]
    monkeypatch.setattr(RollbackTracker, "begin", lambda self, known: begin(self, back))
    second = Trained(tmp_path, rules=rules)
    assert skipped == [2] and second.step == STEPS > first.step
    assert "step 4: action.applied r: learning rate times 0.5; 2 batches skipped" in caplog.text
