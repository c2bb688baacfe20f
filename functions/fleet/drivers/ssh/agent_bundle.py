"""Pack Baton as this control plane runs it, for machines that have no image with the agent."""

from __future__ import annotations

import io
import zipfile
from functools import cache
from importlib.metadata import requires
from pathlib import Path

PACKAGES = ("baton", "gpu_client")
_ROOT = Path(__file__).resolve().parents[4]


@cache
def agent_bundle() -> bytes:
    """Return a zip file of the agent's packages. Equal sources make equal bytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as files:
        for path in sorted(path for package in PACKAGES for path in (_ROOT / package).rglob("*.py")):
            files.writestr(zipfile.ZipInfo(path.relative_to(_ROOT).as_posix()), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


@cache
def agent_requirements() -> list[tuple[str, str]]:
    """Return the packages that the agent imports, each with the lowest version."""
    found = []
    for line in requires("baton") or []:
        requirement, _, marker = line.partition(";")
        if not marker or '"client"' in marker:
            name, _, least = requirement.strip().partition(">=")
            found.append((name, least))
    return found
