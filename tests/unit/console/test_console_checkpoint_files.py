"""Files of a checkpoint in the browser's code: every codec, the ranges that a file needs, and every kind of damage."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from blake3 import blake3

from baton.contract.checkpoints.manifest import Codec, Manifest, Pack
from cdk import NODE
from gpu_client.checkpoints.format.codecs import encode
from tests.kits.files.declared_files import pack_of

SOURCES = Path(__file__).parents[3] / "console" / "src"
RUNNER = Path(__file__).with_name("checkpoint_files.mjs")
JOB = "146683a1-cb76-4702-9fef-fcccd32594f1"
RANDOM = np.random.default_rng(5)
FAR = bytes(2 * 2**20)
BOMB_BYTES = 2**30
"""Bytes between two chunks of a pack that are further apart than one request reads in vain."""


def weights(count: int, tail: bytes = b"") -> bytes:
    return RANDOM.normal(0, 0.02, count).astype(np.float32).tobytes() + tail


class Checkpoint:
    """Checkpoint that is built by hand: chunks of every codec in two packs."""

    def __init__(self) -> None:
        self.chunks: list[dict[str, Any]] = []
        self.raw: list[bytes] = []
        self.packs = [bytearray(), bytearray()]
        self.files: dict[str, list[int]] = {}

    def chunk(self, raw: bytes, codec: Codec = "raw", *, pack: int = 0, width: int = 1, base: int | None = None) -> int:
        stored = encode(codec, raw, width=width, base=None if base is None else self.raw[base])
        place = {} if codec == "zeros" else {"pack": pack, "offset": len(self.packs[pack]), "length_bytes": len(stored)}
        self.packs[pack] += stored
        self.chunks.append(
            {"blake3": blake3(raw).hexdigest(), "size_bytes": len(raw), "codec": codec, "width": width, "base": base}
            | place
        )
        self.raw.append(raw)
        return len(self.raw) - 1

    def bomb(self) -> int:
        """Add a chunk of 100 bytes whose frame has 1 GiB."""
        compressor = zstandard.ZstdCompressor().compressobj(size=BOMB_BYTES)
        piece = bytes(2**24)
        pieces = [compressor.compress(piece) for _ in range(BOMB_BYTES // len(piece))]
        stored = b"".join([*pieces, compressor.flush()])
        place = {"pack": 0, "offset": len(self.packs[0]), "length_bytes": len(stored)}
        self.packs[0] += stored
        self.raw.append(b"z" * 100)
        self.chunks.append(
            {"blake3": blake3(self.raw[-1]).hexdigest(), "size_bytes": 100, "codec": "planes", "width": 1, **place}
        )
        return len(self.raw) - 1

    def content(self, path: str) -> bytes:
        return b"".join(self.raw[index] for index in self.files[path])

    def document(self) -> dict[str, Any]:
        files = [
            {"path": path, "size_bytes": len(self.content(path)), "chunks": chunks}
            for path, chunks in self.files.items()
        ]
        packs = [Pack.model_validate(pack_of(bytes(pack))).model_dump() for pack in self.packs]
        return {
            "version": 2, "job_id": JOB, "step": 40, "epoch": 1, "packs": packs, "chunks": self.chunks, "files": files,
        }  # fmt: skip


def made() -> Checkpoint:
    one = Checkpoint()
    # The base of the delta is in no file, and behind the delta's place in the plan.
    old = one.chunk(weights(5000), "planes", pack=1, width=4)
    changed = bytearray(one.raw[old])
    changed[::400] = bytes(len(changed[::400]))
    delta = one.chunk(bytes(changed), "delta", width=4, base=old)
    zeros = one.chunk(bytes(70_000), "zeros")
    sparse = bytearray(70_000)
    sparse[7] = 1
    from_zeros = one.chunk(bytes(sparse), "delta", width=2, base=zeros)
    widths = [one.chunk(weights(3000, b"end"[:width]), "planes", width=width) for width in (1, 2, 4, 8)]
    noise = one.chunk(RANDOM.bytes(70_001))
    large = one.chunk(bytes(2**20) + b"x", "planes")
    text = one.chunk(b"text" * 9, "planes")
    one.packs[0] += FAR
    last = one.chunk(RANDOM.bytes(3000))
    one.files = {
        "model.safetensors": [delta, zeros, noise, *widths, zeros, from_zeros, noise],
        "large.bin": [large],
        "sub/mit ä.txt": [text],
        "both.bin": [text, last],
        "empty": [],
        "bomb": [one.bomb()],
    }
    return one


CHECKPOINT = made()
DOCUMENT = CHECKPOINT.document()
PATHS = [path for path in CHECKPOINT.files if path != "bomb"]
DAMAGE: list[tuple[dict[str, Any], str]] = [
    ({"altered": 9}, r"Chunk [0-9a-f]{12} does not match its BLAKE3"),
    ({"cut": 100}, r"Pack [0-9a-f]{12} is shorter than the \d+ bytes"),
    ({"cut": 0}, "is shorter than"),
    ({"gone": True}, r"Pack [0-9a-f]{12} is missing in the store"),
    ({"expired_rounds": 99}, "the object store answered 403"),
    ({"answers": [503] * 9}, "the object store answered 503"),
    ({"answers": ["broken"] * 9}, "did not answer, or does not permit this page"),
    ({"answers": [200]}, "whole packs in place of ranges"),
    ({"manifest": json.dumps(DOCUMENT) + " "}, "The manifest of the checkpoint does not match its digest"),
    ({"manifest": " " * (16 * 2**20 + 1)}, "more than the expected 16777216 bytes"),
]


def spoiled(change: Callable[[dict[str, Any]], object]) -> str:
    document = json.loads(json.dumps(DOCUMENT))
    change(document)
    return json.dumps(document)


MALFORMED: list[tuple[str, str]] = [
    ("{", "not JSON"),
    ("null", "version undefined"),
    (spoiled(lambda one: one.update(version=3)), "version 3; this page reads version 2"),
    (spoiled(lambda one: one.update(job_id="other")), "job_id is other"),
    (spoiled(lambda one: one.update(epoch=2)), "epoch is 2"),
    (spoiled(lambda one: one.pop("packs")), "no packs"),
    (spoiled(lambda one: one["packs"][0].update(size_bytes=9)), "does not lie in its pack"),
    (spoiled(lambda one: one["packs"][0].update(blake3="../x")), "a pack is malformed"),
    (spoiled(lambda one: one["chunks"][0].update(pack=2)), "does not lie in its pack"),
    (spoiled(lambda one: one["chunks"][0].update(offset=-1)), "does not lie in its pack"),
    (spoiled(lambda one: one["chunks"][0].update(codec="gzip")), "the codec gzip"),
    (spoiled(lambda one: one["chunks"][0].update(width=3)), "a chunk is malformed"),
    (spoiled(lambda one: one["chunks"][0].update(size_bytes=2**31)), "a chunk is malformed"),
    (spoiled(lambda one: one["chunks"][0].update(pack=None)), "does not fit its codec"),
    (spoiled(lambda one: one["chunks"][1].update(base=3)), "no fitting base"),
    (spoiled(lambda one: one["chunks"][1].update(base=99)), "no fitting base"),
    (spoiled(lambda one: one["files"][0]["chunks"].append(99)), "an unknown chunk"),
    (spoiled(lambda one: one["files"][0]["chunks"].pop()), "do not add up"),
    (spoiled(lambda one: one["files"][0].update(path=7)), "a file is malformed"),
]
NAMES = {
    "model.safetensors": "model.safetensors",
    "unet/config ä+1%.json": "config ä+1%.json",
    "a/..\\..\\b": "__.._b",
    "a/..": "_",
    "a/.profile": "_profile",
    "a/name. ": "name_",
    "a/C:x": "C_x",
    'a/<b>|"?*': "_b_____",
    "a/\u202egpj.exe": "_gpj.exe",
    "a/\x00x\n": "_x_",
    "a/": "file",
}
CASES: list[dict[str, Any]] = [
    *({"path": path} for path in PATHS),
    *({"path": "both.bin", "faults": faults} for faults, _ in DAMAGE),
    {"path": "bomb"},
    {"path": "model.safetensors", "faults": {"altered": 1}},
    {"path": "model.safetensors", "faults": {"expired_rounds": 1}},
    {"path": "both.bin", "faults": {"answers": [503, "broken"]}},
    {"path": "both.bin", "faults": {"late": True}},
    {"path": "both.bin", "faults": {"cancel": True}},
]
BOMB, ONCE_ALTERED, EXPIRED, OVERLOADED, LATE, CANCELED = range(-6, 0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    stored = Manifest.model_validate(DOCUMENT).canonical_bytes()
    encoded = [base64.b64encode(pack).decode() for pack in CHECKPOINT.packs]
    document = {
        "manifest": stored.decode(),
        "digest": blake3(stored).hexdigest(),
        "packs": {pack["blake3"]: data for pack, data in zip(DOCUMENT["packs"], encoded, strict=True)},
        "cases": CASES,
        "manifests": [text for text, _ in MALFORMED],
        "paths": list(NAMES),
    }
    path = tmp_path_factory.mktemp("checkpoint") / "input.json"
    path.write_text(json.dumps(document))
    line = [str(NODE), str(RUNNER), str(SOURCES), str(path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def data_of(answer: dict[str, Any]) -> bytes:
    assert "error" not in answer, answer["error"]
    return base64.b64decode(answer["data"])


@pytest.mark.parametrize("place", range(len(PATHS)), ids=PATHS)
def test_every_codec_gives_the_bytes_of_the_file(results: dict[str, Any], place: int) -> None:
    answer = results["answers"][place]
    assert data_of(answer) == CHECKPOINT.content(PATHS[place])
    size = len(CHECKPOINT.content(PATHS[place]))
    if size:
        assert answer["progress"][-1] == {"checked": size, "total": size}


def test_only_the_ranges_that_a_file_needs_are_read_each_once(results: dict[str, Any]) -> None:
    first, second = (pack["blake3"] for pack in DOCUMENT["packs"])
    model, _, text, both, empty = results["answers"][: len(PATHS)]
    assert {one["name"] for one in model["read"]} == {first, second}
    assert [one["name"] for one in text["read"]] == [first] and text["read"][0]["size"] < 100
    # Two small requests in place of one over the megabytes between the chunks.
    assert [one["size"] for one in both["read"]] == [text["read"][0]["size"], 3000]
    assert empty["read"] == []
    assert model["asked"] == [0], "the call that names the manifest gives the URLs, too"


@pytest.mark.parametrize("place", range(len(DAMAGE)), ids=[reason for _, reason in DAMAGE])
def test_damage_is_refused_with_its_place(results: dict[str, Any], place: int) -> None:
    answer = results["answers"][len(PATHS) + place]
    error = answer.get("error", "")
    assert error.endswith("Nothing was saved.")
    assert re.search(DAMAGE[place][1], error), error
    assert len(answer["read"]) <= 5


def test_a_frame_takes_no_more_memory_than_its_chunk(results: dict[str, Any]) -> None:
    assert "does not match its BLAKE3" in results["answers"][BOMB]["error"]
    # Below the 1,024 MiB of the frame. The process also holds what the other downloads left to the garbage collector.
    assert results["peak_mib"] < 800


def test_a_fault_of_the_way_is_tried_again(results: dict[str, Any]) -> None:
    answers = results["answers"]
    assert data_of(answers[ONCE_ALTERED]) == CHECKPOINT.content("model.safetensors")
    assert data_of(answers[OVERLOADED]) == CHECKPOINT.content("both.bin")


def test_expired_urls_are_asked_for_again(results: dict[str, Any]) -> None:
    answers = results["answers"]
    assert data_of(answers[EXPIRED]) == CHECKPOINT.content("model.safetensors")
    assert answers[EXPIRED]["asked"] == [0, 2], "for the packs of the file alone"
    assert data_of(answers[LATE]) == CHECKPOINT.content("both.bin")
    assert answers[LATE]["asked"] == [0, 1] and len(answers[LATE]["read"]) == 2, "before the store refuses"


def test_a_canceled_download_ends(results: dict[str, Any]) -> None:
    answer = results["answers"][CANCELED]
    assert answer["error"].startswith("AbortError") and len(answer["read"]) == 1


@pytest.mark.parametrize("place", range(len(MALFORMED)), ids=[reason for _, reason in MALFORMED])
def test_a_manifest_that_cannot_be_assembled_is_refused(results: dict[str, Any], place: int) -> None:
    assert MALFORMED[place][1] in (results["faults"][place] or "")


def test_the_name_of_a_saved_file_leads_nowhere(results: dict[str, Any]) -> None:
    assert dict(zip(NAMES, results["names"], strict=True)) == NAMES
