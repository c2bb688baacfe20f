"""The demo of the ring: its pictures of shapes, its plan of kills, its numbers, its claims and its chart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from demo.ring import figures
from demo.ring.generators import Turn, plan
from demo.ring.results import (
    DEFINITIONS,
    GeneratorEvent,
    Measured,
    Proof,
    RingResults,
    RingState,
    Step,
    Training,
    gaps,
    read_training,
)
from demo.ring.shapes import NAMES, SIDE, held_out, main, render
from demo.ring.train import network


def trained(steps: int, wait_s: float, *, began_at: float = 100.0) -> Training:
    """Steps of 0.1 s each; the first batch came at `began_at`."""
    at, found = began_at, []
    for number in range(steps):
        at += 0.1 + (wait_s if number else 0.0)
        found.append(Step(at, wait_s if number else 7.0, 0.1, 2.0 / (number + 1)))
    return Training(found, [Measured(began_at + 0.1, 1.6, 0.2), Measured(at, 0.4, 0.85)])


def results() -> RingResults:
    states = [
        RingState(98.0 + second, min(20 * second, 64), 20 * second, 60 * second, 0.1, 3.0 + second, 4)
        for second in range(1, 12)
    ]
    events = [
        GeneratorEvent(97.0, started=4),
        GeneratorEvent(103.0, killed=1),
        GeneratorEvent(104.0, started=1),
        GeneratorEvent(105.0, killed=4),
        GeneratorEvent(108.0, started=4),
    ]
    proof = Proof(begun=225, inserted=220, kills=5, objects=64, damaged=0, replayed=24, wrong=[])
    return RingResults(trained(10, 0.4), trained(40, 0.0), states, events, proof, 64)


def failure(measured: RingResults) -> str:
    return next((claim.failure for claim in measured.claims() if claim.failure), "")


def test_a_picture_is_made_from_its_seed_alone() -> None:
    image, label = render([3, 1, 7])
    again, same = render([3, 1, 7])
    other, _ = render([3, 1, 8])
    assert (image.shape, image.dtype, label) == ((1, SIDE, SIDE), np.float32, same)
    assert image.tobytes() == again.tobytes() != other.tobytes()


def test_what_is_measured_is_the_network_that_is_trained() -> None:
    """Normalised by batches it was another one while it was measured: the loss leapt by more than a nat, and back."""
    torch.manual_seed(1)
    model, images = network(), torch.rand(8, 1, SIDE, SIDE)
    trained = model.train()(images)
    assert torch.equal(trained, model.eval()(images))
    assert torch.allclose(trained[:1], model(images[:1]), atol=1e-5), "whatever else is in the batch"


def test_pictures_show_their_shape(tmp_path: Path) -> None:
    main(str(tmp_path / "drawn.npz"), "5", "0", "40")
    images, labels = held_out(tmp_path / "drawn.npz")
    assert set(labels.tolist()) == set(range(len(NAMES)))
    assert np.isfinite(images).all()
    contrast = [float(image.max() - image.min()) for image in images]
    assert min(contrast) > 0.2, "no shape is lost in the grain"


def test_one_after_the_other_is_killed_then_all() -> None:
    assert plan(2, (4.0, 7.0, 10.0), 1.0, (12.0, 15.0)) == [
        Turn(4.0, kill=(0,)), Turn(5.0, start=(0,)), Turn(7.0, kill=(1,)), Turn(8.0, start=(1,)),
        Turn(10.0, kill=(0,)), Turn(11.0, start=(0,)), Turn(12.0, kill=(0, 1)), Turn(15.0, start=(0, 1)),
    ]  # fmt: skip


def test_the_gaps_without_a_generator() -> None:
    assert gaps(results().events) == [(105.0, 108.0)]
    assert gaps([GeneratorEvent(1.0, started=1)]) == []


def test_what_a_training_has_written_so_far_is_read(tmp_path: Path) -> None:
    step = '{"at": 5.0, "wait_s": 1.0, "step_s": 0.5, "loss": 1.5}\n'
    measured = '{"at": 5.0, "held_out_loss": 1.6, "accuracy": 0.2}\n'
    (tmp_path / "training.jsonl").write_text(step + measured + step[:20])
    assert read_training(tmp_path / "training.jsonl") == Training([Step(5.0, 1.0, 0.5, 1.5)], [Measured(5.0, 1.6, 0.2)])


def test_waiting_is_counted_after_the_first_batch() -> None:
    assert trained(10, 0.4).wait_share == pytest.approx(9 * 0.4 / (9 * 0.4 + 10 * 0.1))
    assert trained(10, 0.0).wait_share == 0
    assert trained(1, 0.4).wait_share == 0


def test_the_numbers() -> None:
    summary = results().as_dict()
    assert summary["without_the_ring"]["wait_share"] == 0.7826
    assert summary["with_the_ring"] == {
        "steps": 40, "wait_share": 0.0, "first_batch_s": 7.0, "held_out_loss": 0.4, "accuracy": 0.85, "reuse": 3.0,
        "oldest_s": 14.0,
    }  # fmt: skip
    assert summary["ring"]["lost"] == 5
    assert json.loads(json.dumps(summary)) == summary
    numbers = {name for part in summary.values() if isinstance(part, dict) for name in part}
    assert DEFINITIONS.keys() <= numbers


def test_the_claims_carry_the_numbers() -> None:
    words = " ".join(claim.sentence for claim in results().claims())
    for fact in (
        "waited 78.3 % of its time: 10 steps, 85 %", "waited 0.0 % of its time: 40 steps", "3.0 times",
        "5 generators were killed, for 3 s none was alive", "Of 225 samples that generators had begun, 5 never",
    ):  # fmt: skip
        assert fact in words


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, ""),
        ({"begun": 226}, "6 samples were lost in 5 kills"),
        ({"inserted": 226}, "-1 samples were lost in 5 kills"),
        ({"damaged": 2}, "2 of 64 stored samples are damaged"),
        ({"wrong": ["generator-1-2-3"]}, "sample generator-1-2-3 is not reproduced by its seed"),
    ],
)
def test_lost_damaged_and_wrong_samples_are_failures(changed: dict[str, object], wrong: str) -> None:
    whole = results()
    changed_proof = replace(whole.proof, **changed)  # type: ignore[arg-type]
    assert failure(replace(whole, proof=changed_proof)) == wrong


def test_a_ring_that_does_not_help_is_a_failure() -> None:
    whole = results()
    assert "with the ring, and 78.3 % without" in failure(replace(whole, fed=trained(40, 0.1)))
    assert failure(replace(whole, fed=trained(10, 0.0))) == "the training made 10 steps with the ring, and 10 without"


def test_the_chart_shows_fill_reuse_age_and_loss(tmp_path: Path) -> None:
    figure = figures.draw(results())["ring.png"]
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[:4] == ["5 generators were killed; the training went on", "Reuse", "Age", "Loss"]
    fill, reuse, _, loss = figure.axes[:4]
    assert fill.lines[2].get_ydata()[-1] == 64  # type: ignore[index]
    assert reuse.lines[-1].get_ydata()[-1] == 3.0  # type: ignore[index]
    legend = loss.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "without the ring: 10 steps, waits 78.3 % of its time, names 85 % of the shapes",
        "with the ring: 40 steps, waits 0.0 % of its time, names 85 % of the shapes",
    ]
    figure.savefig(tmp_path / "ring.png")
    with Image.open(tmp_path / "ring.png") as image:
        assert image.size == (1600, 2240)
