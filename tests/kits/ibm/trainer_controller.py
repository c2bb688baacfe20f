"""IBM's trainer controller in a process: the reference for imported files.

`make setup-tests` puts the package into `.fms-hf-tuning`, without its dependencies; the environment has those that the
controller needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from tests.kits.ibm.streams import Moment

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / ".fms-hf-tuning"
"""Ignored by git."""
WANTED = Path(__file__).with_name("trainer_controller.txt")


class Decided(NamedTuple):
    """Decisions of IBM's controller."""

    taken: list[tuple[int, str, str]]
    """Number of the event, controller, action; without the event at which the controller died."""
    lines: list[tuple[int, str]]
    """Number of the event, and the line that was logged."""
    until: int
    """Number of the event at which the controller died, or number of all events."""
    died: str
    """Error by which the controller died; empty if it lived."""


class Original:
    """Process of the controller. One question at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def decides(self, config: dict[str, Any], moments: list[Moment]) -> Decided:
        """Decide a training by a file, in the shape that IBM's code reads."""
        found = self._answer("decide", config, [asdict(moment) for moment in moments])
        until = max(found["at"], 0)
        taken = [tuple(one) for one in found["taken"] if one[0] < until]
        _check_flags(config, taken, found["flags"])
        return Decided(
            taken, [(number, line) for number, line in found["lines"] if number < until], until, found["died"] or ""
        )

    def trains(self, config: dict[str, Any]) -> tuple[list[Moment], list[tuple[int, str, str]]]:
        """Run a real training; returns its events and the controller's actions."""
        found = self._answer("train", config)
        return [Moment(**moment) for moment in found["moments"]], [tuple(one) for one in found["taken"]]

    def _answer(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the original ended at {name!r}: see standard error"
        return json.loads(line)


def _check_flags(config: dict[str, Any], taken: list[tuple[int, str, str]], flags: list[list[str]]) -> None:
    """Check that the actions, and nothing else, set the trainer's flags."""
    written = {one["name"] for one in config.get("operations", []) if one["class"] == "LogControl"}
    actions = {
        one["name"]: {
            operation.partition(".")[2] for operation in one["operations"] if operation.partition(".")[0] not in written
        }
        for one in config["controllers"]
    }
    raised: dict[int, set[str]] = {}
    for number, controller, action in taken:
        raised.setdefault(number, set()).update({action} & actions[controller])
    assert [set(one) for one in flags] == [raised.get(number, set()) for number in range(len(flags))]


@contextlib.contextmanager
def running() -> Iterator[Original]:
    """Run the controller; fails without its package."""
    there = list(PACKAGE.glob("fms_hf_tuning-*.dist-info"))
    version = WANTED.read_text().partition("==")[2].split()[0]
    assert [one.name for one in there] == [f"fms_hf_tuning-{version}.dist-info"], (
        f"{PACKAGE} lacks {version}: make setup-tests"
    )
    environ = {**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.kits.ibm.controller_process"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT
    ) as process:
        try:
            yield Original(process)
        finally:
            # Not by closing its input: children that tests have forked meanwhile hold that open, too.
            process.kill()
