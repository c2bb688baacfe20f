"""The demo of rules: its documents, what it makes of a job's history, its numbers and its picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from baton.contract.goodput import Goodput
from baton.contract.history import AttemptView, EventType, EventView
from baton.contract.jobs import JobState, Progress
from baton.contract.output import LogLine
from baton.contract.rules.document import load
from demo.rules import pictures, story
from demo.rules.account import Account, Firing, Trained, steps_of
from demo.rules.summary import DEFINITIONS, Diverged, Live, Result, Spiked, final_loss
from tests.unit.cli.cli_kit import a_job

BACK = {"number": 1, "rule": "spike", "step": 16, "to_step": 15, "skip": 4, "lr_factor": 0.5}


def event(kind: EventType, **data: Any) -> EventView:
    return EventView(seq=1, type=kind, at=1, epoch=1, data=data, event_type=kind, timestamp=1)


def fired(rule: str, step: int, **operands: Any) -> EventView:
    return event(EventType.RULE_FIRED, rule=rule, step=step, operands=operands)


def account(steps: list[Trained], *events: EventView, state: JobState = JobState.COMPLETE) -> Account:
    goodput = Goodput(productive_s=len(steps) / 10)
    attempt = AttemptView(epoch=1, started_at=1, progress=Progress(step=len(steps), goodput=goodput))
    return Account(a_job(state), [attempt], list(events), steps, [])


def steps(
    first: int, last: int, *, epoch: int = 1, skip: int = 0, factor: float = 1.0, loss: float = 0.5
) -> list[Trained]:
    return [Trained(epoch, step, loss, 1.0 / step * factor, step + skip) for step in range(first, last + 1)]


def result() -> Result:
    diverged = account(steps(1, 10, loss=9.0), fired("diverging", 10, **{"loss": 9.0, "mean(loss, 10)": 9.0}))
    spike = account(
        steps(1, 16) + steps(16, 30, epoch=2, skip=4, factor=0.5),
        fired("spike", 16, **{"zscore(loss, 50)": 99.0}), event(EventType.ROLLED_BACK, **BACK),
    )  # fmt: skip
    live = account(steps(1, 20), fired("good-enough", 20, **{"min(eval.accuracy, 3)": 0.98}))
    return Result(
        Diverged(diverged, 30, "mean(loss, 10) > 5"),
        Spiked(spike, account(steps(1, 30, loss=2.3)), 0.98, 0.1, 30, "zscore(loss, 50) > 8"),
        Live(live, 5, 2, 9, 20, 0.975, 3000, "min(eval.accuracy, 3) >= 0.97"),
        {"total": 60.0},
    )


@pytest.mark.parametrize("path", sorted(story.HERE.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_documents_of_the_demo_are_sound(path: Path) -> None:
    loaded = load(path.read_text(encoding="utf-8"))
    assert loaded.rules is not None and not loaded.faults and not loaded.warnings


def test_the_next_revision_keeps_what_the_training_began_with() -> None:
    began, later = (load(story.rules(name)).rules for name in ("watching", "enough"))
    assert began is not None and later is not None
    assert began.rules[0] == later.rules[0]


def test_the_steps_are_read_from_what_the_training_printed() -> None:
    texts = [
        "loading",
        '{"step": 1, "loss": 2.5, "lr": 0.1, "batch": 7}',
        '{"step": 2, "loss": NaN, "lr": 0.1, "batch": 8}',
    ]
    first, second = steps_of(LogLine(epoch=3, line=n, text=text, at=1) for n, text in enumerate(texts))
    assert first == Trained(3, 1, 2.5, 0.1, 7)
    assert second.loss != second.loss and second.batch == 8


@pytest.mark.parametrize(
    ("operands", "because"),
    [
        ({"loss": 3.2, "mean(loss, 10)": 756.2}, "mean(loss, 10) = 756"),
        ({"loss": "nan", "mean(loss, 10)": None}, "loss = nan, mean(loss, 10) = None"),
    ],
)
def test_a_firing_says_why(operands: dict[str, Any], because: str) -> None:
    assert Firing("x", 1, operands).because == because


def test_the_numbers() -> None:
    summary = result().as_dict()
    assert summary["diverging"]["steps_saved"] == 20
    assert summary["diverging"]["steps_saved_share"] == 0.6667
    assert summary["diverging"]["machine_time_saved_s"] == 2.0, "at 0.1 s a step"
    assert summary["spiking"]["steps_repeated"] == 1 and summary["spiking"]["steps_trained"] == 31
    assert summary["spiking_without_rules"]["final_loss"] == 2.3
    assert summary["live"]["history"] == ["step 20: rule good-enough fired: min(eval.accuracy, 3) = 0.98"]
    assert json.loads(json.dumps(summary)) == summary
    numbers = {name for part in summary.values() if isinstance(part, dict) for name in part}
    assert DEFINITIONS.keys() <= numbers


def test_the_plain_words_carry_the_numbers() -> None:
    words = " ".join(result().in_plain_words())
    for fact in (
        "rule diverging fired at step 10 (mean(loss, 10) = 9)", "20 of 30 steps (67 % of the machine's time, here 2 s)",
        "checkpoint of step 15, passed over 4 batches", "0.5 times", "98.0 %", "10.0 %, loss 2.3",
        "save was carried out after step 5, revision 2 of the rules was in force from step 9", "at step 20 of 3000",
    ):  # fmt: skip
        assert fact in words


@pytest.mark.parametrize(
    ("after", "wrong"),
    [
        (steps(16, 30, epoch=2, skip=4, factor=0.5), ""),
        (steps(17, 30, epoch=2, skip=4, factor=0.5), "attempt 2 went on at step 17, after a rollback to 15"),
        (steps(16, 30, epoch=2, skip=3, factor=0.5), "attempt 2 passed over 3 batches, not 4"),
        (steps(16, 30, epoch=2, skip=4), "attempt 2 went on with learning rate 0.0625, not with 0.03125"),
    ],
)
def test_a_rollback_that_did_not_do_what_it_says_is_found(after: list[Trained], wrong: str) -> None:
    spiked = result().spiked
    told = account(steps(1, 16) + after, *spiked.account.events)
    assert replace(spiked, account=told).wrong() == wrong


def test_the_final_loss_is_of_the_last_steps_alone() -> None:
    assert final_loss(account(steps(1, 30, loss=100.0) + steps(31, 50, loss=2.0))) == 2.0


def test_the_picture_names_every_event_on_its_curve(tmp_path: Path) -> None:
    figure = pictures.figure_of(result())
    stopped, rolled_back, steered = ([text.get_text() for text in axes.texts] for axes in figure.axes)
    assert any("rule diverging fired at step 10: mean(loss, 10) = 9" in text for text in stopped)
    assert any("20 steps, 67 % of the job" in text for text in stopped)
    assert any("rule spike fired at step 16\nzscore(loss, 50) = 99" in text for text in rolled_back)
    assert any("checkpoint of step 15:\n4 batches skipped, learning rate × 0.5" in text for text in rolled_back)
    for said in ("carried out at step 5", "in force from step 9", "rule good-enough fired at step 20"):
        assert any(said in text for text in steered)
    figure.savefig(tmp_path / "rules.png")
    with Image.open(tmp_path / "rules.png") as image:
        assert image.size == (1600, 2080)


def test_a_loss_that_is_no_number_can_be_drawn(tmp_path: Path) -> None:
    whole = result()
    burst = account([*steps(1, 9), Trained(1, 10, float("nan"), 0.1, 10)], fired("diverging", 10, loss="nan"))
    pictures.figure_of(replace(whole, diverged=replace(whole.diverged, account=burst))).savefig(tmp_path / "rules.png")
    assert (tmp_path / "rules.png").stat().st_size > 10_000
    summary = replace(whole, diverged=replace(whole.diverged, account=burst)).as_dict()
    assert summary["diverging"]["final_loss"] == "nan"
