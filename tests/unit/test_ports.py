"""Ports for programs that must be told theirs."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from tests.kits.network import ports


def test_the_range_that_is_given_away_is_the_systems(tmp_path: Path) -> None:
    table = tmp_path / "range"
    table.write_text("32768\t60999\n")
    assert ports.given_away(table) == range(32768, 61000)
    with socket.socket() as anybody:
        anybody.bind((ports.HOST, 0))
        assert anybody.getsockname()[1] in ports.given_away()


def test_a_port_is_taken_from_outside_of_it_and_free(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ports.free_port()
    assert found not in ports.given_away()
    with socket.create_server((ports.HOST, found)):
        monkeypatch.setattr(random, "sample", lambda _ports, _count: [found, second])
        second = next(port for port in range(found + 1, 65_536) if bindable(port))
        assert ports.free_port() == second, "the first is taken"
        monkeypatch.setattr(random, "sample", lambda _ports, _count: [found])
        with pytest.raises(RuntimeError, match="no free port"):
            ports.free_port()


def bindable(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((ports.HOST, port))
        except OSError:
            return False
        return True
