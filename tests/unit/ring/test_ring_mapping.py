"""Test mapped files: held samples cost memory, but no descriptor."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_client.ring.core.ring import Ring
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.filesystem import DirectoryStore, map_file


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """Room for a few more than are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 24  # noqa: PTH208
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    yield few
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_samples_can_be_held_than_files_can_be_open(tmp_path: Path, few_descriptors: int) -> None:
    """Held samples keep no file descriptor; a training that held a thousand could open no other file."""
    samples = 2 * few_descriptors
    ring = Ring.make(DirectoryStore(tmp_path / "ring"), RingSettings(cap=samples))
    with RingWriter(ring, "w", threads=False) as writer:
        for number in range(samples):
            writer.put({"x": np.full(2000, number)})
    with RingReader(ring, threads=False) as reader:
        held = [reader.sample(slot) for slot in reader.newest().slots]
    assert [int(sample["x"].sum()) for sample in held] == [2000 * number for number in range(samples)]


def mappings_of(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.parametrize("size_bytes", [1, 4096, 4097, 3_000_000])
def test_what_is_mapped_is_this_process_s_own_and_is_given_back(tmp_path: Path, size_bytes: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(content := os.urandom(size_bytes))
    fd = os.open(file, os.O_RDONLY)
    view = map_file(fd, size_bytes)
    os.close(fd)
    file.unlink()
    assert view == content and not view.readonly and mappings_of(file) == 1
    array = np.frombuffer(view, np.uint8)
    array[0] ^= 1
    del view
    gc.collect()
    assert array[0] == content[0] ^ 1 and bytes(array[1:]) == content[1:]
    del array
    gc.collect()
    assert mappings_of(file) == 0


@pytest.mark.parametrize(("size_bytes", "is_aligned"), [(2 * 1024 * 1024, True), (3_000_000, True), (4097, False)])
def test_large_files_lie_where_the_system_maps_large_pages(tmp_path: Path, size_bytes: int, is_aligned: bool) -> None:
    """Reading a file for the first time took twice as long where they did not. Small ones need no room for it."""
    file = tmp_path / "file"
    file.write_bytes(content := os.urandom(size_bytes))
    fd = os.open(file, os.O_RDONLY)
    views = [map_file(fd, size_bytes) for _ in range(3)]
    os.close(fd)
    assert all(view == content for view in views)
    if is_aligned:
        assert [np.frombuffer(view, np.uint8).ctypes.data % (2 * 1024 * 1024) for view in views] == [0, 0, 0]
    del views
    gc.collect()
    assert mappings_of(file) == 0


def test_nothing_is_mapped_of_an_empty_file_and_what_cannot_be_mapped_is_told(tmp_path: Path) -> None:
    assert bytes(map_file(-1, 0)) == b""
    directory = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError) as told:
        map_file(directory, 10)
    os.close(directory)
    assert told.value.errno == errno.ENODEV


def test_where_the_system_maps_no_more_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", none_left)
    store = DirectoryStore(tmp_path / "ring")
    store.create("samples/w/1", [memoryview(b"as it was")])
    found = store.read("samples/w/1")
    assert found is not None
    found[:2] = b"XX"
    assert bytes(found) == b"XX it was" and bytes(store.read("samples/w/1") or b"") == b"as it was"
    fd = os.open(tmp_path / "ring" / "samples" / "w" / "1", os.O_RDONLY)
    with pytest.raises(OSError, match="the file ends after 9 of 10 bytes"):
        map_file(fd, 10)
    os.close(fd)
