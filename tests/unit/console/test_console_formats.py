"""Numbers of the console have units, and never claim more than is known."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cdk import NODE

FORMATS = Path(__file__).parents[3] / "console" / "src" / "core" / "format.js"
CASES = [
    ("count(12480)", "12,480"),
    ("count(null)", ""),
    ("counted(1, 'kill')", "1 kill"),
    ("counted(2, 'kill')", "2 kills"),
    ("number(0.312749)", "0.3127"),
    ("number(1.23e-7)", "1.23e-7"),
    ("number(NaN)", ""),
    ("number(12345678)", "1.23e7"),
    ("percent(0.999)", "99%"),
    ("percent(1)", "100%"),
    ("percent(undefined)", ""),
    ("usd(0.004)", "<$0.01"),
    ("usd(0)", "$0.00"),
    ("usd(1204)", "$1,204.00"),
    ("duration(59.6)", "1 min 00 s"),
    ("duration(7500)", "2 h 05 min"),
    ("duration(273600)", "3 d 4 h"),
    ("duration(-3)", "0 s"),
    ("age(4)", "now"),
    ("age(7200)", "2 h"),
    ("bytes(999)", "999 B"),
    ("bytes(1440000000)", "1.4 GB"),
    ("bytes(0)", "0 B"),
]


@pytest.fixture(scope="module")
def results() -> list[str]:
    expressions = ",".join(f"f.{call}" for call, _ in CASES)
    program = f"import(process.argv[1]).then((f) => console.log(JSON.stringify([{expressions}])))"
    line = [str(NODE), "-e", program, FORMATS.as_uri()]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("index", range(len(CASES)), ids=[call for call, _ in CASES])
def test_formats(results: list[str], index: int) -> None:
    assert results[index] == CASES[index][1]


def test_today_is_the_control_planes_day() -> None:
    """The clock of the browser's machine may be years off."""
    at_s = 1_577_880_000
    program = """
      const [format, clock] = await Promise.all(process.argv.slice(1).map((place) => import(place)));
      const answer = { headers: new Headers({ date: new Date(AT_S * 1000).toUTCString() }) };
      const before = format.moment(AT_S);
      clock.learnTime(answer);
      console.log(JSON.stringify([before.includes(","), format.moment(AT_S).includes(",")]));
    """.replace("AT_S", str(at_s))
    places = [FORMATS.as_uri(), FORMATS.with_name("clock.js").as_uri()]
    line = [str(NODE), "--input-type=module", "-e", program, *places]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, False]
