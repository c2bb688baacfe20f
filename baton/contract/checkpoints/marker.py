"""Encode and parse the marker `baton.json`, the file that a session writes last into a checkpoint directory.

The training session writes the marker; the session and the agent read it. The module needs the standard library only,
because an unchanged training image has nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MARKER = "baton.json"
MARKER_FORMAT = 2
"""The only format; readers refuse every other format."""
MARKER_MAX_BYTES = 256 * 1024


class UnknownMarkerFormat(ValueError):  # noqa: N818 - named after the finding
    """The marker has a format that this release cannot read."""


@dataclass(frozen=True, slots=True)
class CheckpointMarker:
    """The content of `baton.json`.

    states maps the name of each saved state to its form, "tensors" or "directory"; empty if the script's own library
    wrote the files. files maps paths relative to the directory to size in bytes and BLAKE3 hex digest, "" if no digest
    was taken. The reader of a marker from an untrusted directory validates metrics and tag.
    """

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    created_by: str = ""
    states: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    tag: str = ""
    """The name under which a rule or command wants the checkpoint kept."""

    def encode(self) -> bytes:
        """Encode the marker as compact JSON."""
        files = {
            path: {"size_bytes": size_bytes, **({"blake3": digest} if digest else {})}
            for path, (size_bytes, digest) in self.files.items()
        }
        document = {
            "format": MARKER_FORMAT,
            "step": self.step,
            "metrics": dict(self.metrics),
            "created_by": self.created_by,
            "states": dict(self.states),
            "files": files,
            **({"tag": self.tag} if self.tag else {}),
        }
        return json.dumps(document, separators=(",", ":")).encode()


def parse_marker(data: bytes) -> CheckpointMarker:
    """Parse the bytes of a `baton.json`.

    Raises UnknownMarkerFormat for another format, ValueError for anything else that is not a marker.
    """
    try:
        document = json.loads(data)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError("the marker is not a JSON object")
    if document.get("format") != MARKER_FORMAT:
        raise UnknownMarkerFormat(
            f"the marker has format {str(document.get('format'))[:20]!r}; this release reads format {MARKER_FORMAT}"
        )
    step = document.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"the step is {str(step)[:20]!r}, not an integer of at least 0")
    try:
        files = {
            path: (int(record["size_bytes"]), str(record.get("blake3", "")))
            for path, record in _object(document, "files").items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an entry of 'files' has no size: {error!r}") from error
    tag = document.get("tag", "")
    return CheckpointMarker(
        step=step,
        metrics=_object(document, "metrics"),
        created_by=str(document.get("created_by", "")),
        states={name: str(form) for name, form in _object(document, "states").items()},
        files=files,
        tag=tag if isinstance(tag, str) else "",
    )


def _object(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = document.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"{name!r} is not an object")
    return value
