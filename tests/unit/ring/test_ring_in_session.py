"""Test the loader as a state of a session: a killed training reads the same samples again."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton import Session
from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.format.records import GROUPS, MANIFESTS, PINS, SAMPLES
from gpu_client.ring.reading.loader import RingLoader
from gpu_client.ring.reading.mixed_loader import MixedLoader
from gpu_client.training.session.data_sources import DataSources
from tests.unit.ring.training_kit import Generator

EVERY = 4


@pytest.fixture
def generator(tmp_path: Path) -> Generator:
    made = Generator(tmp_path / "ring")
    made.put(8)
    return made


def train(
    generator: Generator,
    output: Path,
    until: int,
    *,
    resume_from: int | None = None,
    new_each_step: bool = True,
    **more: Any,
) -> Iterator[tuple[int, list[str]]]:
    """Step and samples of each; the loop as users write it."""
    variables = {"BATON_RESUME_FROM": str(output / f"checkpoint-{resume_from}")} if resume_from else {}
    with Session.start(output_dir=output, keep_last=100, resume=True, variables=variables) as session:
        loader = RingLoader(generator.place, batch_size=2, policy="latest", **more)
        weights = torch.nn.Linear(3, 1)
        state = {"weights": weights, "batches": loader}
        step = session.resume(**state)
        for _ in loader:
            step += 1
            yield step, loader.ids
            session.report(step, until)
            if session.checkpoint_due(step, every=EVERY):
                session.checkpoint(step, **state)
            if new_each_step:
                generator.put(2)
                GarbageCollector(generator.ring).collect()
            if step == until:
                return


def test_resumed_from_any_checkpoint_that_is_kept_it_reads_the_same(generator: Generator, tmp_path: Path) -> None:
    output = tmp_path / "output"
    read = dict(train(generator, output, 19))
    assert sorted(int(path.name.partition("-")[2]) for path in output.glob("checkpoint-*")) == [4, 8, 12, 16]
    generator.replace_all()
    for step in (4, 8, 12, 16):
        again = dict(train(generator, output, 19, resume_from=step, new_each_step=False))
        assert again == {number: ids for number, ids in read.items() if number > step}, step


def test_what_no_checkpoint_needs_any_more_goes(generator: Generator, tmp_path: Path) -> None:
    with Session.start(output_dir=tmp_path / "output", variables={}) as session:
        loader = RingLoader(generator.place, batch_size=2, policy="latest", group="train")
        step = session.resume(batches=loader)
        kept = []
        for _ in loader:
            step += 1
            if session.checkpoint_due(step, every=EVERY):
                session.checkpoint(step, batches=loader)
                GarbageCollector(generator.ring).collect()
                kept.append(len(generator.ring.store.keys(MANIFESTS)))
                decisions = [int(key[-10:]) for key in generator.ring.store.keys(f"{GROUPS}train/")]
                assert min(decisions) == max(step - EVERY, EVERY), "those since the checkpoint before the newest"
            generator.put(2)
            if step == 40:
                break
    # The thread that reads ahead may hold one manifest more at any moment; they do not become more and more.
    # One of each step since the checkpoint, and the newest; the thread that reads ahead may just hold another one.
    assert set(kept[1:]) <= {EVERY + 1, EVERY + 2}
    assert len(generator.ring.store.keys(SAMPLES)) < 8 + 2 * (2 * EVERY + 4)


def test_after_an_interruption_that_was_too_long_it_goes_on_with_other_samples(
    generator: Generator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "output"
    list(train(generator, output, 10))
    store = generator.ring.store
    store.delete([*store.keys(GROUPS), *store.keys(PINS)])  # as a collector does a day later
    generator.replace_all()
    with caplog.at_level(logging.WARNING, "baton.ring"):
        again = list(train(generator, output, 14, new_each_step=False))
    assert [step for step, _ in again] == [9, 10, 11, 12, 13, 14]
    newest = {slot.id for slot in generator.ring.newest().slots}
    assert all(set(ids) <= newest for _, ids in again)
    assert "reading the newest samples" in caplog.text


def test_a_rollback_passes_over_batches(generator: Generator) -> None:
    def ids(loader: RingLoader, count: int) -> list[list[str]]:
        found = []
        for _ in loader:
            found.append(loader.ids)
            if len(found) == count:
                break
        return found

    plain = ids(RingLoader(generator.place, batch_size=2, seed=3, group="plain"), 8)
    loader = RingLoader(generator.place, batch_size=2, seed=3, group="skips")
    begun = ids(loader, 2)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = RingLoader(generator.place, batch_size=2, seed=3)
    resumed.load_state_dict(state)
    resumed.skip(3)
    carried = RingLoader(generator.place, batch_size=2, seed=3, workers=1)
    carried.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
    assert begun + ids(resumed, 3) == plain[:2] + plain[5:8]
    assert ids(carried, 3) == plain[5:8], "saved before a batch was taken, and with a worker"
    assert resumed.state_dict()["batch"] == 8


def test_what_a_loader_measures(generator: Generator) -> None:
    loader = RingLoader(generator.place, batch_size=4)
    assert loader.data_metrics() == {}
    found = []
    for _ in loader:
        found.append(loader.data_metrics())
        if len(found) == 6:
            break
    assert [one["data.reuse"] for one in found] == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert all(0 <= one["data.age"] < 60 for one in found)
    assert loader.waited_s == pytest.approx(sum(one["data.wait"] for one in found))
    resumed = RingLoader(generator.place, batch_size=4)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    for _ in resumed:
        assert resumed.data_metrics()["data.reuse"] == 3.5
        break
    generator.put(6)
    for _ in loader:
        assert loader.data_metrics()["data.reuse"] in (3.5, 28 / 14), "of all that could have been read"
        break


def test_a_mixture_passes_on_what_its_sources_are_told_and_measure(generator: Generator) -> None:
    live = RingLoader(generator.place, batch_size=2, policy="latest", group="train")
    mixed = MixedLoader({"live": (live, 1.0), "still": ([torch.zeros(2)], 1.0)}, seed=1)
    states, names = [], []
    for _ in mixed:
        states.append(json.loads(json.dumps(mixed.state_dict())))
        names.append(mixed.name)
        assert bool(mixed.data_metrics()) == (mixed.name == "live")
        generator.put(2)
        if names.count("live") == 6:
            mixed.checkpointed(states[-1])
            break
    assert mixed.waited_s == live.waited_s > 0
    decisions = [int(key[-10:]) for key in generator.ring.store.keys(f"{GROUPS}train/")]
    assert min(decisions) == 6


def test_the_group_is_taken_up_with_the_state(generator: Generator) -> None:
    first = RingLoader(generator.place, batch_size=2)
    for _ in first:
        break
    second = RingLoader(generator.place, batch_size=2)
    second.load_state_dict(first.state_dict())
    for _ in second:
        break
    assert second.state_dict()["group"] == first.state_dict()["group"]
    third = RingLoader(generator.place, batch_size=2)
    for _ in third:
        break
    assert third.state_dict()["group"] != first.state_dict()["group"], "nothing of an earlier training is taken up"


def test_taken_back_further_than_is_kept_it_goes_on_with_other_samples(
    generator: Generator, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback behind the kept manifests goes on with the newest samples, and a later resume is exact again."""
    output = tmp_path / "output"
    monkeypatch.setattr("gpu_client.training.session.session.DataSources", lambda keep_last: DataSources(1))
    list(train(generator, output, 30))
    generator.replace_all()
    with caplog.at_level(logging.WARNING, "baton.ring"):
        again = list(train(generator, output, 40, resume_from=4))
    assert [step for step, _ in again] == list(range(5, 41))
    assert "reading the newest samples" in caplog.text
    resumed = list(train(generator, output, 40, resume_from=36, new_each_step=False))
    assert resumed == [(step, ids) for step, ids in again if step > 36], "from there on it is exact again"
