"""Measure averages of 100 MB among processes: the wire against torch's gloo, on loopback and over limited links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.elastic.places import Place, linked, loopback
from bench.harness.figures import Figure
from gpu_client.elastic.codecs import CODECS

VALUES = 25_000_000
MBIT_S = 500
LINK_USE = 0.9
ON_LOOPBACK = ("gloo fp32", "gloo bf16", "wire fp32", "wire bf16", "wire int8", "wire int4")
TORCHFT = Path(".vendors/torchft")
"""Packages of torchft's process group, which `make bench-elastic` installs where there are wheels (`torchft.txt`)."""
ON_LINKS = ("gloo fp32", "gloo bf16", "wire int8", "wire int4")
SENT_AT_MOST = {"int8": 2.01, "int4": 1.07}
"""Bytes for each parameter at infinitely many members."""


def list_contenders() -> tuple[str, ...]:
    """Return the contenders on loopback; torchft is one of them where its packages are installed."""
    return (*ON_LOOPBACK, "torchft fp32") if (TORCHFT / "torchft").is_dir() else ON_LOOPBACK


def on_loopback(size: int, rounds: int, values: int) -> list[Figure]:
    """Compare contenders where bandwidth is not scarce."""
    contenders = list_contenders()
    found = _reduce(loopback(size), contenders, rounds, values)
    mb = values * 4 / 1e6
    figures = []
    for name in contenders:
        _, codec = name.split()
        rival = "gloo bf16" if codec == "bf16" else "gloo fp32"
        details = {"relative_to": rival, "load": "other programs share the cores"}
        title = f"average of {mb:.0f} MB, {size} processes, loopback, {name}{' by TLS' if 'wire' in name else ''}"
        baseline = {} if name.startswith("gloo") else {"baseline_name": rival, "baseline": found[rival]["seconds"]}
        figures.append(Figure(name=title, unit="s", rounds=found[name]["seconds"], details=details, **baseline))
    for codec, at_most in SENT_AT_MOST.items():
        sent = found[f"wire {codec}"]["sent_bytes"] / values * size / (size - 1)
        title = f"bytes sent for each parameter and round, from {size} to infinitely many members, {codec}"
        figures.append(Figure(name=title, unit="B", rounds=[sent], at_most=at_most, counted=True))
    return figures


def on_links(size: int, rounds: int, values: int) -> list[Figure]:
    """Compare each contender with the time of its own bytes at the rate of the link."""
    with linked(size, MBIT_S) as places:
        found = _reduce(places, ON_LINKS, rounds, values)
    figures = []
    for name in ON_LINKS:
        engine, codec = name.split()
        alone_s = 2 * (size - 1) / size * CODECS[codec].encoded_bytes(values) * 8 / (MBIT_S * 1e6)
        figures.append(
            Figure(
                name=f"average of {values * 4 / 1e6:.0f} MB, {size} members, {MBIT_S} Mbit/s, {name}",
                unit="s",
                rounds=found[name]["seconds"],
                baseline_name="encoded bytes alone",
                baseline=[alone_s] * rounds,
                at_most=1 / LINK_USE if name == "wire int8" else None,
                details={"tls": engine == "wire", "link": "network namespaces, token buckets, no latency"},
            )
        )
    return figures


def _reduce(places: Sequence[Place], contenders: Sequence[str], rounds: int, values: int) -> dict[str, dict[str, Any]]:
    """Return, by contender, the slowest member's seconds of each round, and the largest number of sent bytes."""
    line = [sys.executable, "-m", "bench.elastic.member_process"]
    variables = {**os.environ, "PYTHONPATH": os.fspath(TORCHFT.absolute())}
    members = [
        subprocess.Popen(
            [*place.command, *line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        for place in places
    ]
    try:
        for rank, (member, place) in enumerate(zip(members, places, strict=True)):
            plan = {"rank": rank, "host": place.host, "size": len(places)}
            _write(member, {**plan, "contenders": contenders, "values": values, "rounds": rounds})
        peers = [{"host": place.host, **_read(member)} for member, place in zip(members, places, strict=True)]
        for member in members:
            _write(member, {"peers": peers})
        found = [_read(member) for member in members]
        for member in members:
            member.wait(60)
    finally:
        for member in members:
            member.kill()
            member.communicate()
    return {
        name: {
            "seconds": [max(times) for times in zip(*(one[name]["seconds"] for one in found), strict=True)],
            "sent_bytes": max(one[name]["sent_bytes"] for one in found),
        }
        for name in contenders
    }


def _write(member: subprocess.Popen[str], document: Any) -> None:
    assert member.stdin is not None
    member.stdin.write(json.dumps(document) + "\n")
    member.stdin.flush()


def _read(member: subprocess.Popen[str]) -> Any:
    assert member.stdout is not None
    line = member.stdout.readline()
    if not line:
        raise RuntimeError(f"a member ended with code {member.wait()}")
    return json.loads(line)
