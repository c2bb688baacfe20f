"""Histories from files: what is taken, what is left out, and every way in which a file can be wrong."""

from __future__ import annotations

import json
import math
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from baton.contract.rules.backtest.history import History, HistoryError
from gpu_client.backtest.reading import MAX_LINE_CHARS, read_csv, read_jsonl


def table(tmp_path: Path, text: str | bytes) -> History:
    file = tmp_path / "run.csv"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_csv(file)


def lines(tmp_path: Path, text: str) -> History:
    file = tmp_path / "run.jsonl"
    file.write_text(text)
    return read_jsonl(file)


def points(history: History) -> dict[str, list[tuple[int, float]]]:
    """Step and value of all."""
    return {
        name: [(history.steps[row], value) for row, value in zip(column.rows, column.values, strict=True)]
        for name, column in history.columns.items()
    }


def test_a_table_is_read_with_gaps_words_and_names_of_rules(tmp_path: Path) -> None:
    text = "step,at,train/loss,eval_loss,learning_rate\n1,10,2.5,,1e-3\n\n2,11.5,nan,0.5,\n2,12,-inf,,1e-4\n"
    history = table(tmp_path, text)
    assert history.steps.tolist() == [1, 2, 2]
    assert history.clock.tolist() == [10.0, 11.5, 12.0]
    loss = points(history)["train.loss"]
    assert loss[0] == (1, 2.5) and math.isnan(loss[1][1]) and loss[2] == (2, -math.inf)
    assert points(history)["eval.loss"] == [(2, 0.5)]
    assert points(history)["lr"] == [(1, 1e-3), (2, 1e-4)]
    assert list(history.evaluations) == [0, 1, 0]
    assert (history.points, history.has("wall"), history.has("step"), history.has("cost")) == (6, True, True, False)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffstep;loss\r\n1;2.5\r\n",
        "_step\tloss\n1.0\t2.5\n",
        'Step,"loss"\n"1","2.5"\n',
        "loss,global_step\n2.5,1e0\n",
        "epoch,step,at,loss\n3,1,0,2.5\n",
    ],
)
def test_tables_as_other_programs_write_them(tmp_path: Path, text: str) -> None:
    assert points(table(tmp_path, text)) == {"loss": [(1, 2.5)]}


def test_what_is_no_metric_is_left_out_and_told(tmp_path: Path) -> None:
    history = table(tmp_path, "step,phase,my loss,loss,\n1,train,1,2,x\n2,,1,3,y\n")
    assert points(history) == {"loss": [(1, 2.0), (2, 3.0)]}
    assert history.notes == (
        "the column 'my loss' is left out: rules cannot name it",
        "the column phase is left out: it has text",
    )


def test_times_may_be_dates_or_the_wall_clock_of_the_run(tmp_path: Path) -> None:
    dated = table(tmp_path, "step,time,loss\n1,2026-01-01T00:00:00Z,1\n2,2026-01-01T00:01:30+00:00,1\n")
    assert dated.clock[1] - dated.clock[0] == 90.0
    walled = table(tmp_path, "step,wall,loss\n1,5,1\n2,8,1\n")
    assert walled.clock.tolist() == [5.0, 8.0]
    assert points(walled)["wall"] == [(1, 5.0), (2, 8.0)]


def test_lines_of_json(tmp_path: Path) -> None:
    said: list[dict[str, Any]] = [
        {"step": 1, "at": 5, "loss": 2.5, "note": "begin", "flag": True, "lists": [1], "big": 10**400},
        {"step": 2, "at": 6.5, "loss": None, "grad_norm": "NaN", "x": "-inf"},
        {"epoch": 3, "step": 3, "at": 7, "metrics": {"train/loss": 1, "eval_loss": "inf"}},
    ]
    history = lines(tmp_path, "\n".join(map(json.dumps, said)) + "\n\n")
    found = points(history)
    assert found["loss"] == [(1, 2.5)] and history.columns["loss"].absent.tolist() == [1]
    assert math.isnan(found["grad_norm"][0][1]) and found["x"] == [(2, -math.inf)] and found["big"] == [(1, math.inf)]
    assert found["flag"] == [(1, 1.0)] and found["train.loss"] == [(3, 1.0)] and found["eval.loss"] == [(3, math.inf)]
    assert set(found) == {"loss", "grad_norm", "x", "big", "flag", "train.loss", "eval.loss"}


@pytest.mark.parametrize("indent", [None, 2])
def test_the_state_of_a_trainer(tmp_path: Path, indent: int | None) -> None:
    entries = [{"step": 10, "epoch": 0.5, "loss": 2.0, "learning_rate": 1e-4}, {"step": 10, "eval_accuracy": 0.7}]
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({"best_metric": None, "log_history": entries}, indent=indent))
    history = read_jsonl(file)
    assert points(history) == {
        "loss": [(10, 2.0)], "epoch": [(10, 0.5)], "lr": [(10, 1e-4)], "eval.accuracy": [(10, 0.7)],
    }  # fmt: skip
    assert history.times is None
    file.write_text(json.dumps(entries, indent=indent))
    assert read_jsonl(file).rows == 2


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", None, "there is nothing in it"),
        ("\n \n", None, "there is nothing in it"),
        ("step,loss\n", None, "there is nothing in it"),
        ("loss,lr\n1,2\n", 1, "there is no column 'step'"),
        ("step,loss\n1,2\n2,x\n", 3, "loss is 'x', no number"),
        ("step,loss\n1,2\none,2\n", 3, "the step is 'one', no whole number"),
        ("step,loss\n1.5,2\n", 2, "the step is '1.5', no whole number"),
        ("step,loss\nnan,2\n", 2, "the step is 'nan', no whole number"),
        ("step,loss\n,2\n", 2, "the step is '', no whole number"),
        ("step,loss\n1e300,2\n", 2, "out of all bounds"),
        ("step,loss\n5,2\n\n4,2\n", 4, "the step goes back, from 5 to 4"),
        ("step,loss\n5\n", 2, "there are 1 cells, and 2 in the head"),
        ("step,loss\n5,1,2\n", 2, "there are 3 cells, and 2 in the head"),
        ("step,at,loss\n5,soon,1\n", 2, "the time is 'soon'"),
        ("step,at,loss\n5,inf,1\n", 2, "the time is 'inf'"),
        ("step,at,loss\n5,,1\n", 2, "the time is ''"),
        ("step,train/loss,train.loss\n1,2,3\n", 1, "the column train.loss is there twice"),
        ('step,loss\n1,"2\n', 2, "this is no row of a table"),
        ("step,loss\n1," + "1" * MAX_LINE_CHARS, 2, "the line is longer than"),
        (b"step,loss\n1,\xff\n", 1, "this is not UTF-8 text"),
        ("step,loss\n1,2\n".encode("utf-16"), 1, "this is not UTF-8 text"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, text: str | bytes, line: int | None, reason: str) -> None:
    with pytest.raises(HistoryError, match=re.escape(reason)) as refused:
        table(tmp_path, text)
    assert refused.value.line == line
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", None, "there is nothing in it"),
        ("step 1 loss 2\n", 1, "this is no JSON"),
        ('{"step": 1}\n{"step": 2\n', 2, "this is no JSON"),
        ('{"step": 1}\n[1]\n', 2, "this is no JSON object"),
        ('{"loss": 1}\n', 1, "there is no step"),
        ('{"step": true, "loss": 1}\n', 1, "the step is 'True', no whole number"),
        ('{"step": [1], "loss": 1}\n', 1, "the step is '[1]', no whole number"),
        ('{"step": 2, "at": 1}\n{"step": 3}\n', 2, "there is no time, as the rows before have it"),
        ('{"step": 2, "at": {}}\n', 1, "the time is '{}'"),
        ('{\n"steps": []\n}\n', None, "there is no 'log_history'"),
        ("{\n", 2, "this is no JSON"),
        ("[" * 100_000, None, "this is no JSON"),
        ('{"step": 1' + "0" * 5000 + "}", None, "this is no JSON"),
    ],
)
def test_lines_that_cannot_be_used(tmp_path: Path, text: str, line: int | None, reason: str) -> None:
    with pytest.raises(HistoryError, match=re.escape(reason)) as refused:
        lines(tmp_path, text)
    assert refused.value.line == line
    assert refused.value.remedy


@pytest.mark.parametrize("read", [read_csv, read_jsonl])
def test_files_that_cannot_be_opened(tmp_path: Path, read: Any) -> None:
    for place in (tmp_path, tmp_path / "absent", tmp_path / "a" / "b"):
        with pytest.raises(HistoryError, match="cannot be read"):
            read(place)


def test_memory_is_that_of_the_numbers(tmp_path: Path) -> None:
    """40 bytes a row of two values, times and steps included, and little more while it is read."""
    file, rows = tmp_path / "run.csv", 100_000
    with file.open("w") as written:
        written.write("step,at,loss,x\n")
        written.writelines(f"{row},{row},{row % 7}.25,0.5\n" for row in range(rows))
    tracemalloc.start()
    history = read_csv(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert history.points == 2 * rows
    assert peak < 100 * rows
