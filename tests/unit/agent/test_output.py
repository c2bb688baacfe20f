"""Test lines, last lines and the spool."""

import random
import threading

import pytest

from gpu_client.agent.io.log_shipper import LogSpool
from gpu_client.agent.process.output import LineAssembler, TrainerOutput
from tests.kits.clock import Clock


def lines_of(*pieces: bytes, max_line_chars: int = 100) -> list[str]:
    assembler = LineAssembler(Clock(0.0), max_line_chars)
    lines = [line for piece in pieces for line in assembler.feed(piece)]
    return lines + assembler.feed(b"", final=True)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ((b"one\ntwo\n",), ["one", "two"]),
        ((b"on", b"e\ntw", b"o"), ["one", "two"]),
        ((b"one\r", b"\ntwo\r\n"), ["one", "two"]),
        (("grün\n".encode()[:3], "grün\n".encode()[3:]), ["grün"]),
        ((b"\n\n",), ["", ""]),
        ((b"\xff\xfe\x00\x01ok\n",), ["\ufffd\ufffdok"]),
        ((b"\x1b[32mgreen\x1b[0m\ttab\n",), ["green\ttab"]),
        ((b"x" * 250 + b"\nnext\n",), ["x" * 100 + " ...[150 characters cut]", "next"]),
        ((b"x" * 80, b"x" * 80, b"x" * 90 + b"\nnext\n"), ["x" * 100 + " ...[150 characters cut]", "next"]),
        ((b"",), []),
    ],
)
def test_lines(pieces: tuple[bytes, ...], expected: list[str]) -> None:
    assert lines_of(*pieces) == expected


def test_the_same_lines_however_the_bytes_are_cut() -> None:
    text = "a\r\nbb\n\n" + "c" * 300 + "\nß€😀\n" + "last"
    whole = lines_of(text.encode())
    generator = random.Random(7)
    for _ in range(50):
        data, pieces = text.encode(), []
        while data:
            size = generator.randint(1, 40)
            pieces.append(data[:size])
            data = data[size:]
        assert lines_of(*pieces) == whole


def test_a_progress_bar_is_kept_once_in_a_while_and_at_its_end() -> None:
    clock = Clock(0.0)
    assembler = LineAssembler(clock, redraw_interval_s=10)
    kept: list[str] = []
    for percent in range(100):
        clock.now = percent * 0.5
        kept += assembler.feed(f"\r{percent}%|##".encode())
    kept += assembler.feed(b"\r100%|##########\ndone\n")
    assert kept[-2:] == ["100%|##########", "done"]
    assert 5 <= len(kept) - 2 <= 6
    assert kept[1] == "19%|##"  # What was drawn when the next state, ten seconds on, came.


def test_an_endless_line_is_not_kept_in_memory() -> None:
    assembler = LineAssembler(Clock(0.0), 100)
    for _ in range(1000):
        assert assembler.feed(b"z" * 1000) == []
    assert assembler.feed(b"\n") == ["z" * 100 + " ...[999900 characters cut]"]


def test_chunks_are_whole_lines_numbered_and_given_until_acknowledged() -> None:
    spool = LogSpool(max_bytes=1000, chunk_bytes=10)
    for line in ("one", "two", "three", "four"):
        spool.append(line)
    first = spool.next_chunk()
    assert first is not None
    assert (first.sequence, first.data, first.dropped_bytes) == (0, b"one\ntwo\n", 0)
    assert spool.next_chunk() == first
    with pytest.raises(ValueError, match="log chunk 1"):
        spool.ack(1)
    spool.ack(0)
    second = spool.next_chunk()
    assert second is not None
    assert (second.sequence, second.data) == (1, b"three\n")
    spool.ack(1)
    assert spool.next_chunk() is None  # "four" waits for more.
    third = spool.next_chunk(flush=True)
    assert third is not None
    assert (third.sequence, third.data) == (2, b"four\n")


def test_nothing_is_lost_between_chunks() -> None:
    spool = LogSpool(max_bytes=10_000, chunk_bytes=32)
    written = [f"line {number}" for number in range(100)]
    for line in written:
        spool.append(line)
    read = b""
    sequence = 0
    while chunk := spool.next_chunk(flush=True):
        assert chunk.sequence == sequence
        read += chunk.data
        spool.ack(chunk.sequence)
        sequence += 1
    assert read.decode().splitlines() == written


def test_a_slow_consumer_costs_the_oldest_and_the_gap_is_told() -> None:
    spool = LogSpool(max_bytes=50, chunk_bytes=10)
    spool.append("in-flight")
    spool.append("0000")
    held = spool.next_chunk()
    for number in range(1, 40):
        spool.append(f"{number:04}")
    assert held is not None
    assert spool.next_chunk() == held  # What the consumer holds is not dropped.
    spool.ack(held.sequence)
    after = spool.next_chunk()
    assert after is not None
    assert after.sequence == 1
    assert after.dropped_bytes == spool.dropped_total_bytes > 0
    rest = after.data
    spool.ack(1)
    while chunk := spool.next_chunk(flush=True):
        assert chunk.dropped_bytes == 0
        rest += chunk.data
        spool.ack(chunk.sequence)
    assert rest.endswith(b"0039\n")
    assert len(rest) + spool.dropped_total_bytes == 40 * 5


def test_a_line_larger_than_the_spool_is_dropped_not_kept() -> None:
    spool = LogSpool(max_bytes=50, chunk_bytes=10)
    spool.append("x" * 100)
    assert spool.next_chunk(flush=True) is None
    assert spool.dropped_total_bytes == 101


def test_the_ring_keeps_the_last_lines_and_the_unfinished_one() -> None:
    output = TrainerOutput(last_lines=3)
    output.feed(b"1\n2\n3\n4\nunfinis")
    output.feed(b"hed")
    output.finish()
    assert output.last_lines() == ["3", "4", "unfinished"]


def test_a_blocked_echo_does_not_hold_up_the_trainer() -> None:
    release, entered = threading.Event(), threading.Event()
    echoed: list[str] = []

    def blocked(line: str) -> None:
        entered.set()
        release.wait(60)
        echoed.append(line)

    output = TrainerOutput(echo=blocked)
    for number in range(5000):
        output.feed(f"{number}\n".encode())
    output.finish()
    assert output.last_lines()[-1] == "4999"
    assert entered.wait(60)
    release.set()


def test_the_echo_gets_the_lines_in_order() -> None:
    done = threading.Event()
    echoed: list[str] = []

    def echo(line: str) -> None:
        echoed.append(line)
        if line == "end":
            done.set()

    output = TrainerOutput(echo=echo)
    output.feed(b"a\nb\nend\n")
    output.finish()
    assert done.wait(60)
    assert echoed == ["a", "b", "end"]
