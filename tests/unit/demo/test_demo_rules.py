"""The demo of rules: its documents, its numbers, its claims and its chart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from baton.contract.jobs.goodput import Goodput
from baton.contract.jobs.history import AttemptView, EventType, EventView
from baton.contract.jobs.job import JobState, Progress
from baton.contract.rules.document.loader import load
from demo.jobs import JobRecord, TrainedStep
from demo.rules import figures, scenario
from demo.rules.results import DEFINITIONS, Diverged, Firing, RulesResults, Spiked, Steered, final_loss
from tests.unit.cli.cli_kit import a_job

BACK = {"number": 1, "rule": "spike", "step": 16, "to_step": 15, "skip": 4, "lr_factor": 0.5}


def event(kind: EventType, **data: Any) -> EventView:
    return EventView(seq=1, type=kind, at=1, epoch=1, data=data, event_type=kind, timestamp=1)


def fired(rule: str, step: int, **operands: Any) -> EventView:
    return event(EventType.RULE_FIRED, rule=rule, step=step, operands=operands)


def record(steps: list[TrainedStep], *events: EventView, state: JobState = JobState.COMPLETE) -> JobRecord:
    goodput = Goodput(productive_s=len(steps) / 10)
    attempt = AttemptView(epoch=1, started_at=1, progress=Progress(step=len(steps), goodput=goodput))
    return JobRecord(a_job(state), [attempt], list(events), steps)


def steps(
    first: int, last: int, *, epoch: int = 1, skip: int = 0, factor: float = 1.0, loss: float = 0.5
) -> list[TrainedStep]:
    return [
        TrainedStep(epoch, step, {"loss": loss, "lr": 1.0 / step * factor, "batch": step + skip})
        for step in range(first, last + 1)
    ]


def results() -> RulesResults:
    diverged = record(steps(1, 10, loss=9.0), fired("diverging", 10, **{"loss": 9.0, "mean(loss, 10)": 9.0}))
    spike = record(
        steps(1, 16) + steps(16, 30, epoch=2, skip=4, factor=0.5),
        fired("spike", 16, **{"zscore(loss, 50)": 99.0}), event(EventType.ROLLED_BACK, **BACK),
    )  # fmt: skip
    live = record(steps(1, 20), fired("good-enough", 20, **{"min(eval.accuracy, 3)": 0.98}))
    return RulesResults(
        Diverged(diverged, 30, "mean(loss, 10) > 5"),
        Spiked(spike, record(steps(1, 30, loss=2.3)), 0.98, 0.1, 30, "zscore(loss, 50) > 8"),
        Steered(live, 5, 2, 9, 20, 0.975, 3000, "min(eval.accuracy, 3) >= 0.97"),
    )


@pytest.mark.parametrize("path", sorted(scenario.HERE.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_documents_of_the_demo_are_sound(path: Path) -> None:
    loaded = load(path.read_text(encoding="utf-8"))
    assert loaded.rules is not None and not loaded.faults and not loaded.warnings


def test_the_next_revision_keeps_what_the_training_began_with() -> None:
    began, later = (load(scenario.document(name)).rules for name in ("watching", "enough"))
    assert began is not None and later is not None
    assert began.rules[0] == later.rules[0]


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
    summary = results().as_dict()
    assert summary["diverging"]["steps_saved"] == 20
    assert summary["diverging"]["steps_saved_share"] == 0.6667
    assert summary["diverging"]["machine_time_saved_s"] == 2.0, "at 0.1 s a step"
    assert summary["spiking"]["steps_repeated"] == 1 and summary["spiking"]["steps_trained"] == 31
    assert summary["spiking_without_rules"]["final_loss"] == 2.3
    assert summary["live"]["history"] == ["step 20: rule good-enough fired: min(eval.accuracy, 3) = 0.98"]
    assert json.loads(json.dumps(summary)) == summary
    numbers = {name for part in summary.values() if isinstance(part, dict) for name in part}
    assert DEFINITIONS.keys() <= numbers


def test_the_claims_hold_and_carry_the_numbers() -> None:
    assert not any(claim.failure for claim in results().claims())
    words = " ".join(claim.sentence for claim in results().claims())
    for fact in (
        "rule diverging fired at step 10 (mean(loss, 10) = 9)", "20 of 30 steps (67 % of machine time, here 2 s)",
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
def test_a_rollback_that_did_not_do_what_it_says_is_found(after: list[TrainedStep], wrong: str) -> None:
    whole = results()
    spiked = replace(whole.spiked, record=record(steps(1, 16) + after, *whole.spiked.record.events))
    assert replace(whole, spiked=spiked).claims()[1].failure == wrong


@pytest.mark.parametrize(
    ("accuracy", "unruled", "live", "failure"),
    [
        (0.94, 0.1, 0.975, "the job that was rolled back reads 94.0 %"),
        (0.96, 0.97, 0.975, "the one without rules 97.0 %"),
        (0.98, 0.1, 0.94, "the steered job reads only 94.0 %"),
    ],
)
def test_a_model_that_reads_too_little_is_a_failure(accuracy: float, unruled: float, live: float, failure: str) -> None:
    whole = results()
    spiked = replace(whole.spiked, accuracy=accuracy, unruled_accuracy=unruled)
    changed = replace(whole, spiked=spiked, steered=replace(whole.steered, accuracy=live))
    (found,) = [claim.failure for claim in changed.claims() if claim.failure]
    assert failure in found


def test_the_final_loss_is_of_the_last_steps_alone() -> None:
    assert final_loss(record(steps(1, 30, loss=100.0) + steps(31, 50, loss=2.0))) == 2.0


def test_the_picture_names_every_event_on_its_curve(tmp_path: Path) -> None:
    figure = figures.draw(results())["rules.png"]
    stopped, rolled_back, steered = ([text.get_text() for text in axes.texts] for axes in figure.axes)
    assert any("rule diverging fired at step 10: mean(loss, 10) = 9" in text for text in stopped)
    assert any("20 steps, 67 % of the job" in text for text in stopped)
    assert any("rule spike fired at step 16\nzscore(loss, 50) = 99" in text for text in rolled_back)
    assert any("checkpoint of step 15:\n4 batches skipped, learning rate × 0.5" in text for text in rolled_back)
    for text in ("carried out at step 5", "in force from step 9", "rule good-enough fired at step 20"):
        assert any(text in note for note in steered)
    figure.savefig(tmp_path / "rules.png")
    with Image.open(tmp_path / "rules.png") as image:
        assert image.size == (1600, 2080)


def test_a_loss_that_is_no_number_can_be_drawn(tmp_path: Path) -> None:
    whole = results()
    nan = TrainedStep(1, 10, {"loss": float("nan"), "lr": 0.1})
    burst = record([*steps(1, 9), nan], fired("diverging", 10, loss="nan"))
    changed = replace(whole, diverged=replace(whole.diverged, record=burst))
    figures.draw(changed)["rules.png"].savefig(tmp_path / "rules.png")
    assert (tmp_path / "rules.png").stat().st_size > 10_000
    assert changed.as_dict()["diverging"]["final_loss"] == "nan"
