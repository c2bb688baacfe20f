"""From directory to manifest: every entry accounted for, one JSON text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from blake3 import blake3

from contract.base import MAX_OBJECT_BYTES
from contract.checkpoints import CheckpointRef
from gpu_client.checkpoints import manifest as module
from gpu_client.checkpoints.errors import BadDirectory
from gpu_client.checkpoints.manifest import BadManifest, LocalManifest, build_manifest, manifest_digest, read_manifest
from gpu_client.transport.digests import digest_bytes
from tests.unit.checkpoints.fake_cloud import JOB_ID


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "c" / "sub" / "deeper").mkdir(parents=True)
    for name, data in {"b.bin": b"b", "a.bin": b"a", "sub/deeper/z": b"", "sub/a ü.txt": b"b", ".hidden": b"h"}.items():
        (tmp_path / "c" / name).write_bytes(data)
    return tmp_path / "c"


def build(directory: Path, **more: object) -> LocalManifest:
    return build_manifest(directory, job_id=JOB_ID, step=5, epoch=2, **more)  # type: ignore[arg-type]


def ref(local: LocalManifest, **changes: object) -> CheckpointRef:
    known = {
        "step": 5,
        "epoch": 2,
        "manifest_url": "u",
        "manifest_blake3": manifest_digest(local.manifest),
        "total_bytes": 4,
    }
    return CheckpointRef(**{**known, **changes})


def test_every_file_is_in_it_sorted_with_its_digests(directory: Path) -> None:
    manifest = build(directory, metrics={"loss": 0.5}).manifest
    assert [file.path for file in manifest.files] == [".hidden", "a.bin", "b.bin", "sub/a ü.txt", "sub/deeper/z"]
    digest = digest_bytes(b"a")
    assert (manifest.files[1].size_bytes, manifest.files[1].blake3, manifest.files[1].crc64nvme) == (
        1,
        digest.blake3,
        digest.crc64nvme,
    )
    assert (manifest.job_id, manifest.step, manifest.epoch, manifest.metrics) == (JOB_ID, 5, 2, {"loss": 0.5})
    assert manifest.total_bytes == 4


def test_equal_files_are_one_blob(directory: Path) -> None:
    local = build(directory)
    assert len(local.blobs) == 4
    assert local.blobs[digest_bytes(b"b").blake3].read_bytes() == b"b"


def test_the_digest_is_that_of_the_canonical_text(directory: Path) -> None:
    manifest = build(directory, metrics={"z": 1, "a": 2}).manifest
    shuffled = manifest.model_copy(update={"files": manifest.files[::-1], "metrics": {"a": 2.0, "z": 1.0}})
    assert manifest.canonical_bytes() == shuffled.canonical_bytes()
    assert manifest_digest(manifest) == blake3(manifest.canonical_bytes()).hexdigest()
    assert read_manifest(manifest.canonical_bytes(), job_id=JOB_ID, ref=ref(build(directory), manifest_blake3=None))


def test_metrics_that_no_manifest_may_carry_are_left_out(directory: Path) -> None:
    """A NaN loss is no reason to lose a checkpoint."""
    assert build(directory, metrics={"loss": float("nan"), "ok": 1, "bad name": 2}).manifest.metrics == {"ok": 1}


def test_links_inside_are_followed(directory: Path) -> None:
    (directory / "link").symlink_to("a.bin")
    (directory / "dirlink").symlink_to("sub")
    paths = [file.path for file in build(directory).manifest.files]
    assert "link" in paths
    assert "dirlink/deeper/z" in paths


@pytest.mark.parametrize(
    ("name", "target", "reason"),
    [
        ("out", "../secret", "leads outside"),
        ("abs", "/etc/passwd", "leads outside"),
        ("dangling", "nothing", "leads nowhere"),
        ("loop", "loop", "leads nowhere"),
        ("sub/deeper/up", "../..", "directory that it lies in"),
        ("sub/self", ".", "directory that it lies in"),
        ("outdir", "/etc", "leads outside"),
    ],
)
def test_other_links_are_refused_by_name(directory: Path, name: str, target: str, reason: str) -> None:
    (directory.parent / "secret").write_text("s")
    (directory / name).symlink_to(target)
    with pytest.raises(BadDirectory, match=f"{name!r}.*{reason}"):
        build(directory)


def test_special_files_are_refused(directory: Path) -> None:
    os.mkfifo(directory / "pipe")
    with pytest.raises(BadDirectory, match="'pipe' is neither"):
        build(directory)


@pytest.mark.parametrize("name", [b"back\\slash", b"new\nline", b"not-utf8-\xff"])
def test_names_that_no_manifest_can_carry_are_refused(directory: Path, name: bytes) -> None:
    Path(os.fsdecode(os.fsencode(directory) + b"/" + name)).touch()
    with pytest.raises(BadDirectory, match=r"backslash|control character|Unicode"):
        build(directory)


def test_empty_directories_are_not_dropped_silently(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    (directory / "nothing").mkdir()
    assert len(build(directory).manifest.files) == 5
    assert "nothing/" in caplog.text


def test_a_directory_without_files_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(BadDirectory, match="has 0 files"):
        build(tmp_path)
    with pytest.raises(BadDirectory, match="is not a directory"):
        build(tmp_path / "absent")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"manifest_blake3": "0" * 64}, "other bytes than its digest"),
        ({"step": 6}, "is that of"),
        ({"epoch": 3}, "is that of"),
    ],
)
def test_a_manifest_of_something_else_is_not_accepted(directory: Path, changes: dict[str, object], reason: str) -> None:
    local = build(directory)
    with pytest.raises(BadManifest, match=reason):
        read_manifest(local.manifest.canonical_bytes(), job_id=JOB_ID, ref=ref(local, **changes))


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../b", "a\\..\\b", "", "b.bin", "a.bin/x"])
def test_paths_that_escape_or_clash_make_a_bad_manifest(directory: Path, path: str) -> None:
    local = build(directory)
    raw = json.loads(local.manifest.canonical_bytes())
    raw["files"].append({**raw["files"][0], "path": path})
    with pytest.raises(BadManifest, match="cannot be read"):
        read_manifest(json.dumps(raw).encode(), job_id=JOB_ID, ref=ref(local, manifest_blake3=None))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b"{" * 10_000])
def test_garbage_is_a_bad_manifest(directory: Path, data: bytes) -> None:
    with pytest.raises(BadManifest):
        read_manifest(data, job_id=JOB_ID, ref=ref(build(directory), manifest_blake3=None))


def test_a_file_too_large_for_one_put_is_refused_before_it_is_hashed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (directory / "huge").open("wb") as file:
        file.truncate(MAX_OBJECT_BYTES + 1)  # sparse
    monkeypatch.setattr(module, "hash_files", lambda *_, **__: pytest.fail("hashed"))
    with pytest.raises(BadDirectory, match="'huge' has 5368709121 bytes; at most 5368709120"):
        build(directory)
