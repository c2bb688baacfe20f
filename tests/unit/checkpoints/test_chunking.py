"""Cuts of files: exact cover, at tensor boundaries, for headers of any content."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_client.checkpoints.format import chunking
from gpu_client.checkpoints.format.chunking import MAX_SPAN_BYTES, MAX_SPANS_PER_FILE, MIN_SPAN_BYTES, Span, cut_spans

KIB = 1024
MIB = 1024 * KIB


def safetensors(path: Path, tensors: list[tuple[str, str, int]], *, lie: dict[str, object] | None = None) -> Path:
    """A sparse file with tensors of so many bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, size_bytes in tensors:
        header[name] = {"dtype": dtype, "shape": [1], "data_offsets": [end, end + size_bytes]}
        end += size_bytes
    text = json.dumps({**header, **(lie or {})}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path


def spans(path: Path, **more: int) -> list[Span]:
    found = cut_spans(path, path.stat().st_size, **more)
    require_cover(found, path.stat().st_size)
    return found


def require_cover(found: list[Span], size_bytes: int) -> None:
    end = 0
    for span in found:
        assert span.offset == end
        assert span.size_bytes > 0
        end = span.end
    assert end == size_bytes


def start_of_data(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_tensors_are_cut_out_and_small_ones_grouped_but_never_with_a_big_one(tmp_path: Path) -> None:
    path = safetensors(
        tmp_path / "m",
        [("a", "F32", 100 * KIB), ("b", "BF16", 30 * KIB), ("c", "BF16", 10 * KIB), ("d", "BF16", 20 * MIB)],
    )
    start = start_of_data(path)
    assert [(span.offset - start, span.size_bytes, span.width) for span in spans(path)] == [
        (-start, start, None),
        (0, 100 * KIB, 4),
        (100 * KIB, 40 * KIB, 2),
        (140 * KIB, 8 * MIB, 2),
        (140 * KIB + 8 * MIB, 8 * MIB, 2),
        (140 * KIB + 16 * MIB, 4 * MIB, 2),
    ]


def test_groups_end_at_the_smallest_size_and_have_a_width_only_if_all_agree(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "m", [(str(index), "F32" if index < 4 else "I64", 30 * KIB) for index in range(7)])
    found = spans(path)
    assert [span.width for span in found] == [None, None, 8]
    assert all(MIN_SPAN_BYTES <= span.size_bytes < 2 * MIN_SPAN_BYTES for span in found[:-1])


def test_a_change_in_one_tensor_moves_no_other_border(tmp_path: Path) -> None:
    tensors = [("base", "F32", 3 * MIB), ("lora", "F32", 20 * KIB), ("base2", "F32", 5 * MIB)]
    assert spans(safetensors(tmp_path / "1", tensors)) == spans(safetensors(tmp_path / "2", tensors))


def test_records_of_torch_files_are_cut_out(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.pt"
    data = {"archive/data.pkl": b"p" * 900, "archive/data/0": b"x" * (3 * MIB), "archive/data/1": b"y" * (200 * KIB)}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in data.items():
            info = zipfile.ZipInfo(name)
            info.extra = b"FB" + struct.pack("<H", 40) + b"Z" * 40  # as torch aligns them: in the local header only
            archive.writestr(info, content)
    whole = path.read_bytes()
    cut = [whole[span.offset : span.end] for span in spans(path)]
    assert data["archive/data/0"] in cut
    assert data["archive/data/1"] in cut


def test_real_torch_files(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.randn(300, 1000), torch.randn(70, 1000)]
    torch.save({"state": tensors, "step": 7}, tmp_path / "o.pt")
    whole = (tmp_path / "o.pt").read_bytes()
    cut = [whole[span.offset : span.end] for span in spans(tmp_path / "o.pt")]
    assert all(tensor.numpy().tobytes() in cut for tensor in tensors)


@pytest.mark.parametrize(
    ("size_bytes", "block_bytes"), [(1, 1), (64 * KIB, 64 * KIB), (17 * MIB, 128 * KIB), (3 * 1024 * MIB, 8 * MIB)]
)
def test_other_files_are_cut_into_blocks_of_one_size(tmp_path: Path, size_bytes: int, block_bytes: int) -> None:
    with (tmp_path / "f").open("wb") as file:
        file.truncate(size_bytes)
    found = spans(tmp_path / "f")
    assert found[0].size_bytes == block_bytes
    assert all(span.size_bytes == block_bytes and span.width is None for span in found[:-1])


def test_an_empty_file_has_no_spans(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    assert spans(tmp_path / "f") == []


@pytest.mark.parametrize(
    "lie",
    [
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 10**15]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [10, 200]}},  # overlaps
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [-5, 1]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [9, 1]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0.5, 1]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [1]}},
        {"x": {"dtype": 4, "shape": [1], "data_offsets": [0, 1]}},
        {"x": {"shape": [1]}},
        {"x": None},
        {"a": 7},
    ],
)
def test_a_lying_header_makes_it_blocks(tmp_path: Path, lie: dict[str, object]) -> None:
    path = safetensors(tmp_path / "m", [("a", "F32", 300 * KIB)], lie=lie)
    found = spans(path)
    assert [span.size_bytes for span in found[:-1]] == [64 * KIB] * (len(found) - 1)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"{" * 50_000,
        b'{"a": ' * 50_000,
        b"{}",
        b'{"\xff": 1}',
        b"{" + b"9" * 5000 + b"}",
        b'{"__metadata__": {}}',
    ],
)
def test_a_header_that_is_no_header_makes_it_blocks(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "m").write_bytes(struct.pack("<Q", len(header)) + header + bytes(200 * KIB))
    assert spans(tmp_path / "m")[0].size_bytes == 64 * KIB
    (tmp_path / "m").write_bytes(struct.pack("<Q", 2**63) + header + bytes(200 * KIB))
    assert spans(tmp_path / "m")[0].size_bytes == 64 * KIB


def test_a_damaged_zip_makes_it_blocks(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "z", "w") as archive:
        archive.writestr("a", bytes(300 * KIB))
        archive.writestr("b", bytes(300 * KIB))
    whole = (tmp_path / "z").read_bytes()
    for damage in (whole[:-30], whole[:400_000], whole.replace(b"PK\x03\x04", b"PK\x03\x05")[4:], b"PK\x03\x04"):
        (tmp_path / "d").write_bytes(b"PK\x03\x04" + damage)
        spans(tmp_path / "d")
    local = whole.index(b"PK\x03\x04", 10)
    (tmp_path / "d").write_bytes(whole[:local] + b"XXXX" + whole[local + 4 :])
    assert spans(tmp_path / "d")[0].size_bytes == 64 * KIB


def zip_with_offset(header_offset: int) -> bytes:
    """A zip64 file of one member that is said to begin there."""
    local = b"PK\x03\x04" + struct.pack("<HHHHHIIIHH", 20, 0, 0, 0, 0, 0, 5, 5, 1, 0) + b"a" + b"hello" * 20_000
    extra = struct.pack("<HHQQQ", 1, 24, 5, 5, header_offset)
    central = b"PK\x01\x02" + struct.pack(
        "<HHHHHHIIIHHHHHII", 20, 20, 0, 0, 0, 0, 0, 2**32 - 1, 2**32 - 1, 1, len(extra), 0, 0, 0, 0, 2**32 - 1
    )
    central += b"a" + extra
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)
    return local + central + end


@pytest.mark.parametrize("header_offset", [10**6, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_member_that_begins_nowhere_makes_it_blocks(tmp_path: Path, header_offset: int) -> None:
    """The larger ones were an OverflowError or EINVAL, and the checkpoint could not be committed."""
    (tmp_path / "z").write_bytes(zip_with_offset(header_offset))
    assert spans(tmp_path / "z")[0].size_bytes == 64 * KIB
    (tmp_path / "z").write_bytes(zip_with_offset(0))
    assert spans(tmp_path / "z")[0].size_bytes != 64 * KIB, "the test's file is a zip but for that"


@pytest.mark.parametrize("damage", ["a version from the future", "a name that is not UTF-8"])
def test_what_python_says_of_damaged_zips_in_other_ways(tmp_path: Path, damage: str) -> None:
    with zipfile.ZipFile(tmp_path / "z", "w") as archive:
        archive.writestr("ü", bytes(300 * KIB))
    whole = bytearray((tmp_path / "z").read_bytes())
    central = whole.index(b"PK\x01\x02")
    if damage == "a version from the future":
        whole[central + 6] = 255
    else:
        whole[central + 46] = 0xFF
    (tmp_path / "z").write_bytes(whole)
    assert spans(tmp_path / "z")[0].size_bytes == 64 * KIB


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6), st.integers(0, 400))
def test_whatever_is_wrong_with_a_zip_it_is_covered(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], cut_bytes: int
) -> None:
    whole = bytearray(zip_with_offset(0))
    about = len(whole) - 200  # the directory, where every byte means something
    for place, value in changes:
        whole[about + place % 200] = value
    path = tmp_path_factory.mktemp("zip") / "f"
    path.write_bytes(whole[: len(whole) - max(0, cut_bytes - 200)])
    spans(path)


@given(st.lists(st.integers(0, 3 * MIN_SPAN_BYTES), max_size=30), st.integers(0, 3), st.binary(max_size=300))
def test_spans_cover_the_file_exactly(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], coarseness: int, tail: bytes
) -> None:
    path = tmp_path_factory.mktemp("cover") / "m"
    safetensors(path, [(str(index), "BF16", size) for index, size in enumerate(sizes)])
    with path.open("ab") as file:
        file.write(tail)
    found = spans(path, coarseness=coarseness)
    assert found == spans(path, coarseness=coarseness)
    smallest = MIN_SPAN_BYTES << coarseness
    for span, following in pairwise(found):
        small = span.size_bytes < smallest and following.size_bytes < smallest
        assert not small, "neighbours that are small are grouped"


@given(st.binary(max_size=2000), st.sampled_from([b"", b"PK\x03\x04", struct.pack("<Q", 40) + b"{"]))
def test_any_bytes_are_covered(tmp_path_factory: pytest.TempPathFactory, data: bytes, first: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "f"
    path.write_bytes(first + data)
    spans(path)


def test_huge_files_are_cut_more_coarsely(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file:
        try:
            file.truncate(2**40)
        except OSError:
            pytest.skip("this file system has no file of a tebibyte")
    found = spans(tmp_path / "f")
    assert len(found) <= MAX_SPANS_PER_FILE
    assert found[0].size_bytes == 2**40 // MAX_SPANS_PER_FILE


def test_a_file_of_very_many_small_tensors_is_cut_more_coarsely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunking, "MAX_SPANS_PER_FILE", 10)
    found = spans(safetensors(tmp_path / "m", [(str(index), "F32", 64 * KIB) for index in range(100)]))
    assert 5 < len(found) <= 10
    assert max(span.size_bytes for span in found) <= MAX_SPAN_BYTES


def test_a_file_that_is_shorter_than_said_is_still_covered(tmp_path: Path) -> None:
    """Spans cover the stated size of a file that has become shorter; the reader of the spans reports the change."""
    path = safetensors(tmp_path / "m", [("a", "F32", 300 * KIB)])
    size_bytes = path.stat().st_size
    os.truncate(path, size_bytes // 2)
    require_cover(cut_spans(path, size_bytes), size_bytes)
