"""`baton rules backtest` on files: output and refusals."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_client.cli.core.session import CliSession
from gpu_client.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "demo" / "rules" / "recorded"
RULES = ROOT / "demo" / "rules" / "backtest.yaml"


class Command:
    """Runs it in this process; gives exit code, output and what was said besides."""

    def __init__(self, capture: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capture = capture
        self._environ = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        code = main(["rules", "backtest", *map(str, arguments)], CliSession(environ=self._environ))
        said = self._capture.readouterr()
        assert "Traceback" not in said.err + said.out
        return code, said.out, said.err

    def refused(self, *arguments: object) -> str:
        """The one line that it must have said."""
        code, out, err = self(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
        assert err.startswith("baton: ")
        return err.removeprefix("baton: ").rstrip("\n")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)


def test_the_page_s_example(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "rules-backtest.md").read_text()
    typed, shown = re.findall(r"```\n\$ baton rules backtest (.*?)\n(.*?)```", page, re.DOTALL)[0]
    monkeypatch.chdir(ROOT)
    assert command(*typed.split()) == (0, shown, "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_much_is_replayed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm-256color")
    code, out, _ = command(RULES, "--csv", RECORDED / "late.csv", "--csv", RECORDED / "diverged.csv")
    bars = re.findall(r"([a-z]+\.csv)[^\n]*?(\d+)%", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.getvalue()))
    assert code == 0 and "late.csv: 130 rows" in out
    assert dict(bars) == {"late.csv": "100", "diverged.csv": "100"}


def test_several_runs_have_a_sum(command: Command) -> None:
    code, out, _ = command(RULES, "--csv", RECORDED / "diverged.csv", "--csv", RECORDED / "late.csv", "--gpus", "4")
    assert code == 0
    assert "It would have ended at step 560 by exploding, 2 h 50 min earlier. 11.33 GPU hours saved:" in out
    last = out.splitlines()[-1]
    assert last == "2 runs, 2 ended earlier, 1 of them wrongly: 11.33 GPU hours saved, 11.67 wrongly cut off"


def test_the_same_for_programs(command: Command) -> None:
    code, out, err = command(
        RULES, "--csv", RECORDED / "diverged.csv", "--csv", RECORDED / "late.csv", "--gpus", "4", "--json"
    )
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said["total"]["runs"] == 2 and said["total"]["wrongly_ended"] == 1
    assert said["total"]["gpu_hours"] == pytest.approx({"saved": 34 / 3, "wrongly": 35 / 3, "unknown": 0})
    diverged, late = said["runs"]
    assert [diverged["ended_by"], late["ended_by"]] == ["exploding", "plateau"]
    rules = {one["rule"]: one for one in diverged["rules"]}
    assert rules["not-a-number"]["operands"] == {"loss": "nan"} and rules["not-a-number"]["mode"] == "dry_run"
    assert (rules["expensive"]["tried"], rules["expensive"]["reason"]) == (False, "not in this history: cost")
    plateau = next(one for one in late["rules"] if one["rule"] == "plateau")
    assert plateau["use"] == "wrongly" and plateau["best_later"] == {"value": 0.2581, "step": 1300}
    assert (plateau["first_step"], plateau["first_after_s"], plateau["actions"]) == (950, 28200.0, ["stop"])


def test_without_times_and_with_rollbacks(command: Command, tmp_path: Path) -> None:
    rules, run = tmp_path / "rules.yaml", tmp_path / "run.jsonl"
    rules.write_text(
        "rules:\n- {name: back, when: x > 1, do: {rollback: {}}}\n- {name: slow, when: age(x) > 1h, do: stop}\n"
    )
    run.write_text('{"step": 1, "x": 1}\n{"step": 2, "x": 2}\n{"step": 3, "x": "nan"}\n')
    code, out, err = command(rules, "--jsonl", run)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "run.jsonl: 3 rows, steps 1 to 3, no times, 1 GPU, no goal known"
    assert lines[2].split()[:3] == ["back", "1", "2"] and "this history has no times" in lines[3]
    assert lines[4] == "At step 2 back would have given it another way (rollback): what then, nobody knows."
    rules.write_text("rules: [{name: end, when: x > 1, do: stop}]")
    assert (
        "It would have ended at step 2 by end. The rest of unknown use: no goal is known: name one with --goal."
        in command(rules, "--jsonl", run)[1]
    )
    assert "The rest saved: x was not finite at the end" in command(rules, "--jsonl", run, "--goal", "x:max")[1]


def test_notes_and_warnings_go_to_the_other_stream(command: Command, tmp_path: Path) -> None:
    rules, run = tmp_path / "rules.yaml", tmp_path / "run.csv"
    rules.write_text("rules: [{name: a, when: x > 1 and x < 0, do: stop}]")
    run.write_text("step,host,x\n1,gpu-7,2\n")
    code, out, err = command(rules, "--csv", run)
    assert code == 0 and "The run would have gone its way to the end." in out
    assert "(warning)" in err and "run.csv: the column host is left out: it has text" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is nothing in it. Write one row for each report: step and metrics."),
        ("loss\n1\n", ":1: there is no column 'step'. Name a column 'step': whole numbers that do not fall."),
        ("step,loss\n2,1\n1,1\n", ":3: the step goes back, from 2 to 1. Leave out"),
        ("step,loss\n1,1\n2,much\n", ":3: loss is 'much', no number. Write a number, nan, inf, or leave it empty."),
        ("step,loss\n1,\u20ac1\n", "it has text"),
    ],
)
def test_tables_that_are_no_histories(command: Command, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.csv"
    file.write_text(text)
    if "text" in said:
        assert said in command(RULES, "--csv", file)[2]
    else:
        told = command.refused(RULES, "--csv", file)
        assert told.startswith(f"{file}:") and said in told


def test_what_else_is_refused(command: Command, tmp_path: Path) -> None:
    rules, empty = tmp_path / "wrong.yaml", tmp_path / "empty.yaml"
    rules.write_text("rules: [{name: a, when: 'mena(x, 3) > 1', do: stop}]")
    empty.write_text("rules: []")
    run = RECORDED / "late.csv"
    options: list[tuple[list[Any], str]] = [
        ([RULES], "there is nothing to try the rules on. Give --job ID, --csv FILE or --jsonl FILE."),
        ([RULES, "--csv", tmp_path], f"{tmp_path}: cannot be read: Is a directory"),
        ([RULES, "--jsonl", tmp_path / "no"], f"{tmp_path / 'no'}: cannot be read: No such file or directory"),
        ([tmp_path / "no", "--csv", run], f"{tmp_path / 'no'} cannot be read: No such file or directory"),
        ([empty, "--csv", run], f"{empty} has no rules. Write one: docs/rules.md."),
        ([RULES, "--csv", run, "--goal", "eval.los"], "late.csv: the metric eval.los is not in this history. Did you"),
        ([RULES, "--csv", run, "--goal", "lr"], "nobody knows which values of lr are better. Write lr:min or lr:max."),
        ([RULES, "--csv", run, "--gpus", "inf"], "--gpus must be a finite number"),
        ([RULES, "--csv", run, "--gpus", "nan"], "--gpus"),
        ([RULES, "--csv", run, "--gpus", "-1"], "--gpus"),
    ]
    for given, said in options:
        assert said in command.refused(*given)
    code, out, err = command(rules, "--csv", run)
    assert (code, out) == (2, "") and "Did you mean mean?" in err
