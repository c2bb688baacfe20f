"""Zips of untrusted clients."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import threading
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_client.checkpoints.format import legacy_zip
from gpu_client.checkpoints.format.legacy_zip import BadZip, unpack
from gpu_client.transport.errors import DiskFull, TransferCanceled

METHODS = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "in.zip"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def write(archive: Path, *entries: tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(archive, "w", method) as made:
        for name, data in entries:
            made.writestr(name, data)


@pytest.mark.parametrize("method", METHODS)
def test_unpacked_as_it_was_packed(archive: Path, out: Path, method: int) -> None:
    write(archive, ("dir/", b""), ("dir/a", b"a" * 10_000), ("b", b""), method=method)
    assert unpack(archive, out) == 10_000
    assert (out / "dir/a").read_bytes() == b"a" * 10_000
    assert sorted(path.name for path in out.rglob("*")) == ["a", "b", "dir"]


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "a/../../evil", "a\\..\\evil", "C:/x/../evil", "a//evil", "e\nvil"]
)
def test_zip_slip_is_refused_before_anything_is_written(archive: Path, out: Path, tmp_path: Path, name: str) -> None:
    write(archive, ("good", b"g"), (name, b"e"))
    with pytest.raises(BadZip):
        unpack(archive, out)
    assert list(tmp_path.iterdir()) == [archive]


def test_a_nul_in_a_name_does_not_hide_the_rest(archive: Path, out: Path) -> None:
    write(archive, ("good_______", b"g"))
    archive.write_bytes(archive.read_bytes().replace(b"good_______", b"a\0/../../ev"))
    with pytest.raises(BadZip):
        unpack(archive, out)


def test_links_are_refused(archive: Path, out: Path) -> None:
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    write(archive, (link, b"/etc/passwd"))
    with pytest.raises(BadZip, match="not a regular file"):
        unpack(archive, out)


def test_bombs_are_refused_by_what_they_say_and_by_what_they_do(archive: Path, out: Path) -> None:
    write(archive, ("a", b"\0" * 100_000))
    with pytest.raises(BadZip, match="100000 bytes"):
        unpack(archive, out, max_bytes=99_999)
    with pytest.raises(BadZip, match="1 files; 1 to 0 are allowed"):
        unpack(archive, out, max_entries=0)
    # the sizes in the archive are made smaller than what it unpacks to
    packed = archive.read_bytes()
    archive.write_bytes(packed.replace(struct.pack("<I", 100_000), struct.pack("<I", 10)))
    with pytest.raises(BadZip):
        unpack(archive, out, max_bytes=1000)
    assert not list(out.rglob("a"))


def test_too_large_for_this_machine_is_a_full_disk_not_damage(archive: Path, out: Path) -> None:
    write(archive, ("a", b"\0" * 100_000))
    with pytest.raises(DiskFull):
        unpack(archive, out, available_bytes=1000)


def test_a_disk_that_fills_up(archive: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    write(archive, ("a", b"a"))
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFull):
        unpack(archive, out)


@pytest.mark.parametrize("where", range(0, 200, 7))
def test_any_flipped_byte_is_noticed_or_harmless(archive: Path, out: Path, where: int) -> None:
    write(archive, ("some/name.bin", os.urandom(60)))
    packed = bytearray(archive.read_bytes())
    original = zipfile.ZipFile(archive).read("some/name.bin")
    packed[where % len(packed)] ^= 0x55
    archive.write_bytes(packed)
    try:
        unpack(archive, out)
    except BadZip:
        return
    assert [path.read_bytes() for path in out.rglob("*") if path.is_file()] == [original]


def test_truncated_empty_and_encrypted(archive: Path, out: Path) -> None:
    write(archive, ("a", os.urandom(1000)))
    whole = archive.read_bytes()
    for damaged in (whole[:500], whole[:-5], b"", b"no zip"):
        archive.write_bytes(damaged)
        with pytest.raises(BadZip):
            unpack(archive, out)
    write(archive)
    with pytest.raises(BadZip, match="0 files"):
        unpack(archive, out)
    write(archive, ("a", b"a"))
    packed = bytearray(archive.read_bytes())
    packed[packed.index(b"PK\x01\x02") + 8] |= 1
    archive.write_bytes(packed)
    with pytest.raises(BadZip, match="encrypted"):
        unpack(archive, out)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_twice_the_same_name_and_file_as_directory(archive: Path, out: Path) -> None:
    write(archive, ("a", b"1"), ("a", b"2"))
    with pytest.raises(BadZip, match="twice"):
        unpack(archive, out)
    write(archive, ("b", b"1"), ("b/c", b"2"))
    with pytest.raises(BadZip):
        unpack(archive, out)


def test_canceled(archive: Path, out: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    write(archive, ("a", b"a"))
    with pytest.raises(TransferCanceled):
        unpack(archive, out, cancel=cancel)
    assert not list(out.rglob("a"))


@pytest.mark.parametrize("method", METHODS)
def test_damage_is_damage_whatever_the_method(archive: Path, out: Path, method: int) -> None:
    """Python's bz2 says OSError and its lzma an error of its own: both passed for a faulty machine, everywhere."""
    data = bytes(range(256)) * 20
    write(archive, ("a", data), method=method)
    packed = archive.read_bytes()
    raised = 0
    for where in range(40, len(packed) - 10, max(1, len(packed) // 100)):
        damaged = bytearray(packed)
        damaged[where] ^= 0x55
        archive.write_bytes(damaged)
        shutil.rmtree(out, ignore_errors=True)
        try:
            unpack(archive, out)
        except BadZip:
            raised += 1
        else:
            assert [path.read_bytes() for path in out.rglob("*") if path.is_file()] == [data]
    assert raised > 10


def test_an_offset_that_leads_nowhere_is_damage(archive: Path, out: Path) -> None:
    write(archive, ("a", b"a" * 100))
    packed = bytearray(archive.read_bytes())
    directory = packed.index(b"PK\x01\x02")
    packed[directory + 42 : directory + 46] = b"\xff\xff\xff\x7f"  # where the file is said to begin
    archive.write_bytes(packed)
    with pytest.raises(BadZip):
        unpack(archive, out)


def test_a_bug_of_ours_is_not_taken_for_damage(archive: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in our own code passes through unchanged: reported as damage, it would cost a sound checkpoint."""

    def bug(*_: object, **__: object) -> Path:
        raise ValueError("a bug")

    write(archive, ("a", b"a"))
    monkeypatch.setattr(legacy_zip, "safe_destination", bug)
    with pytest.raises(ValueError, match="a bug"):
        unpack(archive, out)


def test_an_entry_without_a_name_is_damage(tmp_path: Path) -> None:
    write(tmp_path / "z", ("b", b"x"))
    packed = (tmp_path / "z").read_bytes()
    at = packed.rindex(b"PK\x01\x02")
    # The name has the first letter NUL: Python's reader cuts names there.
    (tmp_path / "z").write_bytes(packed[: at + 46] + b"\0" + packed[at + 47 :])
    with pytest.raises(BadZip):
        unpack(tmp_path / "z", tmp_path / "out")


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=5), st.sampled_from(METHODS)
)
def test_whatever_is_damaged_is_said_in_one_way(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], method: int
) -> None:
    """Any damage of a ZIP raises BadZip: another exception would count as a node fault."""
    place = tmp_path_factory.mktemp("zip")
    write(place / "z", ("archive/ü", b"weights" * 50), ("b", b"b" * 100), method=method)
    packed = bytearray((place / "z").read_bytes())
    for where, value in changes:
        packed[where % len(packed)] = value
    (place / "z").write_bytes(packed)
    with suppress(BadZip):
        unpack(place / "z", place / "out")


LISTED = struct.Struct("<4s6H3L5H2L")


def _listed(entries: int) -> bytes:
    """A list of that many files, each entry as short as one with a name can be."""
    entry = LISTED.pack(b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0)
    return b"".join(entry + b"%05x" % at for at in range(entries))


def _end(entries: int, list_bytes: int, *, disks: bytes = bytes(4), comment: bytes = b"") -> bytes:
    """The last record. Its number of entries has 16 bits, and may be a lie."""
    count = entries & 0xFFFF
    return struct.pack("<4s4s2H2LH", b"PK\5\6", disks, count, count, list_bytes, 0, len(comment)) + comment


def _large_end(entries: int, list_bytes: int) -> bytes:
    """The two records that a large archive has before its last one."""
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, entries, entries, list_bytes, 0)
    return record + struct.pack("<4sLQL", b"PK\6\7", 0, list_bytes, 1)


def _plain(entries: int) -> bytes:
    listed = _listed(entries)
    return listed + _end(entries, len(listed))


def _says_one(entries: int) -> bytes:
    listed = _listed(entries)
    return listed + _end(1, len(listed))


def _large(entries: int) -> bytes:
    listed = _listed(entries)
    return listed + _large_end(entries, len(listed)) + _end(0xFFFF, 0xFFFFFFFF)


def _large_behind_a_small_end(entries: int) -> bytes:
    """Python follows the locator and ignores the values of the last record."""
    listed = _listed(entries)
    return listed + _large_end(entries, len(listed)) + _end(1, 51)


def _large_with_a_decoy(entries: int) -> bytes:
    """A search from behind meets a record of one entry in the last record's comment."""
    listed = _listed(entries)
    decoy = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, 51, 0)
    return listed + _large_end(entries, len(listed)) + _end(0xFFFF, 0xFFFFFFFF, comment=decoy)


def _end_in_the_end(entries: int) -> bytes:
    """The last 22 bytes are a sound record, in whose numbers of disks a search from behind meets another one."""
    listed = _listed(entries)
    return listed + _end(entries, len(listed), disks=b"PK\5\6")


def _end_in_the_comment(entries: int) -> bytes:
    """A search from behind meets a record of one entry in the last one's comment."""
    listed = _listed(entries)
    return listed + _end(entries, len(listed), comment=_end(1, 51, comment=b"c"))


TRICKS = [
    _plain, _says_one, _large, _large_behind_a_small_end, _large_with_a_decoy, _end_in_the_end, _end_in_the_comment,
]  # fmt: skip
MOST_MEMORY_BYTES = 40 * 2**20
"""A list takes 10 MB at most, names in Python up to twice as much, and objects 5 MB."""


@pytest.mark.parametrize("entries", [10_001, 201_000, 250_000])
@pytest.mark.parametrize("made", TRICKS, ids=lambda made: made.__name__)
def test_a_list_of_very_many_files_is_refused_before_they_are_objects(
    tmp_path: Path, made: Callable[[int], bytes], entries: int
) -> None:
    (tmp_path / "many.zip").write_bytes(made(entries))
    tracemalloc.start()
    try:
        with pytest.raises(BadZip):
            unpack(tmp_path / "many.zip", tmp_path / "out")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < MOST_MEMORY_BYTES
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [b"\xb0" * 978, b"\0" + b"\xb0" * 977, b"x" * 978])
def test_the_largest_list_that_is_allowed_takes_little_memory(tmp_path: Path, name: bytes) -> None:
    """The largest permitted list takes little memory, even with names whose letters take two bytes each."""
    entry = LISTED.pack(b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0, 0, 0, 0, 0, 0) + name
    (tmp_path / "large.zip").write_bytes(entry * 10_000 + _end(10_000, len(entry) * 10_000))
    tracemalloc.start()
    try:
        with pytest.raises(BadZip):
            unpack(tmp_path / "large.zip", tmp_path / "out")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < MOST_MEMORY_BYTES


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (_plain(10_001), "has 10001 entries; at most 10000 are allowed"),
        (_large(70_000), "has 70000 entries"),
        (_says_one(201_000), "its list of files has more than 10240000 bytes, the most that are allowed"),
    ],
    ids=["too many", "more than 16 bits can say", "more than it says"],
)
def test_a_list_of_very_many_files_is_refused_with_the_reason(tmp_path: Path, archive: bytes, message: str) -> None:
    (tmp_path / "many.zip").write_bytes(archive)
    with pytest.raises(BadZip, match=message):
        unpack(tmp_path / "many.zip", tmp_path / "out")


def test_as_many_files_as_are_allowed_are_unpacked(archive: Path, out: Path) -> None:
    write(archive, *((f"file {number}", b"PK\1\2") for number in range(100)), method=zipfile.ZIP_STORED)
    assert unpack(archive, out, max_entries=100) == 400
    with pytest.raises(BadZip, match="has 100 files; 1 to 99 are allowed"):
        unpack(archive, out, max_entries=99)


def test_what_a_file_holds_is_not_taken_for_a_list_of_files(archive: Path, out: Path) -> None:
    data = b"PK\1\2" * 20_000
    write(archive, ("a", data), method=zipfile.ZIP_STORED)
    with zipfile.ZipFile(archive, "a") as made:
        made.comment = b"Python looks for the last record in all of the archive's end then, data included"
    assert unpack(archive, out) == len(data)
    assert (out / "a").read_bytes() == data
