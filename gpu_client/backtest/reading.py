"""Read histories from files: tables, JSON lines, the state of a Hugging Face Trainer.

The readers stream files and keep only the numbers in memory. Each fault of a file is a HistoryError with its line.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import IO, Any

from baton.contract.rules.arithmetic import to_number
from baton.contract.rules.backtest.history import Builder, History, HistoryError
from baton.contract.rules.metrics import is_name, name_in_rules

STEPS = ("step", "global_step", "_step")
TIMES = ("time", "at", "wall", "timestamp", "_timestamp")
"""Column names of the step and of the time in files; the first name in the tuple that a file has counts."""
MAX_LINE_CHARS = 1_000_000
MAX_DOCUMENT_BYTES = 256 * 1024 * 1024
"""Size limit of a JSON document without lines, because the reader loads such a document as a whole."""
_WORDS = ("nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity")
_TRAINER_EVALUATION = "eval_"
_NO_STEP = "Name a column 'step': whole numbers that do not fall."


def read_csv(file: Path) -> History:
    """Read a table with a header: `step`, optionally a time (`time`, `at`, `wall`: seconds, or ISO 8601), and metrics.

    An empty cell means that the row does not report the metric. The reader omits text columns. Raises HistoryError.
    """
    with _numbered_lines(file) as lines:
        return _Table(file, lines).history()


def read_jsonl(file: Path) -> History:
    """Read JSON lines, one object for each row, with the names of `read_csv`; null reports a metric as missing.

    The reader omits values other than numbers, "nan" and "inf". The file may also be a `trainer_state.json` of Hugging
    Face, or one list of such objects. Raises HistoryError.
    """
    with _numbered_lines(file) as lines:
        first = next(lines, None)
        if first is None:
            return Builder(file.name).history()
        number, text = first
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):
            if not text.lstrip().startswith(("{", "[")):
                raise HistoryError("this is no JSON", "Write one object a line.", number) from None
            return _of_document(file)
        if isinstance(entry, list) or (isinstance(entry, dict) and "log_history" in entry):
            return _of_document(file)
        builder = Builder(file.name)
        _add(builder, entry, number)
        for number, text in lines:
            _add(builder, _parsed(text, number), number)
        return builder.history()


@contextmanager
def _numbered_lines(file: Path) -> Iterator[Iterator[tuple[int, str]]]:
    """Open a file and yield its non-blank lines with their numbers."""
    try:
        opened = file.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise _unreadable(error) from error
    with opened:
        yield _lines(opened)


def _lines(opened: IO[str]) -> Iterator[tuple[int, str]]:
    for number in count(1):
        try:
            line = opened.readline(MAX_LINE_CHARS + 1)
        except UnicodeDecodeError as error:
            raise HistoryError("this is not UTF-8 text", "Save it as UTF-8.", number) from error
        except OSError as error:
            raise _unreadable(error) from error
        if not line:
            return
        if len(line) > MAX_LINE_CHARS:
            reason = f"the line is longer than {MAX_LINE_CHARS:,} characters"
            raise HistoryError(reason, "Is it a table, or one object a line?", number)
        if line.strip():
            yield number, line


def _unreadable(error: OSError) -> HistoryError:
    return HistoryError(f"cannot be read: {error.strerror}", "")


class _Table:
    def __init__(self, file: Path, lines: Iterator[tuple[int, str]]) -> None:
        self._builder = Builder(file.name)
        self._lines = lines
        self._line = 0
        head = next(lines, None)
        if head is None:
            self._builder.history()
            return
        self._line, text = head
        self._delimiter = max(",;\t", key=text.count)
        self._names = [name.strip() for name in next(self._rows(iter([head])))]
        self._step = self._place(STEPS)
        if self._step is None:
            raise HistoryError("there is no column 'step'", _NO_STEP, self._line)
        self._time = self._place(TIMES)
        self._metrics = self._columns()
        self._numbers: set[str] = set()
        """Metrics with a number in an earlier row."""

    def _place(self, names: tuple[str, ...]) -> int | None:
        lowered = [name.lower() for name in self._names]
        return next((lowered.index(name) for name in names if name in lowered), None)

    def _columns(self) -> dict[int, str]:
        found: dict[int, str] = {}
        # `baton metrics --csv` writes this header, and its column `epoch` contains the attempt's number.
        attempts = 0 if self._names[:3] == ["epoch", "step", "at"] else None
        for place, name in enumerate(self._names):
            if place in (self._step, attempts) or (place == self._time and name.lower() != "wall") or not name:
                continue
            known = name_in_rules(name)
            if not is_name(known):
                self._builder.notes.append(f"the column {name[:60]!r} is left out: rules cannot name it")
            elif known in found.values():
                raise HistoryError(f"the column {known} is there twice", "Leave out one of them.", self._line)
            else:
                found[place] = known
        return found

    def _rows(self, lines: Iterator[tuple[int, str]]) -> Iterator[list[str]]:
        def texts() -> Iterator[str]:
            for self._line, text in lines:
                yield text

        try:
            yield from csv.reader(texts(), delimiter=self._delimiter, strict=True)
        except csv.Error as error:
            raise HistoryError(f"this is no row of a table ({error})", "Close each quote.", self._line) from error

    def history(self) -> History:
        width = len(self._names)
        for cells in self._rows(self._lines):
            if len(cells) != width:
                reason = f"there are {len(cells)} cells, and {width} in the head"
                raise HistoryError(reason, "Write as many, empty ones too.", self._line)
            self._row(cells)
        return self._builder.history()

    def _row(self, cells: list[str]) -> None:
        step = _whole(cells[self._step or 0], self._line)
        at = None if self._time is None else _seconds(cells[self._time], self._line)
        metrics: dict[str, float | None] = {}
        texts: list[int] = []
        for place, name in self._metrics.items():
            cell = cells[place]
            if cell:
                try:
                    metrics[name] = float(cell)
                except ValueError:
                    if cell.strip():
                        texts.append(place)
        for place in texts:
            self._leave_out(place, cells[place])
        if len(self._numbers) < len(self._metrics):
            self._numbers.update(metrics)
        self._builder.add(step, at, metrics, self._line)

    def _leave_out(self, place: int, cell: str) -> None:
        """Drop a text column. Raises HistoryError if an earlier row of the column has a number."""
        name = self._metrics[place]
        if name in self._numbers:
            reason = f"{name} is {cell.strip()[:40]!r}, no number"
            raise HistoryError(reason, "Write a number, nan, inf, or leave it empty.", self._line)
        del self._metrics[place]
        self._builder.notes.append(f"the column {name} is left out: it has text")


def _of_document(file: Path) -> History:
    """Read a file with a single JSON document."""
    try:
        if file.stat().st_size > MAX_DOCUMENT_BYTES:
            reason = f"one document of more than {MAX_DOCUMENT_BYTES // 2**20} MiB"
            raise HistoryError(reason, "Write one object a line.")
        document = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise _unreadable(error) from error
    except UnicodeDecodeError as error:
        raise HistoryError("this is not UTF-8 text", "Save it as UTF-8.") from error
    except json.JSONDecodeError as error:
        raise HistoryError(f"this is no JSON ({error.msg})", "Write one object a line.", error.lineno) from error
    except (ValueError, RecursionError) as error:
        raise HistoryError("this is no JSON", "Write one object a line.") from error
    of_trainer = isinstance(document, dict)
    entries = document.get("log_history") if of_trainer else document
    if not isinstance(entries, list):
        remedy = "Write one object a line, or give a trainer_state.json."
        raise HistoryError("there is no 'log_history' in this document", remedy)
    builder = Builder(file.name)
    for number, entry in enumerate(entries, 1):
        _add(builder, _with_names_of_callback(entry) if of_trainer else entry, number)
    return builder.history()


def _with_names_of_callback(entry: Any) -> Any:
    """Rename `eval_accuracy` to `eval.accuracy`, as the callback of a Hugging Face Trainer does."""
    if not isinstance(entry, dict):
        return entry
    return {
        f"eval.{name.removeprefix(_TRAINER_EVALUATION)}" if name.startswith(_TRAINER_EVALUATION) else name: value
        for name, value in entry.items()
    }


def _parsed(text: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HistoryError("this is no JSON", "Write one object a line.", number) from error


def _add(builder: Builder, entry: Any, number: int) -> None:
    if not isinstance(entry, dict):
        raise HistoryError("this is no JSON object", 'Write {"step": 1, "loss": 2.5}.', number)
    step = next((entry[name] for name in STEPS if name in entry), None)
    if step is None:
        raise HistoryError("there is no step", 'Write {"step": 1, "loss": 2.5}.', number)
    time = next((name for name in TIMES if entry.get(name) is not None), None)
    inner = entry.get("metrics")
    # `baton metrics --jsonl` writes a point's metrics as an inner object, beside the attempt's number.
    named: Mapping[str, Any] = inner if isinstance(inner, dict) else entry
    skipped = {*STEPS, *({time} - {"wall"})}
    metrics: dict[str, float | None] = {}
    for name, value in named.items():
        known = name_in_rules(name)
        if name in skipped or known in metrics or not is_name(known):
            continue
        if isinstance(value, str):
            if value.strip().lower() in _WORDS:
                metrics[known] = float(value)
        elif value is None or isinstance(value, (int, float)):
            metrics[known] = to_number(value)
    builder.add(_whole(step, number), None if time is None else _seconds(entry[time], number), metrics, number)


def _whole(value: Any, line: int) -> int:
    """Parse a step."""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        try:
            return int(value) if not isinstance(value, float) else _as_whole(value)
        except (ValueError, OverflowError):
            pass
        try:
            return _as_whole(float(value))
        except (ValueError, OverflowError):
            pass
    raise HistoryError(f"the step is {str(value)[:40]!r}, no whole number", _NO_STEP, line)


def _as_whole(number: float) -> int:
    if not number.is_integer():
        raise ValueError("it has a fraction")
    return int(number)


def _seconds(value: Any, line: int) -> float:
    """Parse a time, in seconds."""
    try:
        if isinstance(value, str):
            try:
                at = float(value)
            except ValueError:
                at = datetime.fromisoformat(value.strip()).timestamp()
        else:
            at = float(value)
    except (ValueError, TypeError, OverflowError):
        at = math.nan
    if not math.isfinite(at):
        raise HistoryError(
            f"the time is {str(value)[:40]!r}", "Write seconds, or a date like 2026-01-31T12:00:00Z.", line
        )
    return at
