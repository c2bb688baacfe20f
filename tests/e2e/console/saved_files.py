"""Files that a page saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_file(page: Any, path: str) -> tuple[str, bytes]:
    """Download a file by its button; returns the name that the browser suggests, and the saved bytes."""
    with page.expect_download() as waiting:
        page.get_by_role("button", name=f"Download and verify {path}", exact=True).click()
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()


def note_downloads(page: Any) -> list[Any]:
    """Return a list that grows with each file that the page saves."""
    found: list[Any] = []
    page.on("download", lambda download: found.append(download))  # noqa: PLW0108 - Playwright marks its handlers
    return found
