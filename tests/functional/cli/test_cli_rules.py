"""`baton rules` and `baton tell`: before and after acknowledgment by a worker, and with faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.contract.worker.calls import HeartbeatRequest
from baton.contract.worker.control import CommandResult, ControlReport, Decision, RuleStatus
from tests.functional.cli.people import Baton, Labour, submit

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

SPIKE = "rules:\n- {name: spike, when: loss > 9, for: 3 checks, do: {stop: failed}}\n"
WRONG = "rules:\n- {name: spike, when: 'mena(loss, 3) > 9', do: stop}\n"


def report_rules(labour: Labour, at: int, **report: Any) -> None:
    """Send a heartbeat with a control report."""
    control = ControlReport(**{"rules_revision": 0, "commands_seq": 0, **report})
    request = HeartbeatRequest(step=at, total_steps=100, metrics={"loss": 2.5}, control=control)
    labour.client.heartbeat(labour.held.id, labour.held.lease_token, request)


def test_a_submission_says_what_is_doubtful_of_its_rules(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("rules:\n- {name: silent, when: heartbeat.age > 5m, do: {alert: x}}\n")
    said = baton("submit", "--recipe", "digits@1", "--input", "digits/", "--rules", file).ok()
    assert f"{file}:2:" in said.err and "heartbeat.age hardly ever exceeds 206 s" in said.err
    assert len(said.out.split()) == 1, "the job's id, and nothing else"


def test_a_check_tells_what_only_the_training_reports(baton: Baton, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(
        "signals: {ecc: uncorrectable}\nrules:\n"
        "- {name: a, when: log.ecc > 0, do: {alert: x}}\n- {name: b, when: f1 > 0 and loss > 1, do: stop}\n"
    )
    said = baton("rules", "check", file).ok().out
    assert said == f"{file}: 2 rules without faults\nThe rules read metrics that your training must report: f1\n"


def test_rules_from_the_file_to_what_the_worker_says(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    file, wrong = tmp_path / "rules.yaml", tmp_path / "wrong.yaml"
    file.write_text(SPIKE)
    wrong.write_text(WRONG)
    assert baton("rules", "check", file).ok().out == f"{file}: 1 rule without faults\n"
    said = baton("rules", "check", wrong)
    assert said.code == 1 and said.out.startswith(f"{wrong}:2:") and "Did you mean mean?" in said.out
    told = (f"{wrong} has 1 fault", f"{wrong}:2:24: rules.0.when: there is no function 'mena'. Did you mean mean?")
    baton("submit", "--recipe", "digits@1", "--rules", wrong).refused(2, *told)

    job = submit(baton, labour, tmp_path)
    assert baton("rules", "show", job).ok().err == f"No rules. Set rules with: baton rules set {job} FILE\n"
    baton("rules", "set", job, wrong).refused(2, *told)
    assert baton("rules", "set", job, file).ok().out.startswith("revision 1.")
    assert baton("rules", "set", job, file).ok().out.startswith("revision 1."), "the same again"
    assert "not yet acknowledged by a worker" in baton("rules", "show", job).ok().out
    assert baton("rules", "show", job, "--text").ok().out == SPIKE
    (tmp_path / "next.yaml").write_text(SPIKE.replace("9", "8"))
    baton("rules", "set", job, tmp_path / "next.yaml", "--if-revision", "7").failed(3, "conflict")
    baton("rules", "test", job, file).failed(2, "has reported no metrics yet")

    assert labour.claim().control is not None and labour.held.control.rules is not None
    status = RuleStatus(rule="spike", state="pending", said="pending, 2 of 3, last value 9.5", fires=0)
    report_rules(labour, 40, rules_revision=1, step=1, statuses=[status])
    shown = baton("rules", "show", job).ok().out
    assert "in force since step 1 of attempt 1" in shown
    assert shown.splitlines()[-1].split(maxsplit=2)[:2] == ["spike", "pending"] and "2 of 3, last value 9.5" in shown
    assert baton("rules", "test", job, file).ok()
    (tmp_path / "other.yaml").write_text("rules:\n- {name: a, when: eval.f1 > 1, do: stop}\n")
    assert "eval.f1" in baton("rules", "test", job, tmp_path / "other.yaml").out

    file.write_text("")
    assert baton("rules", "set", job, file).ok().out.startswith("revision 2.")
    assert "in delivery" in baton("rules", "show", job).ok().out
    report_rules(labour, 50, rules_revision=2, rejected=2, reason="it cannot be read here")
    assert "rejected by the training: it cannot be read here" in baton("rules", "show", job).ok().out
    listed = baton("rules", "history", job).ok().out.splitlines()
    assert [line.split()[0] for line in listed[1:]] == ["2", "1"] and "spike" in listed[2]


def test_commands_and_what_became_of_them(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job = submit(baton, labour, tmp_path)
    labour.claim()
    baton("tell", job, "set", "lr").failed(2, "exactly one of 'value' and 'factor'", "--factor 0.5")
    baton("tell", job, "save", "--factor", "2").failed(2, "save has no factor")
    assert baton("tell", job, "set", "lr", "--factor", "0.5").ok().out.startswith("command 1: set factor=0.5 knob=lr")
    assert baton("tell", job, "save", "--tag", "best", "--json").ok().json["seq"] == 2
    applied = CommandResult(seq=1, status="applied", step=41, message="lr: 0.1 -> 0.05")
    report_rules(labour, 42, commands_seq=2, results=[applied])
    rows = baton("tell", job).ok().out.splitlines()[1:]
    assert rows[0].split()[0] == "2" and "waiting" in rows[0]
    assert "applied" in rows[1] and "step 41: lr: 0.1 -> 0.05" in rows[1]


def test_watch_tells_what_rules_do(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job = submit(baton, labour, tmp_path, rules=SPIKE)
    labour.claim()
    fired = Decision(
        number=1, type="rule.fired", rule="spike", revision=1, step=44, at=0, operands={"loss": 9.5}, actions=["stop"]
    )
    report_rules(labour, 44, rules_revision=1, step=1, decisions=[fired])
    labour.complete({})
    said = baton("watch", job).ok()
    assert "step 44: rule spike fired: loss = 9.5" in said.err
    last = baton("watch", job, "--json").ok().out.splitlines()[-1]
    assert json.loads(last)["fired"] == "spike fired at step 44: stop", "with the progress, too"


WAITS = (
    "rules:\n- {name: waits, when: queue.age > 1h, do: {alert: x}}\n- {name: nan, when: not isfinite(loss), do: save}\n"
)


def test_it_is_said_where_each_rule_is_evaluated(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job = submit(baton, labour, tmp_path)
    file = tmp_path / "waits.yaml"
    file.write_text(WAITS)
    baton("rules", "set", job, file).ok()
    shown = baton("rules", "show", job).ok().out
    assert "in the control plane: checked at " in shown
    assert shown.splitlines()[-1].split()[:6] == ["waits", "armed", "control", "plane", "last", "value"]
    labour.claim()
    report_rules(labour, 3, rules_revision=1, step=1, statuses=[RuleStatus(rule="nan", state="armed", said="armed")])
    rows = [line.split()[:3] for line in baton("rules", "show", job).ok().out.splitlines()[-2:]]
    assert rows == [["nan", "armed", "training"], ["waits", "armed", "control"]]


CONTROLLER = """
controller_metrics:
- {name: loss, class: Loss}
controllers:
- name: low
  triggers: [on_log]
  rule: RULE
  operations: [hfcontrols.should_training_stop]
"""


def test_a_file_of_ibms_controller_is_translated(baton: Baton, tmp_path: Path) -> None:
    file, made = tmp_path / "controller.yaml", tmp_path / "rules.yaml"
    file.write_text(CONTROLLER.replace("RULE", "loss['loss'] < 1.0"))
    made.write_text(baton("rules", "import", file).ok().out)
    assert baton("rules", "check", made).ok().out.startswith(f"{made}: 1 rule without faults")
    file.write_text(CONTROLLER.replace("RULE", "__import__('os')"))
    refused = baton("rules", "import", file)
    assert (refused.code, refused.out) == (2, "") and "controller.yaml has" in refused.err


def test_presets_are_printed_as_a_document_and_their_names_are_taken(baton: Baton, tmp_path: Path) -> None:
    file = tmp_path / "copied.yaml"
    printed = baton("rules", "presets").ok().out
    file.write_text(printed.replace("name: preset-", "name: my-"))
    assert baton("rules", "check", file).ok().out.startswith(f"{file}: 6 rules without faults")
    file.write_text(printed)
    said = baton("rules", "check", file)
    assert said.code == 1 and said.out.count("is the name of a preset") == 6
    found = baton("rules", "presets", "--json").ok().json
    assert found["text"] == printed and "preset-stuck" in found["names"]


def test_what_presets_tell_is_seen_by_who_watches_and_who_asks_why(
    baton: Baton, labour: Labour, tmp_path: Path
) -> None:
    job = submit(baton, labour, tmp_path)
    labour.claim()
    stuck = {"type": "rule.fired", "rule": "preset-stuck", "step": 44, "at": 0, "actions": ["alert"]}
    message = "no step for 14 min, usual 0.4 s"
    over = {"type": "rule.cleared", "rule": "preset-starved", "step": 30, "at": 0}
    starved = {**over, "type": "rule.fired", "step": 20, "message": "waits"}
    told = [starved, over, {**stuck, "message": message, "operands": {"step.age": 840.0}}]
    report_rules(labour, 44, decisions=[Decision(number=at, **one) for at, one in enumerate(told, 1)])
    said = baton("explain", job).ok().out
    assert f"preset-stuck: {message} (at step 44)" in said and "preset-starved" not in said
    assert baton("explain", job, "--json").ok().json["alerts"] == [f"preset-stuck: {message} (at step 44)"]
    labour.complete({})
    watched = baton("watch", job).ok().err
    assert f"step 44: preset-stuck: {message}\n" in watched
    assert "step 20: preset-starved: waits\n" in watched and "step 30: preset-starved: cleared\n" in watched
