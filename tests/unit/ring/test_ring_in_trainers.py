"""Test the loader in Trainers of Hugging Face and Lightning: exact resume, checkpoints declared safe."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton import Session, SessionError
from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.format.records import GROUPS, MANIFESTS
from gpu_client.ring.reading.loader import RingLoader
from gpu_client.ring.reading.mixed_loader import MixedLoader
from tests.unit.ring.training_kit import Generator

transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.rank_zero.LightningDeprecationWarning",
    "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning",
    "ignore:.*isinstance.treespec, LeafSpec.*",
)
from gpu_client.training.integrations import hf_callback as of_hugging_face  # noqa: E402 - only where they are
from gpu_client.training.integrations import lightning_callback as of_lightning  # noqa: E402

STEPS, EVERY = 24, 4
KINDS = ("hugging face", "lightning", "lightning in epochs")


class Kept:
    """Ids that one training process has read, by step, and the number of manifests kept at each checkpoint."""

    def __init__(self) -> None:
        self.ids: dict[int, list[str]] = {}
        self.manifests: list[int] = []
        self.metrics: dict[str, float] = {}

    def after(self, step: int, generator: Generator, loader: RingLoader, *, new: bool) -> None:
        self.ids[step] = loader.ids
        self.metrics = loader.data_metrics()
        if step % EVERY == 1 and step > 1:
            GarbageCollector(generator.ring).collect()
            self.manifests.append(len(generator.ring.store.keys(MANIFESTS)))
        if new:
            generator.put(2)


def loader_of(generator: Generator) -> RingLoader:
    return RingLoader(generator.place, batch_size=2, policy="latest", group="train", collate=of_batch)


def of_batch(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([sample["x"] for sample in samples])}


class Weight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).mean().square()}


def by_hugging_face(session: Session, generator: Generator, kept: Kept, until: int, *, new: bool, **more: Any) -> None:
    loader = loader_of(generator)

    class Ringed(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return loader

    class Look(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            kept.after(state.global_step, generator, loader, new=new)
            control.should_training_stop = state.global_step == until

    callback = of_hugging_face.BatonCallback(session)
    arguments = transformers.TrainingArguments(
        str(session.output_dir), max_steps=STEPS, save_steps=EVERY, per_device_train_batch_size=2, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_strategy="no", **{"ignore_data_skip": True, **more},
    )  # fmt: skip
    trainer = Ringed(Weight(), arguments, callbacks=[callback, Look()])
    trainer.train(resume_from_checkpoint=callback.resume_from)


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = Weight()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> Any:
        return self.net(batch["x"])["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def by_lightning(
    session: Session, generator: Generator, kept: Kept, until: int, *, new: bool, epochs: int = 1, limited: bool = True
) -> None:
    loader = loader_of(generator)

    class Look(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            kept.after(trainer.global_step, generator, loader, new=new)
            trainer.should_stop = trainer.global_step == until

    callback = of_lightning.LightningCallback(session, every=EVERY)
    trainer = lightning.Trainer(
        max_epochs=epochs, limit_train_batches=STEPS // epochs if limited else None,
        callbacks=[callback, Look()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", devices=1, default_root_dir=session.output_dir,
    )  # fmt: skip
    trainer.fit(Module(), loader, ckpt_path=callback.resume_from)


def train(kind: str, generator: Generator, output: Path, until: int = STEPS, *, new: bool = True, **more: Any) -> Kept:
    kept = Kept()
    with Session.start(output_dir=output, keep_last=100, resume=True, variables={}) as session:
        if kind == "hugging face":
            by_hugging_face(session, generator, kept, until, new=new, **more)
        else:
            by_lightning(session, generator, kept, until, new=new, epochs=3 if kind.endswith("epochs") else 1, **more)
    return kept


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    before = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    yield
    for one, level in zip(loggers, before, strict=True):
        one.setLevel(level)


@pytest.fixture
def generator(tmp_path: Path) -> Generator:
    made = Generator(tmp_path / "ring")
    made.put(8)
    return made


@pytest.mark.parametrize("killed_at", [10, 17])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_it_reads_what_it_would_have_read(
    generator: Generator, tmp_path: Path, kind: str, killed_at: int
) -> None:
    """A resumed training reads the samples since its checkpoint again, although the ring has replaced all of them."""
    output = tmp_path / "output"
    whole = train(kind, generator, output)
    assert sorted(whole.ids) == list(range(1, STEPS + 1))
    committed = killed_at // EVERY * EVERY
    for path in output.glob("checkpoint-*"):
        step = int(path.name.partition("-")[2])
        if step > committed:
            path.rename(path.with_name(f"later-{step}"))
    generator.replace_all()
    again = train(kind, generator, output, new=False)
    assert again.ids == {step: ids for step, ids in whole.ids.items() if step > committed}


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_checkpoint_needs_any_more_goes(generator: Generator, tmp_path: Path, kind: str) -> None:
    """The callbacks told the loader of no checkpoint: all that a training had read stayed for a day after its end."""
    with Session.start(output_dir=tmp_path / "output", variables={}) as session:
        kept = Kept()
        if kind == "hugging face":
            by_hugging_face(session, generator, kept, STEPS, new=True)
        else:
            by_lightning(session, generator, kept, STEPS, new=True, epochs=3 if kind.endswith("epochs") else 1)
        reported = session._last_report
    assert reported[0] == STEPS
    assert max(kept.manifests[2:]) <= 2 * EVERY + 4, kept.manifests
    decisions = [int(key[-10:]) for key in generator.ring.store.keys(f"{GROUPS}train/")]
    assert min(decisions) == STEPS - EVERY, "those since the checkpoint before the newest"
    assert kept.metrics["data.reuse"] > 0


def test_a_trainer_that_would_pass_over_batches_itself_is_refused(generator: Generator, tmp_path: Path) -> None:
    """Accelerate would have ended with an AttributeError."""
    train("hugging face", generator, tmp_path / "output", EVERY + 1)
    with pytest.raises(SessionError, match="RingLoader, which restores its own position") as told:
        train("hugging face", generator, tmp_path / "output", ignore_data_skip=False)
    assert "ignore_data_skip=True" in str(told.value)


def test_lightning_is_told_to_be_given_the_number_of_batches(
    generator: Generator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "baton.training"):
        train("lightning", generator, tmp_path / "output", 3, limited=False)
    assert "limit_train_batches" in caplog.text


class Drawn:
    """Batches that are drawn. Its state has a tensor, as that of torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(3)
        self.ids: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        while True:
            x = torch.rand(2, generator=self._generator)
            self.ids = [str(one) for one in x.tolist()]
            yield {"x": x}

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


class Mixture(MixedLoader):
    def __init__(self, generator: Generator) -> None:
        self._parts: dict[str, Any] = {"live": ring_loader_of(generator), "drawn": Drawn()}
        super().__init__({name: (part, 1) for name, part in self._parts.items()}, seed=1)

    @property
    def ids(self) -> list[str]:
        return list(self._parts[self.name].ids)


ring_loader_of = loader_of


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_whose_state_has_tensors_is_resumed_exactly(
    generator: Generator, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face's ended at its first checkpoint, since JSON has no tensors; Lightning's when it was resumed, since
    they have no truth."""
    monkeypatch.setattr(sys.modules[__name__], "loader_of", Mixture)
    output = tmp_path / "output"
    whole = train(kind, generator, output)
    for path in output.glob("checkpoint-*"):
        step = int(path.name.partition("-")[2])
        if step > 8:
            path.rename(path.with_name(f"later-{step}"))
    again = train(kind, generator, output, new=False)
    assert again.ids == {step: ids for step, ids in whole.ids.items() if step > 8}
