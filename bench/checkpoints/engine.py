"""Compare the CPU time of the transfer engine with libcurl: an upload of 1 GiB over TLS to the same server.

`curl` sends files of 32 MiB one after the other over one connection, which costs it the least CPU time. Ours PUTs the
same pieces of one file by `Transfer.upload`.
"""

from __future__ import annotations

import os
import ssl
import sys
from pathlib import Path

from bench.checkpoints.measure import PACK_BYTES, against
from bench.checkpoints.rivals import curl
from bench.checkpoints.subjects import WORKERS, Bench, store_client
from bench.checkpoints.timing import Cost, measured
from bench.harness.figures import Figure
from bench.sink.sink_process import running_sink
from gpu_client.transport.net.connections import Connections
from gpu_client.transport.transfer.manager import Transfer, Upload
from gpu_client.transport.transfer.transfer_requests import Segment
from tests.kits.network.certificates import throwaway_certificate

MIB = 2**20

Part = tuple[int, int]
"""Offset and size in bytes."""


def engine(bench: Bench, rounds: int) -> list[Figure]:
    """Measure the upload on TLS in each of `rounds` rounds; no figure where the machine has no `curl`."""
    if curl.CURL is None:
        print("upload over TLS: left out, there is no curl", file=sys.stderr)
        return []
    size_bytes = (64 if bench.quick else 1024) * MIB
    with bench.folder() as folder:
        source = folder / "weights.bin"
        with source.open("wb") as file:
            for _ in range(size_bytes // MIB):
                file.write(os.urandom(MIB))
        parts = [(offset, min(PACK_BYTES, size_bytes - offset)) for offset in range(0, size_bytes, PACK_BYTES)]
        return _tls(bench, rounds, source, parts)


def _tls(bench: Bench, rounds: int, source: Path, parts: list[Part]) -> list[Figure]:
    ups, curls = [], []
    with bench.folder() as folder:
        certificate = throwaway_certificate(folder / "tls.pem")
        files = []
        with source.open("rb") as file:
            for offset, size_bytes in parts:
                files.append(folder / f"curl-{offset}")
                files[-1].write_bytes(os.pread(file.fileno(), size_bytes, offset))
        trusted = Connections(max_idle=WORKERS, tls=ssl.create_default_context(cafile=str(certificate)))
        with running_sink(folder / "sink", tls=certificate) as endpoint:
            client = store_client(endpoint, certificate)
            client.create_bucket(Bucket="bench")
            url = f"{endpoint}/bench"
            transfer = Transfer(workers=WORKERS, connections=trusted)
            for number in range(rounds + 1):
                cost = curl.put(url, files, certificate)
                up = measured(lambda: transfer.upload(_uploads(url, source, parts)))[0]
                if number:  # the first is for warming up
                    curls.append(cost)
                    ups.append(up)
            transfer.close()
    return [against("upload on TLS, CPU", "s", _cpu(ups), "libcurl", _cpu(curls), 1.15)]


def _uploads(url: str, source: Path, parts: list[Part]) -> list[Upload]:
    return [_upload(f"{url}/ours-{offset}", source, offset, size) for offset, size in parts]


def _upload(url: str, source: Path, offset: int, size_bytes: int) -> Upload:
    return Upload(
        name=f"from {offset}",
        segments=(Segment(source, offset, size_bytes),),
        size_bytes=size_bytes,
        url=url,
        headers={},
    )


def _cpu(costs: list[Cost]) -> list[float]:
    return [cost.cpu_s for cost in costs]
