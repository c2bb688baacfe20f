"""The transfer engine against the machine's limits: raw copies and libcurl, through the same server, with 1 GiB.

- Raw: as many threads as are fastest, a connection for each that is kept as ours are, objects of 32 MiB, nothing but
  sendfile up and splice into the file down.
- Up, ours PUTs the same pieces of the same file by `Transfer.upload`. Down, both bring the bytes into a new file in
  memory, unverified: ours one object of 1 GiB by `Transfer.download`. Verifying is in the figures of resuming.
- On TLS, `curl` sends files of 32 MiB one after the other over one connection, which costs it the least CPU time.
"""

from __future__ import annotations

import os
import ssl
import sys
from pathlib import Path

from gpu_client.transport.connections import Connections
from gpu_client.transport.segments import Segment
from gpu_client.transport.transfer import Download, Transfer, Upload
from tests.certificates import throwaway_certificate
from tests.performance.checkpoints import curl
from tests.performance.checkpoints.measure import PACK_BYTES, against
from tests.performance.checkpoints.raw import Part, Raw
from tests.performance.checkpoints.server import running_sink
from tests.performance.checkpoints.subjects import WORKERS, Bench, store_client
from tests.performance.checkpoints.timing import Cost, measured
from tests.performance.figures import Figure

MIB = 2**20


def engine(bench: Bench, rounds: int) -> list[Figure]:
    """Upload and download on HTTP, upload on TLS."""
    size_bytes = (64 if bench.quick else 1024) * MIB
    with bench.folder() as folder:
        source = folder / "weights.bin"
        with source.open("wb") as file:
            for _ in range(size_bytes // MIB):  # no piece twice: it would not be fetched twice
                file.write(os.urandom(MIB))
        parts = [(offset, min(PACK_BYTES, size_bytes - offset)) for offset in range(0, size_bytes, PACK_BYTES)]
        return [*_plain(bench, rounds, source, parts), *_tls(bench, rounds, source, parts)]


def _plain(bench: Bench, rounds: int, source: Path, parts: list[Part]) -> list[Figure]:
    size_bytes = source.stat().st_size
    ups, raw_ups, downs, raw_downs = [], [], [], []
    transfer, raw = Transfer(workers=WORKERS), Raw()  # the agent has one for as long as it runs
    for number in range(rounds + 1):
        url = f"{bench.url}/{bench.bucket()}"
        raw_up = measured(lambda url=url: raw.put(url, "raw", source, parts))[0]
        up = measured(lambda url=url: transfer.upload(_uploads(url, source, parts)))[0]
        transfer.upload([_upload(f"{url}/whole", source, 0, size_bytes)])
        with bench.folder() as target:
            raw_down = measured(lambda url=url, target=target: raw.get(url, "raw", target / "raw", parts))[0]
        with bench.folder() as target:
            item = Download(
                name="whole", url=f"{url}/whole", root=target, path="whole", size_bytes=size_bytes, fsync=False
            )
            down = measured(lambda item=item: transfer.download([item]))[0]
        bench.forget()
        if number:  # the first is for warming up
            for took, cost in ((raw_ups, raw_up), (ups, up), (raw_downs, raw_down), (downs, down)):
                took.append(cost)
    transfer.close()
    raw.close()
    return [
        against("upload, CPU", "s", _cpu(ups), "raw sendfile", _cpu(raw_ups), 1.3),
        against("upload", "s", _wall(ups), "raw copy", _wall(raw_ups), 1 / 0.8),
        against("download", "s", _wall(downs), "raw copy", _wall(raw_downs), 1 / 0.8),
    ]


def _tls(bench: Bench, rounds: int, source: Path, parts: list[Part]) -> list[Figure]:
    if curl.CURL is None:
        print("upload over TLS: left out, there is no curl", file=sys.stderr)
        return []
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


def _wall(costs: list[Cost]) -> list[float]:
    return [cost.wall_s for cost in costs]


def _cpu(costs: list[Cost]) -> list[float]:
    return [cost.cpu_s for cost in costs]
