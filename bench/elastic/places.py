"""Place members: as processes on loopback, or in network namespaces with links of limited rate."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Address of a member, and the command line that starts a program there."""

    host: str
    command: tuple[str, ...] = ()


def loopback(size: int) -> list[Place]:
    """Return places on loopback."""
    return [Place("127.0.0.1")] * size


@contextmanager
def linked(size: int, mbit_s: int) -> Iterator[list[Place]]:
    """Create namespaces that meet at a bridge. Raises PermissionError."""
    names = [f"baton-{os.getpid()}-{number}" for number in range(size + 1)]
    hub, *members = names
    limit = f"tbf rate {mbit_s}mbit burst 256kb latency 50ms"
    with ExitStack() as undo:
        for name in names:
            _run(f"ip netns add {name}")
            undo.callback(_run, f"ip netns del {name}")
        _run(f"ip -n {hub} link add bridge0 type bridge")
        _run(f"ip -n {hub} link set bridge0 up")
        places = []
        for number, name in enumerate(members, 1):
            host = f"10.77.0.{number}"
            _run(f"ip link add eth0 netns {name} type veth peer name port{number} netns {hub}")
            _run(f"ip -n {name} addr add {host}/24 dev eth0")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip -n {hub} link set port{number} master bridge0 up")
            # A loss-based control that every kernel has; BBR would measure the link anew after each pause.
            _run(f"ip netns exec {name} sysctl -q -w net.ipv4.tcp_congestion_control=reno")
            _run(f"ip netns exec {name} tc qdisc add dev eth0 root {limit}")
            _run(f"ip netns exec {hub} tc qdisc add dev port{number} root {limit}")
            places.append(Place(host, ("ip", "netns", "exec", name)))
        yield places


def _run(line: str) -> None:
    try:
        done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise PermissionError(f"{line}: {error}") from error
    if done.returncode:
        raise PermissionError(f"{line}: {done.stderr.strip()}")
