"""The demos as programs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from demo import performance


@pytest.mark.parametrize(
    ("program", "report"),
    [("demo", "demo-report"), ("demo.ring", "demo-report-ring"), ("demo.rules", "demo-report-rules")],
)
def test_a_demo_leaves_its_report_where_it_is_told(
    program: str, report: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[Path, tuple[str, ...]]] = []

    def perform(title: str, where: Path, files: tuple[str, ...], story: object) -> int:
        told.append((where, files))
        return 7

    monkeypatch.setattr(performance, "perform", perform)
    demo: performance.Demo = import_module(f"{program}.__main__").DEMO
    assert (demo.main([]), demo.main(["--report", str(tmp_path)])) == (7, 7)
    assert [where for where, _ in told] == [Path(report), tmp_path]
    assert all("summary.json" in files for _, files in told)
    with pytest.raises(SystemExit):
        demo.main(["--help"])
    assert f"python -m {program}" in capsys.readouterr().out
