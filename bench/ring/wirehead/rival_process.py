"""Run the real Wirehead by lines of JSON: `python -m bench.ring.wirehead.rival_process CONFIG`.

Runs in Wirehead's environment. What Wirehead prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import bson
import numpy as np
import torch
from wirehead import MongoheadDataset, WireheadGenerator

DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")


def endless(sample: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Repeat one sample; making samples is not measured."""
    while True:
        yield sample


class Rival:
    """Generator and data set of Wirehead. Times are seconds for one sample."""

    def __init__(self, config: str) -> None:
        self._config = config
        self._sample: tuple[Any, ...] = ()
        self._generator: Any = None
        self._dataset: Any = None

    def make(self, size_bytes: int) -> None:
        """Make an image and a label with that many bytes together."""
        chance = np.random.default_rng(0)
        self._sample = tuple(chance.integers(0, 256, size_bytes // 2, np.uint8) for _ in range(2))
        self._generator = WireheadGenerator(endless(self._sample), self._config)

    def put(self, samples: int) -> list[float]:
        """Put samples, each with its swap if due."""
        return [timed(self._generator.cycle) for _ in range(samples)]

    def get(self, samples: int) -> list[float]:
        """Get the present samples one at a time."""
        if self._dataset is None:
            self._dataset = MongoheadDataset(self._config)
        there = len(self._dataset)
        return [timed(lambda at=at: self._dataset[[at % there]]) for at in range(samples)]  # type: ignore[misc]

    def ceiling(self, samples: int) -> list[list[float]]:
        """Time the client without a server: split, encode and send; receive, decode and join."""
        return [[self._put_alone(), self._get_alone()] for _ in range(samples)]

    def exact(self) -> list[str]:
        """List the kinds of arrays that come back unchanged."""
        found = []
        for name in DTYPES:
            values = (torch.arange(-30, 34, dtype=torch.float64) * 7.3).to(getattr(torch, name))
            chunks = self._generator.chunkify((values, values), 0)
            kind = self._generator.sample[1]
            data = b"".join(chunk["chunk"] for chunk in chunks if chunk["kind"] == kind)
            back = self._dataset.transform(data)
            if back.dtype == values.dtype and torch.equal(back, values):
                found.append(name)
        return found

    def _put_alone(self) -> float:
        def put() -> None:
            for chunk in self._generator.chunkify(self._sample, 0):
                through_loopback(bson.encode(chunk))

        return timed(put)

    def _get_alone(self) -> float:
        stored = [bson.encode(chunk) for chunk in self._generator.chunkify(self._sample, 0)]

        def get() -> None:
            documents = []
            for one in stored:
                through_loopback(one)
                documents.append(bson.decode(one))
            data, label = (self._dataset.make_serial(documents, kind) for kind in self._generator.sample)
            self._dataset.transform(data).float()
            self._dataset.transform(label)

        return timed(get)


def through_loopback(data: bytes) -> None:
    """Send bytes to this process through loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        sending = threading.Thread(target=sender.sendall, args=(data,))
        sending.start()
        buffer, left = bytearray(1024 * 1024), len(data)
        while left:
            left -= receiver.recv_into(buffer)
        sending.join()


def timed(work: Callable[[], object]) -> float:
    began_at = time.perf_counter()
    work()
    return time.perf_counter() - began_at


def main() -> None:
    """Serve commands until the end of standard input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    rival = Rival(sys.argv[1])
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answers.write(json.dumps(getattr(rival, name)(*arguments)) + "\n")


if __name__ == "__main__":
    main()
