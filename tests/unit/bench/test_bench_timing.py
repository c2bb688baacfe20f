"""Test the CPU time that the checkpoint bench counts for an action."""

from __future__ import annotations

import subprocess
import sys
import time

from bench.checkpoints.timing import measured

BURN = "import time\nwhile time.process_time() < 0.05: pass"


def burn(cpu_s: float) -> str:
    until = time.process_time() + cpu_s
    while time.process_time() < until:
        pass
    return "done"


def test_our_own_time_is_counted_finely() -> None:
    cost, result = measured(lambda: burn(0.003))
    assert result == "done"
    # The clocks run apart by a little: time stolen from a virtual machine is in one of them.
    assert min(cost.cpu_s, cost.wall_s) >= 0.0025
    assert min(measured(lambda: None)[0].cpu_s for _ in range(5)) < 0.003, "nothing of what was before"


def test_children_are_counted() -> None:
    cost, _ = measured(lambda: subprocess.run([sys.executable, "-c", BURN], check=True))
    assert cost.cpu_s >= 0.045


def test_waiting_is_not() -> None:
    cost, _ = measured(lambda: subprocess.run(["sleep", "0.2"], check=True))
    assert cost.wall_s >= 0.19 > cost.cpu_s
