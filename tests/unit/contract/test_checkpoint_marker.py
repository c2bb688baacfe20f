"""The marker `baton.json`: one format, encoded by the session and parsed by session and agent."""

from __future__ import annotations

import json

import pytest

from baton.contract.checkpoints.marker import CheckpointMarker, UnknownMarkerFormat, parse_marker

MARKER = CheckpointMarker(
    7, {"loss": 0.5}, "session", {"model": "tensors"}, {"a": (3, "ab" * 32), "b": (0, "")}, "best"
)


def test_the_bytes_of_a_marker() -> None:
    assert MARKER.encode() == (
        b'{"format":2,"step":7,"metrics":{"loss":0.5},"created_by":"session","states":{"model":"tensors"},'
        b'"files":{"a":{"size_bytes":3,"blake3":"' + b"ab" * 32 + b'"},"b":{"size_bytes":0}},"tag":"best"}'
    )
    assert b'"tag"' not in CheckpointMarker(7).encode()


def test_a_marker_comes_back_as_it_was_written() -> None:
    assert parse_marker(MARKER.encode()) == MARKER
    assert parse_marker(b'{"format": 2, "step": 7}') == CheckpointMarker(7)


@pytest.mark.parametrize("version", [0, 1, 3, "2", None])
def test_another_format_is_named(version: object) -> None:
    with pytest.raises(UnknownMarkerFormat, match=f"has format '{version}'; this release reads format 2"):
        parse_marker(json.dumps({"format": version, "step": 7}).encode())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "the step is '-1'"),
        ({"step": True}, "the step is 'True'"),
        ({"step": "7"}, "the step is '7'"),
        ({"metrics": []}, "'metrics' is not an object"),
        ({"states": "x"}, "'states' is not an object"),
        ({"files": {"a": {}}}, "an entry of 'files' has no size"),
        ({"files": {"a": 3}}, "an entry of 'files' has no size"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_marker(json.dumps({"format": 2, "step": 7, **change}).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 200_000, b'"text"'])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_marker(data)
