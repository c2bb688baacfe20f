"""The checkpoint manifest: files that fit together, and bytes that name it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from baton.contract.checkpoints.manifest import MAX_MANIFEST_FILES, Manifest
from tests.kits.api.factories import JOB_ID, make_chunked, make_manifest


@pytest.mark.parametrize(
    "paths",
    [
        ["model.safetensors", "optimizer.bin"],
        ["a/b", "a/c", "ab"],
        # `a-b` sorts between `a` and `a/b` as text: still no conflict with `a/b`.
        ["a/b", "a-b", "a.b"],
        ["A", "a"],
    ],
)
def test_paths_that_fit_together(paths: list[str]) -> None:
    assert len(make_manifest(files=[make_chunked(path) for path in paths]).files) == len(paths)


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ([], "at least 1"),
        (["a", "a"], "names a path twice"),
        (["a", "a/b"], "lies below another file"),
        (["a/b/c/d", "a-b", "x", "a/b"], "lies below another file"),
    ],
)
def test_paths_that_do_not(paths: list[str], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        make_manifest(files=[make_chunked(path) for path in paths])


@pytest.mark.parametrize("path", ["../../root/.ssh/authorized_keys", "/abs", "a/../../b", "c:\\x", "a\0", "."])
def test_paths_that_escape_the_directory(path: str) -> None:
    with pytest.raises(ValidationError):
        make_manifest(files=[make_chunked().model_dump() | {"path": path}])


def test_bounds_of_the_manifest() -> None:
    make_manifest(files=[make_chunked(f"f/{n}") for n in range(MAX_MANIFEST_FILES)])
    with pytest.raises(ValidationError, match="at most 10000"):
        make_manifest(files=[make_chunked(f"f/{n}") for n in range(MAX_MANIFEST_FILES + 1)])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 1),
        ("version", 3),
        ("step", -1),
        ("epoch", -1),
        ("job_id", "x"),
        ("created_by", "hand"),
        ("metrics", {"a b": 1.0}),
    ],
)
def test_values_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        make_manifest(**{field: value})
    assert caught.value.errors()[0]["loc"][0] == field


def test_canonical_bytes_depend_on_contents_only() -> None:
    one = make_manifest(metrics={"loss": 0.5, "accuracy": 0.9})
    other = make_manifest(metrics={"accuracy": 0.9, "loss": 0.5})
    assert one.canonical_bytes() == other.canonical_bytes()


@pytest.mark.parametrize(
    "fields",
    [
        {"step": 101},
        {"epoch": 2},
        {"metrics": {"loss": 1.0}},
        {"created_by": "script"},
        {"files": [make_chunked("other")]},
    ],
)
def test_canonical_bytes_tell_contents_apart(fields: dict[str, Any]) -> None:
    assert make_manifest().canonical_bytes() != make_manifest(**fields).canonical_bytes()


def test_canonical_bytes_read_back_as_the_same_manifest() -> None:
    manifest = make_manifest(files=[make_chunked("größe/🐕")], metrics={"loss": 1e-9, "lr": 1 / 3})
    again = Manifest.model_validate_json(manifest.canonical_bytes())
    assert again == manifest
    assert again.canonical_bytes() == manifest.canonical_bytes()
    assert again.job_id == JOB_ID


def test_total_bytes_count_each_path() -> None:
    assert make_manifest(files=[make_chunked("a"), make_chunked("b")]).total_bytes == 2048
