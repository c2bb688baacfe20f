"""Measure the speed and the error of codecs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from bench.harness.figures import Figure
from gpu_client.elastic.codecs import CODECS, Codec
from gpu_client.elastic.codecs.codec import ALIGNMENT

THREADS = 2
TOGETHER_MS = 40.0
MEMBERS, LAYERS = 16, 64
ERRORS = {"fp32": None, "bf16": None, "int8": 0.015, "int4": None}


def speed(rounds: int, values: int) -> list[Figure]:
    """Encode, and decode and add, with a thread for each core; all codecs take turns in each round."""
    part = values // THREADS // ALIGNMENT * ALIGNMENT
    deltas = [torch.randn(part) for _ in range(THREADS)]
    sums = [torch.zeros(part) for _ in range(THREADS)]
    data = {
        name: [torch.empty(one.encoded_bytes(part), dtype=torch.uint8) for _ in sums] for name, one in CODECS.items()
    }
    took: dict[str, list[float]] = {}
    with ThreadPoolExecutor(THREADS) as threads:

        def measure(name: str, call: Callable[[int], None]) -> None:
            def timed(thread: int) -> float:
                began = time.thread_time()
                call(thread)
                return (time.thread_time() - began) * 1000

            took.setdefault(name, []).append(max(threads.map(timed, range(THREADS))))

        for _ in range(rounds):
            measure("copy", lambda thread: sums[thread].numpy().__setitem__(slice(None), deltas[thread].numpy()))
            for name, codec in CODECS.items():
                encoded = data[name]
                measure(f"{name} encode", lambda i, c=codec, e=encoded: c.encode(deltas[i], e[i]))
                measure(f"{name} add", lambda i, c=codec, e=encoded: c.accumulate(e[i], 0.5, sums[i]))
    mb = THREADS * part * 4 / 1e6
    figures = []
    for name in CODECS:
        encoding, adding = took[f"{name} encode"], took[f"{name} add"]
        figures.append(
            Figure(
                name=f"CPU time of each of {THREADS} threads to encode, and to decode and add, {mb:.0f} MB, {name}",
                unit="ms",
                rounds=[sum(pair) for pair in zip(encoding, adding, strict=True)],
                at_most=TOGETHER_MS if name == "int8" else None,
                details={"encode_ms": encoding, "add_ms": adding, "copy_ms": took["copy"]},
            )
        )
    return figures


def error(values: int) -> list[Figure]:
    """Average multi-scale deltas of 16 members with two roundings, as the wire does."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.exp(2 * torch.randn(LAYERS, generator=generator)).repeat_interleave(values // LAYERS)
    common = _student_t5(len(scales), generator)
    deltas = [scales * (common + _student_t5(len(scales), generator)) for _ in range(MEMBERS)]
    exact = sum(delta.double() for delta in deltas) / MEMBERS
    return [
        Figure(
            name=f"relative error of the average of {MEMBERS} members, multi-scale, {name}",
            unit="",
            rounds=[((_average(codec, deltas).double() - exact).norm() / exact.norm()).item()],
            at_most=ERRORS[name],
        )
        for name, codec in CODECS.items()
    ]


def _average(codec: Codec, deltas: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(deltas[0])
    data = torch.empty(codec.encoded_bytes(len(total)), dtype=torch.uint8)
    for delta in deltas:
        codec.encode(delta, data)
        codec.accumulate(data, 1 / len(deltas), total)
    codec.encode(total, data)
    codec.decode(data, total)
    return total


def _student_t5(count: int, generator: torch.Generator) -> torch.Tensor:
    normal, *others = torch.randn((6, count), generator=generator)
    return normal / (sum(one**2 for one in others) / 5).sqrt()
