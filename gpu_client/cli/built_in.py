"""Built-in recipes as files of the control plane, where it is installed too: read without an account."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def built_in_document(name: str) -> str | None:
    """The text of `name@version`, or without a version of the highest one; None if there is none here.

    Raises OSError if it cannot be read.
    """
    known = _documents()
    if "@" not in name:
        versions = [
            int(version) for known_name, _, version in (one.partition("@") for one in known) if known_name == name
        ]
        name = f"{name}@{max(versions, default=0)}"
    found = known.get(name)
    return found.read_text(encoding="utf-8") if found is not None else None


def _documents() -> dict[str, Path]:
    """The files by `name@version`. The package is looked for, never imported: the client knows nothing of it."""
    package = find_spec("functions")
    places = package.submodule_search_locations if package is not None else None
    return {file.stem: file for place in places or () for file in Path(place, "recipes").glob("*@*.yaml")}
