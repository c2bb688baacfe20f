"""From a directory to a manifest: every entry and every byte accounted for, one JSON text."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from blake3 import blake3

from baton.contract.checkpoints.manifest import MAX_FILE_BYTES, Manifest
from gpu_client.checkpoints.format.packing import name_pack
from gpu_client.checkpoints.local.directory_files import BadDirectory
from gpu_client.checkpoints.save import manifest_builder
from gpu_client.checkpoints.save.manifest_builder import LocalManifest, build_manifest
from gpu_client.transport.errors import FileChanged, TransferCanceled
from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.transfer.transfer_requests import Segment
from tests.unit.checkpoints.fake_cloud import JOB_ID


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "c" / "sub" / "deeper").mkdir(parents=True)
    for name, data in {"b.bin": b"b", "a.bin": b"a", "sub/deeper/z": b"", "sub/a ü.txt": b"b", ".hidden": b"h"}.items():
        (tmp_path / "c" / name).write_bytes(data)
    return tmp_path / "c"


def build(directory: Path, **more: object) -> LocalManifest:
    return build_manifest(directory, job_id=JOB_ID, step=5, epoch=2, **more)  # type: ignore[arg-type]


def stored(local: LocalManifest, digest: str) -> bytes:
    """The bytes of a new pack."""
    return b"".join(
        segment.path.read_bytes()[segment.offset : segment.offset + segment.size_bytes]
        for segment in local.packs[digest]
    )


def test_every_file_is_in_it_sorted_and_made_of_its_chunks(directory: Path) -> None:
    local = build(directory, metrics={"loss": 0.5})
    manifest = local.manifest
    assert [file.path for file in manifest.files] == [".hidden", "a.bin", "b.bin", "sub/a ü.txt", "sub/deeper/z"]
    assert [file.size_bytes for file in manifest.files] == [1, 1, 1, 1, 0]
    chunks = [[manifest.chunks[index].blake3 for index in file.chunks] for file in manifest.files]
    assert chunks == [[digest_bytes(name).blake3] for name in (b"h", b"a", b"b", b"b")] + [[]]
    assert (manifest.job_id, manifest.step, manifest.epoch, manifest.metrics) == (JOB_ID, 5, 2, {"loss": 0.5})
    assert manifest.total_bytes == 4


def test_equal_bytes_are_one_chunk_and_the_pack_is_what_it_says(directory: Path) -> None:
    local = build(directory)
    (pack,) = local.manifest.packs
    assert stored(local, pack.blake3) == b"hab"
    name = name_pack(blake3(chunk).digest() for chunk in (b"h", b"a", b"b"))
    assert (pack.size_bytes, pack.blake3, pack.crc64nvme) == (3, name, digest_bytes(b"hab").crc64nvme)
    assert [(chunk.pack, chunk.offset, chunk.size_bytes) for chunk in local.manifest.chunks] == [
        (0, 0, 1), (0, 1, 1), (0, 2, 1),
    ]  # fmt: skip
    assert local.new_bytes == 3


def test_raw_chunks_stay_in_their_files(directory: Path) -> None:
    (directory / "big").write_bytes(os.urandom(300_000))
    local = build(directory)
    (segments,) = local.packs.values()
    assert Segment(directory / "big", 0, 300_000) in segments, "blocks one behind the other are one segment"
    assert {segment.path.name for segment in segments} == {"big", ".hidden", "a.bin", "b.bin"}


def test_the_manifest_is_a_pure_function_of_the_directory(directory: Path) -> None:
    (directory / "big").write_bytes(os.urandom(3_000_000))
    assert build(directory).manifest == build(directory).manifest


def test_large_chunks_come_first_and_small_ones_behind(directory: Path) -> None:
    """A small one that changes shifts no large one to another pack."""
    (directory / "small").write_bytes(os.urandom(10_000))
    (directory / "zlarge").write_bytes(os.urandom(80_000_000))
    manifest = build(directory).manifest
    sizes = [chunk.size_bytes for chunk in manifest.chunks]
    large = [size >= 256 * 1024 for size in sizes]
    assert large == sorted(large, reverse=True)
    assert sizes.count(10_000) == 1
    small = manifest.chunks[sizes.index(10_000)]
    assert small.pack == len(manifest.packs) - 1
    places = [(chunk.pack, chunk.offset) for chunk in manifest.chunks]
    assert min(places[large.index(False) :]) > max(places[: large.index(False)])


def test_zeros_are_not_stored(directory: Path) -> None:
    with (directory / "sparse").open("wb") as file:
        file.truncate(40_000_000)
    local = build(directory)
    sparse = next(file for file in local.manifest.files if file.path == "sparse")
    assert {local.manifest.chunks[index].codec for index in sparse.chunks} == {"zeros"}
    assert sum(pack.size_bytes for pack in local.manifest.packs) == 3
    assert len(local.manifest.chunks) <= 5, "zeros of one size are one chunk"


def test_a_directory_of_zeros_and_empty_files_has_no_pack(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "zeros").write_bytes(bytes(100))
    (tmp_path / "c" / "empty").touch()
    local = build(tmp_path / "c")
    assert local.manifest.packs == []
    assert local.packs == {}


def test_the_digest_is_that_of_the_canonical_text(directory: Path) -> None:
    manifest = build(directory, metrics={"z": 1, "a": 2}).manifest
    shuffled = manifest.model_copy(update={"metrics": {"a": 2.0, "z": 1.0}})
    assert manifest.canonical_bytes() == shuffled.canonical_bytes()
    assert Manifest.model_validate_json(manifest.canonical_bytes()) == manifest


def test_a_file_that_changes_while_it_is_read_is_not_taken(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = manifest_builder.ChunkEncoder.encode_span

    def meddle(self, piece, raw):  # type: ignore[no-untyped-def]
        found = encode(self, piece, raw)
        if piece.path == "a.bin":
            (directory / "a.bin").write_bytes(b"A")
            os.utime(directory / "a.bin", ns=(1, 1))
        return found

    monkeypatch.setattr(manifest_builder.ChunkEncoder, "encode_span", meddle)
    with pytest.raises(FileChanged, match=r"a\.bin changed"):
        build(directory)


@pytest.mark.parametrize("change", ["removed", "shorter", "replaced"])
def test_a_file_that_changes_before_it_is_read_is_not_taken(
    directory: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    cut = manifest_builder._cut

    def meddle(files):  # type: ignore[no-untyped-def]
        pieces = cut(files)
        (directory / "a.bin").unlink()
        if change != "removed":
            (directory / "a.bin").write_bytes(b"" if change == "shorter" else b"A")
        return pieces

    monkeypatch.setattr(manifest_builder, "_cut", meddle)
    with pytest.raises(FileChanged, match=r"a\.bin"):
        build(directory)


def test_another_file_that_stood_there_for_a_moment_is_not_taken_for_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = manifest_builder.ChunkEncoder.encode_span

    def meddle(self, piece, raw):  # type: ignore[no-untyped-def]
        if piece.path != "a.bin":
            return encode(self, piece, raw)
        piece.file.path.rename(directory.parent / "aside")
        piece.file.path.write_bytes(b"A")
        try:
            return encode(self, piece, raw)
        finally:
            (directory.parent / "aside").replace(piece.file.path)

    monkeypatch.setattr(manifest_builder.ChunkEncoder, "encode_span", meddle)
    with pytest.raises(FileChanged, match=r"a\.bin"):
        build(directory)


def test_it_stops_when_told_to(directory: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(TransferCanceled):
        build(directory, cancel=cancel)


def test_ten_thousand_small_files(tmp_path: Path) -> None:
    place = tmp_path / "c"
    place.mkdir()
    for index in range(10_000):
        (place / f"{index:05}.json").write_bytes(b"%d" % (index // 2))
    local = build(place)
    assert len(local.manifest.files) == 10_000
    assert len(local.manifest.chunks) == 5_000
    assert len(local.manifest.packs) == 1
    body = local.manifest.model_dump_json(exclude_unset=True)
    assert len(body) < 3_000_000, "it has to fit into a request"
    assert len(body) < 1.1 * len(local.manifest.canonical_bytes())


def test_more_chunks_than_a_manifest_holds_are_made_larger(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "big").write_bytes(os.urandom(5_000_000))
    assert len(build(directory).manifest.chunks) > 20
    monkeypatch.setattr(manifest_builder, "MAX_CHUNKS", 20)
    local = build(directory)
    assert 10 < len(local.manifest.chunks) <= 20
    assert local.manifest.total_bytes == 5_000_004


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
        ("sub/deeper/up", "../..", "directory that contains the link"),
        ("sub/self", ".", "directory that contains the link"),
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


def test_a_file_larger_than_any_is_refused_before_it_is_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (directory / "huge").open("wb") as file:
        try:
            file.truncate(MAX_FILE_BYTES + 1)  # sparse
        except OSError:
            pytest.skip("this file system has no file of a tebibyte")
    monkeypatch.setattr(manifest_builder.ChunkEncoder, "encode_span", lambda *_: pytest.fail("read"))
    with pytest.raises(BadDirectory, match="'huge' has 1099511627777 bytes; at most 1099511627776"):
        build(directory)
