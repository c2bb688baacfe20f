"""Zips from strangers."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import threading
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_client.checkpoints import legacy_zip
from gpu_client.checkpoints.legacy_zip import BadZip, unpack
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
    with pytest.raises(BadZip, match="at most 0 are allowed"):
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
    """It would be reported as such, and a sound checkpoint given up."""

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
    """Anything else that Python's zip reader raises would pass for a faulty machine."""
    place = tmp_path_factory.mktemp("zip")
    write(place / "z", ("archive/ü", b"weights" * 50), ("b", b"b" * 100), method=method)
    packed = bytearray((place / "z").read_bytes())
    for where, value in changes:
        packed[where % len(packed)] = value
    (place / "z").write_bytes(packed)
    with suppress(BadZip):
        unpack(place / "z", place / "out")


def _listing(entries: int, *, said: int | None = None, large: bool = False) -> bytes:
    """A zip that holds nothing but its list of files, which says that it has `said` entries."""
    said = entries if said is None else said
    listed = b"".join(
        struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0) + b"%05d" % at
        for at in range(entries)
    )
    end = b""
    if large:
        end += struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, said, said, len(listed), 0)
        end += struct.pack("<4sLQL", b"PK\6\7", 0, len(listed), 1)
    count, size = (0xFFFF, 0xFFFFFFFF) if large else (said, len(listed))
    return listed + end + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, 0, 0)


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (_listing(10_001), "has 10001 entries; at most 10000 are allowed"),
        (_listing(70_000, large=True), "has 70000 entries"),
        (_listing(201_000, said=1), "its list of files takes 10352000 bytes; at most 10240000 are allowed"),
    ],
    ids=["too many", "more than 16 bits can say", "more than it says"],
)
def test_a_list_of_very_many_files_is_refused_unread(
    tmp_path: Path, archive: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "many.zip").write_bytes(archive)

    def read(*_: object) -> None:
        raise AssertionError("the list was read")

    monkeypatch.setattr(zipfile, "ZipFile", read)
    with pytest.raises(BadZip, match=message):
        unpack(tmp_path / "many.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists()
