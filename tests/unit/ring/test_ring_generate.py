"""Test the generator program: names, refusals, signals."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from gpu_client.ring.core.ring import make_ring, open_ring
from gpu_client.ring.format.manifest import WRITER_NAME
from gpu_client.ring.format.records import SAMPLES
from gpu_client.ring.generate import StandaloneProgress, choose_writer_name, main
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from tests.kits.clock import Clock

SHAPES = """
import numpy as np

def square(seed, side=2):
    return {"image": np.full((side, side), float(seed)), "label": np.array(side)}

NUMBER = 3
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module of the user's, and nothing said by the environment."""
    (tmp_path / "shapes_of_test.py").write_text(SHAPES)
    (tmp_path / "needs_more.py").write_text("import there_is_no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in os.environ if name.startswith(("BATON_", "SLURM_"))]:
        monkeypatch.delenv(name)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)
    sys.modules.pop("shapes_of_test", None)


def generate(*arguments: str, function: str = "shapes_of_test:square", ring: str = "ring") -> None:
    main([f"--function={function}", f"--ring={ring}", *arguments])


def test_it_makes_the_ring_and_puts_what_the_function_makes_with_its_options(workplace: Path) -> None:
    generate("--count=3", "--name=w", "--version=7", "--options", "side=3", "--settings", "cap=10", "codec=zstd")
    ring = open_ring(str(workplace / "ring"))
    assert (ring.settings.cap, ring.settings.codec) == (10, "zstd")
    with RingReader(ring, threads=False) as reader:
        slots = reader.newest().slots
        assert [float(reader.sample(slot)["image"][2, 2]) for slot in slots] == [0, 1, 2]
        said = reader.provenance(slots[1])
    assert (said["writer"], said["generator"], said["version"], said["seed"]) == ("w", "shapes_of_test:square", "7", 1)
    generate("--count=5", "--name=w", "--options", "side=3", "--settings", "cap=10", "codec=zstd")
    assert len(ring.newest()) == 5, "two more: it is to have made five"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"function": "shapes_of_test"}, "names no function. Use the form shapes:make"),
        ({"function": "no_such_module:make"}, "there is no module no_such_module"),
        ({"function": "shapes_of_test:circle"}, "shapes_of_test has no function circle"),
        ({"function": "shapes_of_test:NUMBER"}, "has no function NUMBER"),
        ({"more": ["--options", "colour=red"]}, "cannot be called with colour"),
        ({"more": ["--options", "side"]}, "'side' is not NAME=VALUE"),
        ({"more": ["--count=0"]}, "count is 0"),
        ({"more": ["--first-seed=-1"]}, "first seed is -1"),
        ({"more": ["--processes=0"]}, "processes is 0"),
        ({"more": ["--name=a b"]}, "'a b' is not a name of a writer"),
        ({"more": [f"--name={'a' * 63}", "--processes=2"]}, "is not a name of a writer"),
        ({"ring": "elsewhere"}, "there is no directory elsewhere"),
        ({"ring": "odd:place"}, "not a place of a ring"),
        ({"more": ["--settings", "cap=0"]}, "invalid settings of a ring: cap: Input should be greater"),
        ({"more": ["--settings", "cap=5"]}, "a ring exists with cap 4 instead of 5"),
    ],
)
def test_what_cannot_be_generated_ends_with_one_line(
    workplace: Path, capsys: pytest.CaptureFixture[str], arguments: dict[str, object], reason: str
) -> None:
    make_ring(str(workplace / "ring"), RingSettings(cap=4))
    named = {name: str(value) for name, value in arguments.items() if name != "more"}
    more: list[str] = arguments.get("more", [])  # type: ignore[assignment]
    with pytest.raises(SystemExit) as ended:
        generate(*more, **named)  # type: ignore[arg-type]
    assert ended.value.code == 65
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and reason in line
    assert open_ring(str(workplace / "ring")).store.keys(SAMPLES) == []


def test_a_module_that_lacks_another_shows_where(workplace: Path) -> None:
    make_ring(str(workplace / "ring"), RingSettings(cap=4))
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_package"):
        generate(function="needs_more:make")


def test_writers_are_called_after_their_job_or_task() -> None:
    assert choose_writer_name({"BATON_JOB_ID": "j1", "SLURM_JOB_ID": "5"}) == "job-j1"
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"}
    assert choose_writer_name(task) == "slurm-7-3-0"
    assert choose_writer_name({**task, "SLURM_PROCID": "2"}) == "slurm-7-3-2"
    assert choose_writer_name({"SLURM_JOB_ID": "9"}) == "slurm-9-0-0"
    assert choose_writer_name({}) == ""


def test_unnamed_copies_have_names_that_never_come_again(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unnamed generators get new names at each start: a restarted container has the same host and process number."""
    make_ring(str(workplace / "ring"), RingSettings(cap=4))
    named: list[str] = []

    class Noted:
        def __init__(self, ring: object, commands: dict[str, list[str]], *more: object, **options: object) -> None:
            named.extend(commands)

        def run(self) -> int:
            return 0

    monkeypatch.setattr("gpu_client.ring.generate.GeneratorPool", Noted)
    monkeypatch.setattr("socket.gethostname", lambda: "gpu node_7!.local")
    for _ in range(2):
        generate("--count=4", "--processes=2")
    assert len(set(named)) == 4
    assert all(WRITER_NAME.fullmatch(name) for name in named), named


def test_alone_signals_ask_it_to_stop() -> None:
    before = signal.getsignal(signal.SIGINT)
    alone = StandaloneProgress()
    assert not alone.should_stop
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)  # to the process, and to its group
    assert alone.should_stop
    signal.signal(signal.SIGINT, before)
    alone = StandaloneProgress()
    signal.raise_signal(signal.SIGINT)
    assert alone.should_stop
    assert signal.getsignal(signal.SIGINT) is before, "the next Ctrl-C ends it"


def test_alone_it_ends_with_whoever_has_started_it() -> None:
    assert not StandaloneProgress(parent=os.getppid()).should_stop
    assert StandaloneProgress(parent=os.getpid()).should_stop


def test_alone_it_logs_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    alone = StandaloneProgress(clock)
    with caplog.at_level("INFO", "baton.ring"):
        for step in range(1, 41):
            alone.report(step, 40)
            clock.advance(1)
        alone.phase("waiting_for_readers_s", 7, 7)
        alone.phase("waiting_for_readers_s", 10, 10)
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 40 samples put",
        "11 of 40 samples put",
        "21 of 40 samples put",
        "31 of 40 samples put",
        "40 of 40 samples put",
        "waiting for readers s: 10",
    ]
