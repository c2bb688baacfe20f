"""Description of the measuring machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("baton", "boto3", "botocore", "pydantic", "requests", "blake3", "torch", "numpy", "uvicorn", "starlette")
_ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, Any]:
    """Describe machine, interpreter, versions and commit."""
    return {
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES} | {"ministack": _emulator_version()},
        "commit": _commit(),
        "load": load(),
    }


def load() -> list[float]:
    """Read the load averages of 1, 5 and 15 minutes, this measurement included."""
    return [round(value, 2) for value in os.getloadavg()]


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Read the name of the processor, if the system has it."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _emulator_version() -> str:
    try:
        # Loads botocore, which benches of elastic trainings do without.
        from functions.local.emulator import EmulatorError, find_python
    except ImportError:
        return "unknown"
    program = "from importlib.metadata import version; print(version('ministack'))"
    try:
        return _answer([str(find_python()), "-c", program])
    except EmulatorError:
        return "not installed"


def _commit() -> str:
    return _answer(["git", "-C", str(_ROOT), "describe", "--always", "--dirty"])


def _answer(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
