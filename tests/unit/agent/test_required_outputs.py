"""Test the checks of outputs and of unchanged inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.contract.jobs.job import FailureClass
from baton.contract.names import SHARED_DIR
from baton.contract.recipes.plan import OutputCheck
from gpu_client.agent.attempt.required_outputs import check_inputs, check_outputs, snapshot_inputs

HEADER = json.dumps({"__metadata__": {"a": "b"}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
SAFETENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)


def problem(folder: Path, **check: Any) -> str | None:
    failure = check_outputs(folder, [OutputCheck(path="out", **check)])
    if failure is None:
        return None
    assert failure.failure_class is FailureClass.MISSING_OUTPUT
    return failure.reason


@pytest.mark.parametrize(
    ("content", "check", "said"),
    [
        (b"", {}, None),
        (b"abc", {"min_bytes": 3}, None),
        (b"ab", {"min_bytes": 3}, "has 2 bytes; at least 3"),
        (b"{}", {"format": "json"}, None),
        (b"{", {"format": "json"}, "is not JSON"),
        (b"[" * 100_000, {"format": "json"}, "is not JSON"),
        (SAFETENSORS, {"format": "safetensors"}, None),
        (SAFETENSORS[:-1], {"format": "safetensors"}, "cut off"),
        (SAFETENSORS + b"x", {"format": "safetensors"}, "cut off, or has more"),
        (b"", {"format": "safetensors"}, "cut off"),
        (b"\xff" * 100, {"format": "safetensors"}, "is not a safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", {"format": "safetensors"}, "header cannot be read"),
        (b"\x89PNG\r\n\x1a\n...", {"format": "png"}, None),
        (b"GIF89a", {"format": "png"}, "is not a PNG file"),
        (b"\xff\xd8\xff\xe0", {"format": "jpeg"}, None),
        (b"", {"format": "jpeg"}, "is not a JPEG file"),
        (b"x", {"format": "of the future"}, None),
        (b"x", {"min_files": 2}, "has 1 files; at least 2"),
    ],
)
def test_a_file(tmp_path: Path, content: bytes, check: dict[str, Any], said: str | None) -> None:
    (tmp_path / "out").write_bytes(content)
    found = problem(tmp_path, **check)
    assert (found is None) if said is None else (found is not None and said in found)


def test_a_directory_is_as_large_as_its_files_together(tmp_path: Path) -> None:
    (tmp_path / "out/deep").mkdir(parents=True)
    (tmp_path / "out/a").write_bytes(b"abc")
    (tmp_path / "out/deep/b").write_bytes(b"de")
    assert problem(tmp_path, min_files=2, min_bytes=5) is None
    assert "has 2 files; at least 3" in str(problem(tmp_path, min_files=3))
    assert "is not a file" in str(problem(tmp_path, format="json"))


def test_all_that_is_missing_is_named(tmp_path: Path) -> None:
    failure = check_outputs(tmp_path, [OutputCheck(path="a"), OutputCheck(path="b/c")])
    assert failure is not None and "a is missing; b/c is missing" in failure.reason


def test_a_link_out_of_the_directory_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "secret").write_text("s")
    (tmp_path / "o/out").symlink_to(tmp_path / "secret")
    assert "leads outside" in str(problem(tmp_path / "o"))


def test_inputs_are_no_place_to_write(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a", "deep/b"):
        (tmp_path / name).write_text(name)
    before = snapshot_inputs(tmp_path)
    assert set(before) == {"a", "deep/b"} and check_inputs(tmp_path, before) is None
    (tmp_path / "cache").write_text("new files are let be")
    assert check_inputs(tmp_path, before) is None
    (tmp_path / "a").write_text("other")
    (tmp_path / "deep/b").unlink()
    failure = check_inputs(tmp_path, before)
    assert failure is not None and failure.failure_class is FailureClass.SCRIPT_ERROR
    assert "outside its directories" in failure.reason and "'a' and 1 more" in failure.reason


def test_what_other_jobs_have_shared_may_be_added_to(tmp_path: Path) -> None:
    """A job may extend a shared file in place, and may not change any other input."""
    (tmp_path / SHARED_DIR).mkdir(parents=True)
    for name in ("words.bin", f"{SHARED_DIR}/words.bin"):
        (tmp_path / name).write_text("few")
    before = snapshot_inputs(tmp_path)
    (tmp_path / SHARED_DIR / "words.bin").write_text("few and more")
    assert check_inputs(tmp_path, before) is None
    (tmp_path / "words.bin").write_text("few and more")
    failure = check_inputs(tmp_path, before)
    assert failure is not None and "its input 'words.bin'" in failure.reason
