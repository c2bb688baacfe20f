"""Free ports of 127.0.0.1 for programs that need a number before they start."""

from __future__ import annotations

import random
import socket
from pathlib import Path

HOST = "127.0.0.1"
_LOWEST, _HIGHEST = 1024, 65_535


def given_away(table: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> range:
    """List the ports that the system assigns to servers on port 0 and to connections."""
    first, last = (int(word) for word in table.read_text().split())
    return range(first, last + 1)


def free_port() -> int:
    """Choose a free port that the system assigns to no other program before its own binds it."""
    by_chance = given_away()
    others = [port for port in range(_LOWEST, _HIGHEST + 1) if port not in by_chance]
    for port in random.sample(others, min(100, len(others))):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port outside of the range that the system gives away")
