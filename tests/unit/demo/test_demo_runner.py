"""The runner: the report, the claims and the exit code of a demo."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from demo import charts
from demo.failure import DemoError
from demo.runner import Claim, Demo, Stage
from gpu_client.ring.errors import RingError
from gpu_client.transport.errors import Unreachable


@dataclass(frozen=True)
class Measured:
    failure: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"answer": 42}

    def claims(self) -> list[Claim]:
        return [Claim("The answer is 42."), Claim("The answer is even.", self.failure)]


def demo(scenario: Callable[[Stage], Measured]) -> Demo[Measured]:
    return Demo("demo.test", "a test", "nowhere", ("a.png",), scenario, lambda _: {"a.png": charts.panels(2, 2)[0]})


@pytest.fixture(autouse=True)
def restored_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_demo_leaves_its_charts_and_numbers_and_prints_its_claims(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "old.log").touch()
    directories: list[Path] = []

    def scenario(stage: Stage) -> Measured:
        directories.extend([stage.scratch, stage.memory])
        assert all(path.is_dir() for path in directories)
        assert not list((tmp_path / "logs").iterdir()), "an earlier run's logs are gone"
        with stage.screen.phase("count", "Count"):
            return Measured()

    assert demo(scenario).main(["--report", str(tmp_path)]) == 0
    assert not any(path.exists() for path in directories)
    assert (tmp_path / "a.png").stat().st_size > 1000
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["answer"] == 42 and summary["durations_s"].keys() == {"count", "draw", "total"}
    output = capsys.readouterr().out
    assert " • The answer is 42.\n • The answer is even.\n" in output and "a.png and summary.json" in output


def test_a_claim_that_does_not_hold_fails_the_demo_and_no_claim_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(lambda _: Measured("the answer is odd")).main(["--report", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "The demo failed: the answer is odd" in output and "The answer is 42" not in output
    assert (tmp_path / "a.png").exists(), "the chart may explain the failure"


def test_a_scenario_that_fails_leaves_no_file_of_an_earlier_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "worker.log"
    log.write_text("the last line\n")
    for name in ("a.png", "summary.json"):
        (tmp_path / name).touch()

    def scenario(stage: Stage) -> Measured:
        raise DemoError("worker-1 has left", log)

    assert demo(scenario).main(["--report", str(tmp_path)]) == 1
    assert not (tmp_path / "a.png").exists() and not (tmp_path / "summary.json").exists()
    output = capsys.readouterr().out
    assert "the last line" in output and "The demo failed: worker-1 has left" in output


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (Unreachable("no answer"), 1, "a call to the control plane failed: no answer"),
        (RingError("damaged"), 1, "the ring failed: damaged"),
        (OSError("disk full"), 1, "disk full"),
        (KeyboardInterrupt(), 130, "Every process of the demo has ended"),
    ],
)
def test_an_error_ends_the_demo_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    def scenario(stage: Stage) -> Measured:
        raise error

    assert demo(scenario).main(["--report", str(tmp_path)]) == code
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "report", "figures"),
    [
        ("demo", "demo-report", ("loss.png", "predictions.png", "time.png")),
        ("demo.ring", "demo-report-ring", ("ring.png",)),
        ("demo.rules", "demo-report-rules", ("rules.png",)),
    ],
)
def test_each_demo_is_a_program(
    program: str, report: str, figures: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found: Demo[Any] = import_module(f"{program}.__main__").DEMO
    assert (found.program, found.report, found.charts) == (program, report, figures)
    with pytest.raises(SystemExit):
        found.main(["--help"])
    assert f"python -m {program}" in capsys.readouterr().out
