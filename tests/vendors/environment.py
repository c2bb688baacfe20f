"""Run a vendor's own client in a process: on the packages of `.vendors/<vendor>`, and on those of this environment.

A process of its own, because a client may change logging, warnings and signals of its interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 240.0


def run_client(
    vendor: str, *arguments: str, home: Path, environment: Mapping[str, str], check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `python <arguments>` with the client's packages.

    home: an empty directory for the client's configuration. environment: variables besides PATH. check: False permits
    a failing exit code.
    """
    packages = ROOT / ".vendors" / vendor
    assert (packages / ".ready").exists(), f"{packages} is missing: run `make setup-tests`"
    done = subprocess.run(
        [sys.executable, *arguments],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "PYTHONPATH": str(packages),
            "NO_PROXY": "*",
            **environment,
        },
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert not check or done.returncode == 0, f"{arguments} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done
