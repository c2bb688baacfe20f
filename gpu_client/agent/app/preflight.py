"""Measure a rented machine before it enrols: driver, CUDA of the image, speed of the disk and of a download.

The measurements take a few seconds and 16 MiB of traffic, before the machine receives a byte of anybody's data.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from baton.contract.fleets.fleet import MachineMeasurements, PreflightDownload
from gpu_client.agent.app.settings import AgentSettings, nvidia_driver
from gpu_client.transport.errors import Unreachable, without_query
from gpu_client.transport.net.cancellation import Flight
from gpu_client.transport.net.connections import BrokenConnection, Connections

LONGEST_WRITE_S = 3.0
LONGEST_DOWNLOAD_S = 5.0
"""Seconds after which a measurement ends with what it has moved until then."""
STALL_S = 5.0
WRITTEN_BYTES = 64 * 2**20
PIECE_BYTES = 4 * 2**20
SHORTEST_S = 1e-3
VERSION = re.compile(r"\d{1,5}(\.\d{1,5}){0,3}")

Clock = Callable[[], float]


def measure_machine(
    settings: AgentSettings, find_download: Callable[[], PreflightDownload], environ: Mapping[str, str] = os.environ
) -> MachineMeasurements:
    """Measure this machine.

    find_download: returns the object of the control plane whose download is timed. Raises BatonError without a usable
    answer of the API or the store, OSError if the workspace cannot be written.
    """
    cuda = environ.get("CUDA_VERSION", "")  # Images of NVIDIA, and those that are built on them, name their CUDA so.
    return MachineMeasurements(
        driver=nvidia_driver(),
        cuda=cuda if VERSION.fullmatch(cuda) else None,
        disk_write_mb_s=round(measure_write(settings.workspace) / 1e6, 1),
        download_mbit_s=round(measure_download(find_download().url) * 8 / 1e6, 1),
    )


def measure_write(directory: Path, clock: Clock = time.monotonic) -> float:
    """Return the speed in bytes/s at which the disk stores a file for good. Raises OSError."""
    piece, written = os.urandom(PIECE_BYTES), 0
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        started = clock()
        while written < WRITTEN_BYTES and clock() - started < LONGEST_WRITE_S:
            written += file.write(piece)
            # Without this wait the memory of the page cache would be measured.
            os.fdatasync(file.fileno())
        return written / max(clock() - started, SHORTEST_S)


def measure_download(url: str, clock: Clock = time.monotonic) -> float:
    """Return the speed in bytes/s at which an object arrives, over one connection like that of a training's inputs.

    Raises Unreachable if the store does not answer, or stops in the middle.
    """
    connections, received = Connections(connect_timeout_s=STALL_S, stall_timeout_s=STALL_S), 0
    try:
        with connections.exchange("GET", url, {}, Flight()) as answer:
            if answer.status != 200:
                raise Unreachable(f"{without_query(url)} was answered {answer.status}")
            started, size_bytes = clock(), int(answer.headers["Content-Length"] or 0)
            while received < size_bytes and clock() - started < LONGEST_DOWNLOAD_S:
                piece = answer.read1(PIECE_BYTES)
                if not piece:
                    raise Unreachable(f"{without_query(url)} ended after {received} of {size_bytes} bytes")
                received += len(piece)
            return received / max(clock() - started, SHORTEST_S)
    except BrokenConnection as error:
        raise Unreachable(f"{without_query(url)}: {error}") from error
    finally:
        connections.close()
