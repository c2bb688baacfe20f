"""`foreign.py` as it is, where each checkpoint waits at a gate."""

import runpy
from pathlib import Path
from typing import Any

import gate
from accelerate import Accelerator

save_state = Accelerator.save_state


def gated(self: Accelerator, folder: Path) -> Any:
    """Save the state as accelerate does, once the gate lets the step pass."""
    gate.wait(int(folder.name.rpartition("-")[2]))
    return save_state(self, folder)


Accelerator.save_state = gated
runpy.run_path(str(Path(__file__).with_name("foreign.py")), run_name="__main__")
