"""How much memory this process may still take before the kernel starts to kill."""

from __future__ import annotations

import re
from pathlib import Path


def available_bytes(machine: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the machine has left, or the control group (version 2) if that is less; None where neither is told."""
    limits = []
    text = _read(machine)
    if found := re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE):
        limits.append(int(found[1]) * 1024)
    limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        # Pages of files that were read or written some time ago give way.
        cached = re.search(r"^inactive_file (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
        limits.append(max(int(limit) - int(used) + (int(cached[1]) if cached else 0), 0))
    return min(limits, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
