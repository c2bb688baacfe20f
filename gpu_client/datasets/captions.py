"""Read the captions of images: `<image>.txt` beside an image, or lines of `captions.jsonl` or `metadata.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

LISTS = ("captions.jsonl", "metadata.jsonl")
"""Files with a JSON object per line: `file_name`, relative to the file's folder, and `text` (or `caption`).

Null counts as absent.
"""

_TEXTS = ("text", "caption")


@dataclass(frozen=True, kw_only=True)
class CaptionFault:
    """Fault in a file of captions. `line` counts from 1."""

    path: str
    line: int | None = None
    message: str
    remedy: str


@dataclass(frozen=True)
class Captions:
    """Captions by the image's path below the folder, and faults."""

    texts: Mapping[str, str]
    faults: tuple[CaptionFault, ...]


def read_captions(directory: Path, images: frozenset[str]) -> Captions:
    """Read all captions below `directory`; `images` are the paths of its images (relative, '/'-separated)."""
    texts: dict[str, str] = {}
    faults: list[CaptionFault] = []
    for found in _all(directory, images):
        if isinstance(found, CaptionFault):
            faults.append(found)
            continue
        image, text, source = found
        if texts.setdefault(image, text) != text:
            faults.append(
                CaptionFault(
                    path=source,
                    message=f"{image} has another caption elsewhere: {texts[image][:60]!r}",
                    remedy="Keep one of them.",
                )
            )
    return Captions(texts, tuple(faults))


_Found = tuple[str, str, str] | CaptionFault
"""Image, caption and file of the caption; or a fault."""


def _all(directory: Path, images: frozenset[str]) -> Iterator[_Found]:
    stems: dict[str, list[str]] = {}
    for image in sorted(images):
        stems.setdefault(str(PurePosixPath(image).with_suffix("")), []).append(image)
    for place in sorted(directory.rglob("*")):
        below = place.relative_to(directory)
        if any(part.startswith(".") for part in below.parts):
            continue  # Trainings ignore hidden folders and files.
        path = below.as_posix()
        if place.name in LISTS:
            yield from _listed(place, path, images)
        elif place.suffix == ".txt":
            yield from _beside(place, path, stems)


def _beside(place: Path, path: str, stems: Mapping[str, list[str]]) -> Iterator[_Found]:
    of = stems.get(str(PurePosixPath(path).with_suffix("")), [])
    try:
        text = " ".join(_text_of(place).split())
    except (OSError, UnicodeDecodeError) as error:
        yield CaptionFault(path=path, message=f"cannot be read as UTF-8: {error}", remedy="Save the file as UTF-8.")
        return
    if of and not text:
        yield CaptionFault(path=path, message="is empty", remedy="Write the caption, or remove the file.")
    elif text:
        yield from ((image, text, path) for image in of)


def _listed(place: Path, path: str, images: frozenset[str]) -> Iterator[_Found]:
    try:
        # JSON texts may contain Unicode line ends, at which `splitlines` would split.
        lines = _text_of(place).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        yield CaptionFault(path=path, message=f"cannot be read as UTF-8: {error}", remedy="Save the file as UTF-8.")
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _entry(_parsed(line), path, images)
        except ValueError as error:
            yield CaptionFault(
                path=path,
                line=number,
                message=str(error),
                remedy='A line looks like {"file_name": "dog.jpg", "text": "a photo of a dog"}.',
            )


def _text_of(place: Path) -> str:
    """Read a text without the byte order mark of some editors."""
    return place.read_text("utf-8-sig")


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from error


def _entry(entry: Any, path: str, images: frozenset[str]) -> tuple[str, str, str]:
    """Parse an entry of a list. Raises ValueError with the fault."""
    if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
        raise ValueError("has no 'file_name'")
    text = next((entry[name] for name in _TEXTS if entry.get(name) is not None), None)
    if not isinstance(text, str) or not text.strip():
        raise ValueError("has no 'text'")
    image = (PurePosixPath(path).parent / entry["file_name"]).as_posix()
    if image not in images:
        raise ValueError(f"names {entry['file_name'][:80]!r}, which is no image here")
    return image, " ".join(text.split()), path
