"""Measure a rented machine: real writes to a disk and real downloads from a server, with a clock of the test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from baton.contract.fleets.fleet import PreflightDownload
from gpu_client.agent.app import preflight
from gpu_client.agent.app.preflight import (
    LONGEST_DOWNLOAD_S,
    LONGEST_WRITE_S,
    PIECE_BYTES,
    WRITTEN_BYTES,
    measure_download,
    measure_machine,
    measure_write,
)
from gpu_client.agent.app.settings import AgentSettings
from gpu_client.transport.errors import Unreachable
from tests.kits.network.http_server import HttpServer, QuietHandler

BODY = bytes(3 * 2**20)


class Store(QuietHandler):
    """Object store: one object, one that ends in the middle, and refusals."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.send_response(200 if path in ("/object", "/half") else 403)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY if path == "/object" else BODY[: 2**20])
        self.close_connection = True


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with HttpServer(Store) as server:
        yield server.url


def ticking(seconds: float) -> preflight.Clock:
    """Make a clock that each look moves on."""
    looks = count()
    return lambda: next(looks) * seconds


def test_a_disk_is_measured_up_to_its_bytes_or_its_time_and_stays_as_it_was(tmp_path: Path) -> None:
    place = tmp_path / "made" / "for it"
    pieces = WRITTEN_BYTES // PIECE_BYTES
    # One look at the start, one before each piece, one at the end.
    assert measure_write(place, ticking(0.01)) == pytest.approx(WRITTEN_BYTES / (0.01 * (pieces + 1)))
    slow = measure_write(place, ticking(LONGEST_WRITE_S / 2))
    assert slow == pytest.approx(PIECE_BYTES / (1.5 * LONGEST_WRITE_S))
    assert list(place.iterdir()) == []
    with pytest.raises(OSError):
        measure_write(Path("/proc/no-such"))


def test_a_download_is_measured_up_to_its_end_or_its_time(store: str) -> None:
    assert measure_download(f"{store}/object?signature=secret") > 1e6
    # The time is over before the second piece.
    assert measure_download(f"{store}/object", ticking(LONGEST_DOWNLOAD_S * 0.6)) < len(BODY) / LONGEST_DOWNLOAD_S


@pytest.mark.parametrize("path", ["/half", "/refused"])
def test_a_store_that_does_not_answer_is_no_slow_machine(store: str, path: str) -> None:
    with pytest.raises(Unreachable) as raised:
        measure_download(f"{store}{path}?signature=secret")
    assert path in str(raised.value) and "secret" not in str(raised.value)
    with pytest.raises(Unreachable):
        measure_download("http://127.0.0.1:9/object")


@pytest.mark.parametrize(("cuda", "reported"), [("13.0.1", "13.0.1"), ("", None), ("latest", None)])
def test_a_machine_names_its_driver_and_the_cuda_of_its_image(
    store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cuda: str,
    reported: str | None,
) -> None:
    monkeypatch.setattr(preflight, "nvidia_driver", lambda: "580.65.06")
    settings = AgentSettings(api_url="http://control.plane", enrolment_token="baton_x_y", workspace=tmp_path)
    with caplog.at_level(logging.DEBUG):
        found = measure_machine(
            settings, lambda: PreflightDownload(url=f"{store}/object?signature=secret"), {"CUDA_VERSION": cuda}
        )
    assert (found.driver, found.cuda) == ("580.65.06", reported)
    assert found.disk_write_mb_s > 0 and found.download_mbit_s > 0
    assert "secret" not in caplog.text
