"""Index of stored chunks: stored chunks are not sent, deltas have one level, bases are verified."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from gpu_client.checkpoints.format.codec_selection import CodecChoice
from gpu_client.checkpoints.format.codecs import decode
from gpu_client.checkpoints.save import chunk_encoder, manifest_builder, source_files
from gpu_client.checkpoints.save.chunk_index import ChunkIndex
from gpu_client.checkpoints.save.manifest_builder import LocalManifest, build_manifest
from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.transfer.transfer_requests import Segment
from tests.unit.checkpoints.fake_cloud import JOB_ID

SLOW = 5e6
RANDOM = np.random.default_rng(7)


def weights(count: int = 400_000) -> np.ndarray:
    """bf16, as unsigned numbers."""
    return (RANDOM.normal(0, 0.02, count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def nudged(old: np.ndarray, share: float = 0.064) -> np.ndarray:
    return (old + (RANDOM.random(len(old)) < share)).astype(np.uint16)


class Kept:
    """Checkpoints whose files are still here."""

    def __init__(self) -> None:
        self.segments: dict[str, Segment] = {}

    def keep(self, local: LocalManifest, directory: Path) -> None:
        for file in local.manifest.files:
            offset = 0
            for index in file.chunks:
                chunk = local.manifest.chunks[index]
                self.segments[chunk.blake3] = Segment(directory / file.path, offset, chunk.size_bytes)
                offset += chunk.size_bytes

    def find(self, blake3: str) -> Segment | None:
        return self.segments.get(blake3)


class Cloud:
    """Stores packs, and reads checkpoints back as another implementation would."""

    def __init__(self) -> None:
        self.packs: dict[str, bytes] = {}

    def store(self, local: LocalManifest) -> None:
        for blake3, segments in local.packs.items():
            body = b"".join(
                segment.path.read_bytes()[segment.offset : segment.offset + segment.size_bytes] for segment in segments
            )
            (pack,) = [pack for pack in local.manifest.packs if pack.blake3 == blake3]
            assert (digest_bytes(body).crc64nvme, len(body)) == (pack.crc64nvme, pack.size_bytes)
            self.packs[blake3] = body

    def read(self, local: LocalManifest) -> dict[str, bytes]:
        manifest = local.manifest

        def chunk_bytes(index: int) -> bytes:
            chunk = manifest.chunks[index]
            stored = b""
            if chunk.pack is not None:
                pack = self.packs[manifest.packs[chunk.pack].blake3]
                stored = pack[chunk.offset : chunk.offset + chunk.stored_bytes]
            base = None if chunk.base is None else chunk_bytes(chunk.base)
            raw = bytes(decode(chunk.codec, stored, size_bytes=chunk.size_bytes, width=chunk.width, base=base))
            assert digest_bytes(raw).blake3 == chunk.blake3
            return raw

        return {file.path: b"".join(map(chunk_bytes, file.chunks)) for file in manifest.files}


class Scene:
    """Checkpoints of a job, one after the other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kept = Kept()
        self.known = ChunkIndex(self.kept)
        self.cloud = Cloud()
        self.step = 0

    def save(self, files: dict[str, bytes], *, speed: float | None = SLOW, learn: bool = True) -> LocalManifest:
        self.step += 1
        directory = self.root / f"checkpoint-{self.step}"
        directory.mkdir()
        for name, data in files.items():
            (directory / name).write_bytes(data)
        local = self.build(directory, speed)
        self.cloud.store(local)
        assert self.cloud.read(local) == files
        local.close()
        if learn:
            self.known.learn(local.manifest)
            self.kept.keep(local, directory)
        return local

    def build(self, directory: Path, speed: float | None = SLOW) -> LocalManifest:
        return build_manifest(
            directory,
            job_id=JOB_ID,
            step=self.step,
            epoch=1,
            known=self.known,
            upload_bytes_per_s=speed,
            spool=self.root / "spool",
        )


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def codecs(local: LocalManifest) -> list[str]:
    return [chunk.codec for chunk in local.manifest.chunks]


def test_what_did_not_change_is_named_in_its_old_pack(scene: Scene) -> None:
    base, first = os.urandom(3_000_000), os.urandom(300_000)
    one = scene.save({"base": base, "head": first})
    two = scene.save({"base": base, "head": os.urandom(300_000)})
    assert two.new_bytes == 300_000
    assert len(two.manifest.packs) == 2
    assert one.manifest.packs[0] in two.manifest.packs
    assert set(two.packs) == {pack.blake3 for pack in two.manifest.packs} - set(one.packs)
    three = scene.save({"base": base})
    assert (three.new_bytes, three.packs) == (0, {})


def test_chunks_are_found_wherever_they_have_moved_to(scene: Scene) -> None:
    blocks = [os.urandom(64 * 1024) for _ in range(4)]
    scene.save({"a": b"".join(blocks)})
    two = scene.save({"other": b"".join(blocks[::-1])})
    assert two.new_bytes == 0


def test_weights_that_changed_little_are_deltas(scene: Scene) -> None:
    old = weights()
    one = scene.save({"w": old.tobytes()})
    assert set(codecs(one)) == {"planes"}
    two = scene.save({"w": nudged(old).tobytes()})
    assert codecs(two).count("delta") == len(one.manifest.chunks)
    assert sum(two.sizes[digest] for digest in two.packs) < 0.15 * two.manifest.total_bytes
    for chunk in two.manifest.chunks:
        if chunk.base is not None:
            assert two.manifest.chunks[chunk.base].codec != "delta"


def test_a_delta_is_never_taken_to_a_delta(scene: Scene) -> None:
    """The third one takes the base of the second, while that is here and pays; then it is stored whole."""
    old = weights()
    one = scene.save({"w": old.tobytes()})
    second = nudged(old)
    scene.save({"w": second.tobytes()})
    third = nudged(second)
    three = scene.save({"w": third.tobytes()})
    assert "delta" in codecs(three)
    bases = {three.manifest.chunks[chunk.base].blake3 for chunk in three.manifest.chunks if chunk.base is not None}
    assert bases <= {chunk.blake3 for chunk in one.manifest.chunks}
    scene.kept.segments.clear()
    four = scene.save({"w": nudged(third).tobytes()})
    assert set(codecs(four)) == {"planes"}


def test_a_delta_that_did_not_change_is_named_with_its_base(scene: Scene) -> None:
    old = weights()
    scene.save({"w": old.tobytes()})
    new = nudged(old)
    two = scene.save({"w": new.tobytes()})
    three = scene.save({"w": new.tobytes(), "x": b"1"})
    assert three.new_bytes == 1
    assert codecs(three).count("delta") == codecs(two).count("delta")


def test_what_is_stored_is_not_encoded_again(scene: Scene) -> None:
    files = {"w": weights().tobytes(), "v": weights().tobytes()}
    assert scene.save(files).encode_s > 0
    assert scene.save(files).encode_s == 0


def test_a_tensor_of_another_size_is_no_base(scene: Scene) -> None:
    old = weights(100_000)
    scene.save({"w": old[:30_000].tobytes()})
    assert "delta" not in codecs(scene.save({"w": nudged(old)[:29_999].tobytes()}))
    assert "delta" not in codecs(scene.save({"w": nudged(old)[:30_001].tobytes()}))


def test_a_base_whose_file_changed_is_not_used(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    old = weights()
    scene.save({"w": old.tobytes()})
    place = scene.root / "checkpoint-1" / "w"
    damaged = bytearray(place.read_bytes())
    damaged[100_001] ^= 1
    place.write_bytes(damaged)
    local = scene.save({"w": nudged(old).tobytes()})
    assert codecs(local).count("planes") >= 1
    assert "no longer has the bytes" in caplog.text


def test_a_base_whose_file_is_gone_is_not_used(scene: Scene) -> None:
    old = weights()
    scene.save({"w": old.tobytes()})
    (scene.root / "checkpoint-1" / "w").write_bytes(b"short")
    assert "delta" not in codecs(scene.save({"w": nudged(old).tobytes()}))
    (scene.root / "checkpoint-2" / "w").unlink()
    assert "delta" not in codecs(scene.save({"w": nudged(old).tobytes()}))


def test_on_a_fast_line_all_is_raw(scene: Scene) -> None:
    old = weights()
    scene.save({"w": old.tobytes()}, speed=5e9)
    assert set(codecs(scene.save({"w": nudged(old).tobytes()}, speed=5e9))) == {"raw"}


def test_packs_that_are_gone_are_not_named_again(scene: Scene) -> None:
    base, other = os.urandom(500_000), os.urandom(500_000)
    one = scene.save({"base": base})
    two = scene.save({"base": base, "other": other})
    scene.known.forget(one.packs)
    three = scene.save({"base": base, "other": other})
    assert three.new_bytes == 500_000, "only what lay in them"
    assert set(two.packs) <= {pack.blake3 for pack in three.manifest.packs}
    assert len(three.manifest.packs) == 2


def test_with_its_base_a_delta_is_gone(scene: Scene) -> None:
    old = weights()
    one = scene.save({"w": old.tobytes()})
    new = nudged(old)
    two = scene.save({"w": new.tobytes()})
    scene.known.forget(one.packs)
    three = scene.save({"w": new.tobytes()})
    assert set(codecs(three)) == {"planes"}
    assert three.new_bytes == two.new_bytes


def test_what_crowds_a_checkpoint_is_written_anew(scene: Scene) -> None:
    parts = {f"part-{index:02}": os.urandom(70_000) for index in range(20)}
    saved: dict[str, bytes] = {}
    most = 0
    for name, data in parts.items():
        saved[name] = data
        local = scene.save(dict(saved))
        most = max(most, len(local.manifest.packs))
    assert 8 < most <= 12, "one pack more with each checkpoint, until there are too many"
    assert len(local.manifest.packs) <= 10
    assert local.new_bytes < local.manifest.total_bytes


def test_a_base_lies_in_the_manifest_once_though_files_have_it_too(scene: Scene) -> None:
    old = weights()
    scene.save({"w": old.tobytes()})
    local = scene.save({"w": nudged(old).tobytes(), "average": old.tobytes()})
    assert "delta" in codecs(local)
    assert len({chunk.blake3 for chunk in local.manifest.chunks}) == len(local.manifest.chunks)


def test_no_deltas_where_their_bases_would_burst_the_manifest(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    old = weights()
    one = scene.save({"w": old.tobytes()})
    new = nudged(old)
    two = scene.save({"w": new.tobytes()})
    assert "delta" in codecs(two)
    monkeypatch.setattr(manifest_builder, "MAX_CHUNKS", len(one.manifest.chunks) * 2 - 1)
    assert "delta" not in codecs(scene.save({"w": new.tobytes()})), "nor are those named that are stored"
    assert "delta" not in codecs(scene.save({"w": nudged(new).tobytes()}))


def test_a_full_disk_costs_the_encoding_only(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(source_files.os, "pwrite", full)
        local = scene.save({"w": weights().tobytes()})
    assert set(codecs(local)) == {"raw"}


def test_what_encoding_does_not_shrink_stays_as_it_is(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample may promise too much."""
    monkeypatch.setattr(chunk_encoder, "choose_codec", lambda *_, **__: CodecChoice("planes", 4))
    assert set(codecs(scene.save({"noise": os.urandom(100_000)}))) == {"raw"}


def test_the_spool_is_removed(scene: Scene) -> None:
    (scene.root / "c").mkdir()
    (scene.root / "c" / "w").write_bytes(weights().tobytes())
    local = scene.build(scene.root / "c")
    assert len(list((scene.root / "spool").iterdir())) == 1
    local.close()
    local.close()
    assert list((scene.root / "spool").iterdir()) == []


def test_the_spool_is_removed_if_it_goes_wrong(scene: Scene) -> None:
    (scene.root / "c").mkdir()
    (scene.root / "c" / "w").write_bytes(weights().tobytes())
    scene.step = -1
    with pytest.raises(Exception, match="cannot be a checkpoint"):
        scene.build(scene.root / "c")
    assert list((scene.root / "spool").iterdir()) == []
