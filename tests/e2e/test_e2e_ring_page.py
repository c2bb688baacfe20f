"""docs/ring.md is true: every command on it runs, in the order of the page, and its table has every setting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_client.ring.settings import RingSettings
from tests.kits.stack.stack import LIGHT_START, clean_environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ring.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_every_command_runs(tmp_path: Path) -> None:
    script = "".join(f"echo '== {number}'\n{commands}" for number, commands in enumerate(COMMANDS))
    environment = {
        **clean_environment(),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{LIGHT_START}{os.pathsep}{ROOT}",
        "HOME": str(tmp_path),
    }
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = re.split(r"^== \d+\n", ran.stdout, flags=re.MULTILINE)[1:]
    made, filled, trained, again, watched, verified, repaired, recorded, mixed, came, logged = said
    assert made == ""
    assert "256 of 256" in filled and "800 put" in filled
    first, second = trained.splitlines()
    assert first.startswith("loss ") and second.startswith("loss ") and first != second
    assert re.search(r"generate:render \[\d, \d+\]$", again)
    assert watched.count("256 of 256") == 2
    assert verified == "" and "256 objects read, 0 damaged" in ran.stderr
    assert "exit code 1" in repaired and "pointer: unreadable" in repaired
    assert "255 of 256" in repaired and "repaired: 255 samples readable" in ran.stderr
    assert recorded == "" and "256 samples recorded in recorded, 0 damaged" in ran.stderr
    assert set(re.findall(r"'(\w+)', 16", mixed)) == {"live", "kept"}
    assert re.match(r"10 tensor\(0\.[45]", came)
    history, gone = logged.rsplit("\n", 2)[:2]
    assert history.count('"swap_count"') >= 2 and gone.startswith("Deleted the ring, with "), logged
    assert "Traceback" not in ran.stderr and "Warning" not in ran.stderr


def test_the_table_has_every_setting() -> None:
    table = PAGE.split("| setting |", 1)[1].split("\n\n", 1)[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(RingSettings.model_fields)
    for row in table.splitlines()[2:]:
        names, default = (re.findall(r"[\w.]+", cell) for cell in row.split("|")[1:3])
        if len(names) == 1 and default and names != ["max_ahead"]:
            said = RingSettings.model_validate_strings({"cap": "9", names[0]: default[0]})
            assert said == RingSettings(cap=9), row
