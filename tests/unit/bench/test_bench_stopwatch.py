"""Test the bench's measures of a process, and the environment of the measured processes."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from bench.harness.local_stack import clean_environment, pinned
from bench.training.contenders import ROOT, Loop
from bench.training.stopwatch import forget_peak_memory, peak_memory_bytes, waited_for_processor_s

MIB = 2**20


def test_settings_of_a_worker_do_not_reach_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_URL", "https://example.org")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.setenv("KEPT", "yes")
    environment = clean_environment()
    assert "BATON_API_URL" not in environment
    assert "AWS_PROFILE" not in environment
    assert environment["KEPT"] == "yes"


def test_a_loop_finds_this_code_before_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    loop = Loop("name", "module", Path("data"), {}, [], {"HF_HUB_OFFLINE": "1"})
    assert loop.variables == {"PYTHONPATH": f"{ROOT}:/elsewhere", "HF_HUB_OFFLINE": "1"}
    monkeypatch.delenv("PYTHONPATH")
    assert loop.variables["PYTHONPATH"] == str(ROOT)


def test_a_command_is_left_alone_where_there_is_nothing_to_pin_to() -> None:
    assert pinned(["train", "--fast"], ()) == ["train", "--fast"]
    assert pinned(["/bin/train", "--fast"], (1,))[-2:] == ["/bin/train", "--fast"]


def test_the_wait_for_a_processor_is_the_second_number_in_nanoseconds(tmp_path: Path) -> None:
    schedstat = tmp_path / "schedstat"
    assert waited_for_processor_s(schedstat) == 0.0
    schedstat.write_text("900 2500000000 17\n")
    assert waited_for_processor_s(schedstat) == 2.5


def test_the_peak_is_read_in_kibibytes(tmp_path: Path) -> None:
    status = tmp_path / "status"
    assert peak_memory_bytes(status) == 0
    status.write_text("Name:\tpython\nVmPeak:\t 9000 kB\nVmHWM:\t 2048 kB\nVmRSS:\t 1024 kB\n")
    assert peak_memory_bytes(status) == 2 * MIB
    status.write_text("Name:\tpython\n")
    assert peak_memory_bytes(status) == 0


def filled(size_bytes: int) -> mmap.mmap:
    """Memory of its own: what tests before this one have freed may be what an allocator gives out next."""
    memory = mmap.mmap(-1, size_bytes)
    for place in range(0, size_bytes, mmap.PAGESIZE):
        memory[place] = 1
    return memory


def test_a_peak_from_before_the_loop_is_forgotten() -> None:
    with filled(64 * MIB):
        with_it = peak_memory_bytes()
    forget_peak_memory()
    before = peak_memory_bytes()
    assert with_it - before > 48 * MIB
    with filled(32 * MIB):
        assert 24 * MIB < peak_memory_bytes() - before < 48 * MIB
