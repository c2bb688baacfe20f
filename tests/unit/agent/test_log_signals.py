"""Test the counts of texts in the output: number, start, and the report of the last line."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from baton.contract.jobs.job import FailureClass
from baton.contract.worker.control import RulesInForce
from gpu_client.agent.attempt.attempt_reporter import AttemptOutcome
from gpu_client.agent.control.channel_messages import TrainingProgress
from gpu_client.agent.process.output import LogSignals, TrainerOutput
from gpu_client.checkpoints.local.sanitizer import MAX_METRICS
from tests.unit.agent.agent_kit import make_answer
from tests.unit.agent.job_kit import Stage, Trainer, exited

ECC = "uncorrectable ECC error"


def rules(revision: int, **signals: str) -> RulesInForce:
    text = json.dumps({"rules": [], "signals": signals} if signals else {"rules": []})
    return RulesInForce(revision=revision, text=text)


def output(*in_force: RulesInForce) -> TrainerOutput:
    found = TrainerOutput()
    for one in in_force:
        found.signals.set_rules(one)
    return found


def counts(found: TrainerOutput) -> dict[str, float]:
    return found.signals.merge_with({}) or {}


def test_lines_with_the_text_are_counted_once_each_however_they_come() -> None:
    found = output(rules(1, ecc=ECC, slow="[slow]"))
    assert counts(found) == {"log.ecc": 0, "log.slow": 0}, "known from the beginning: false, not unknown"
    for piece in (b"all well\nGPU 3: uncorrect", b"able ECC error, uncorrectable ECC error\n", b"[slow] x\r\nslow\n"):
        found.feed(piece)
    assert counts(found) == {"log.ecc": 1, "log.slow": 1}
    found.feed(ECC.encode())
    assert counts(found)["log.ecc"] == 1, "the line is not complete"
    found.finish()
    assert counts(found)["log.ecc"] == 2
    assert found.last_lines()[-1] == ECC


def test_the_text_is_no_pattern() -> None:
    found = output(rules(1, any=".*", case="Error"))
    found.feed(b"an error\n.*\n")
    assert counts(found) == {"log.any": 1, "log.case": 0}


def test_the_next_process_of_the_attempt_counts_on() -> None:
    first = output(rules(1, ecc=ECC))
    first.feed(ECC.encode() + b"\n")
    second = first.successor()
    second.feed(ECC.encode() + b"\n")
    assert counts(first) == counts(second) == {"log.ecc": 2}


def test_a_new_revision_counts_from_then_on_and_keeps_what_is_unchanged() -> None:
    found = output(rules(1, ecc=ECC, nccl="NCCL timeout"))
    found.feed(b"uncorrectable ECC error\nNCCL timeout\nNCCL WARN\n")
    found.signals.set_rules(rules(2, ecc=ECC, nccl="NCCL", oom="out of memory"))
    assert counts(found) == {"log.ecc": 1, "log.nccl": 0, "log.oom": 0}
    found.feed(b"NCCL\nout of memory\n")
    assert counts(found) == {"log.ecc": 1, "log.nccl": 1, "log.oom": 1}
    found.signals.set_rules(rules(1, other="x"))
    assert set(counts(found)) == {"log.ecc", "log.nccl", "log.oom"}, "an older revision changes nothing"
    found.signals.set_rules(rules(3))
    found.feed(ECC.encode() + b"\n")
    assert found.signals.merge_with({}) is None


def test_rules_that_cannot_be_used_leave_those_before_in_force() -> None:
    found = output(rules(1, ecc=ECC))
    found.feed(ECC.encode() + b"\n")
    for number, text in enumerate(("signals: {A: x}\nrules: []", "signals: [", "rules: 3 # signals"), 2):
        found.signals.set_rules(RulesInForce(revision=number, text=text))
        assert counts(found) == {"log.ecc": 1}


def test_rules_without_signals_are_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "baton.contract.rules.document.loader", None)  # importing it fails
    found = output(rules(1))
    found.feed(b"a line\n")
    assert found.signals.merge_with({"loss": 1.0}) == {"loss": 1.0}
    assert found.signals.merge_with({}) is None and not found.signals.has_unreported


def test_without_yaml_it_is_said_that_nothing_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    found = output(rules(1, ecc=ECC))
    found.feed(ECC.encode() + b"\n")
    assert found.signals.merge_with({}) is None
    assert "signals of the rules are not counted" in caplog.text


def test_a_heartbeat_has_room_for_them_and_names_are_told_once() -> None:
    signals = LogSignals()
    signals.set_rules(rules(1, ecc=ECC))
    many = {f"m{number}": float(number) for number in range(MAX_METRICS)}
    told = signals.merge_with(many)
    assert told is not None and len(told) == MAX_METRICS and told["log.ecc"] == 0 and "m62" in told
    assert signals.merge_with({"log/ecc": 7.0, "loss": 1.0}) == {"loss": 1.0, "log.ecc": 0.0}


CONTROL: dict[str, Any] = {"rules": rules(1, ecc=ECC).model_dump(), "commands": [], "ran_s": 0}


def test_the_control_plane_hears_of_a_line_that_a_training_dies_with(stage: Stage) -> None:
    """No heartbeat would come between them: the rule that wants another machine would never see it."""

    def act(trainer: Trainer, looks: int) -> None:
        trainer.print(f"GPU 0: {ECC}")
        trainer.ends(exited(1))

    stage.act = act
    assert stage.run(control=CONTROL) is AttemptOutcome.FAILED
    assert stage.last_report().failure_class is FailureClass.SCRIPT_ERROR
    told = [(request.metrics or {}).get("log.ecc") for request in stage.client.heart.requests]
    assert told[-1] == 1
    assert stage.client.heart.requests[-1].step == 0, "without a step the control plane does not look at metrics"
    assert told.count(1) == 1, "said once"


def test_a_script_that_reports_no_step_is_where_its_job_was(stage: Stage) -> None:
    def act(trainer: Trainer, looks: int) -> None:
        trainer.print(ECC)
        trainer.ends(exited(1))

    stage.act = act
    stage.run(control=CONTROL, last_step=700)
    assert stage.client.heart.requests[-1].step == 700
    silent = len(stage.client.heart.requests)
    stage.run(control={**CONTROL, "rules": None}, last_step=700)
    assert all(request.step is None for request in stage.client.heart.requests[silent:])


def test_the_control_plane_hears_of_a_loss_that_is_no_number(stage: Stage) -> None:
    """The control plane receives the names of nonfinite metrics, which rules over a group count as the worst."""
    seen = [TrainingProgress(3, 10, {"lr": 0.1}, nonfinite={"loss": "nan"}), TrainingProgress(4, 10, {"lr": 0.1})]

    def act(trainer: Trainer, looks: int) -> None:
        if looks <= 2:
            run._progress = lambda: seen[looks - 1]  # type: ignore[method-assign]
            assert run._keeper.beat()
        else:
            trainer.ends(exited(1))

    stage.act = act
    run = stage.make(control={**CONTROL, "rules": None})
    run.run()
    sent = [json.loads(one.model_dump_json(exclude_unset=True)) for one in stage.client.heart.requests[:2]]
    assert sent[0]["control"]["nonfinite"] == {"loss": "nan"} and sent[0]["metrics"] == {"lr": 0.1}
    assert "nonfinite" not in sent[1]["control"]


def test_a_training_that_printed_nothing_of_the_kind_ends_without_a_call_more(stage: Stage) -> None:
    def act(trainer: Trainer, looks: int) -> None:
        trainer.print("all well")
        trainer.ends(exited(1))

    stage.act = act
    stage.run(control=CONTROL)
    with_signals = len(stage.client.heart.requests)
    assert with_signals <= 1
    assert all(request.metrics == {"log.ecc": 0} for request in stage.client.heart.requests)


def test_a_revision_that_a_heartbeat_brings_is_counted_from_then_on(stage: Stage) -> None:
    stage.client.heart.answers = [make_answer(rules=rules(2, ecc=ECC))]

    def act(trainer: Trainer, looks: int) -> None:
        if looks == 1:
            trainer.print(ECC)  # nobody counts it yet
            assert run._keeper.beat()
            trainer.print(ECC)
        trainer.ends(exited(1))

    stage.act = act
    run = stage.make(control={**CONTROL, "rules": None})
    assert run.run() is AttemptOutcome.FAILED
    assert (stage.client.heart.requests[-1].metrics or {}).get("log.ecc") == 1
