"""How `baton ring bench` tells what it has measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpu_client.cli.formats import count
from gpu_client.cli.output import Screen

if TYPE_CHECKING:
    from gpu_client.ring.bench import Rates


def show(screen: Screen, rates: Rates, limits: Mapping[str, float]) -> None:
    """For people."""
    rows = [
        (said, f"{rates.per_s(name):.1f}", f"{rates.per_s(name) * rates.size_bytes / 1e9:.2f}", part)
        for said, name, part in (
            ("put", "put_s", f"{rates.of_raw('put'):.0%}"),
            ("  raw: a new file or object", "raw_put_s", ""),
            ("verified get", "get_s", f"{rates.of_raw('get'):.0%}"),
            ("  raw: read and hashed", "raw_get_s", ""),
        )
    ]
    screen.table(["", "per second", "GB/s", "of raw"], rows)
    screen.say(
        f"{count(len(rates.turns), 'sample')} of {rates.size_bytes / 2**20:.4g} MiB, one thread. This machine copies "
        f"{limits['copy'] / 1e9:.1f}, hashes {limits['xxh3'] / 1e9:.1f} and sends itself "
        f"{limits['loopback'] / 1e9:.1f} GB/s"
    )


def content(rates: Rates, limits: Mapping[str, float]) -> dict[str, object]:
    """For programs."""
    found: dict[str, object] = {"size_bytes": rates.size_bytes, "samples": len(rates.turns)}
    for name in ("put", "get"):
        found[name] = {
            "per_s": round(rates.per_s(f"{name}_s"), 3),
            "raw_per_s": round(rates.per_s(f"raw_{name}_s"), 3),
            "of_raw": round(rates.of_raw(name), 4),
        }
    return {**found, "machine_bytes_per_s": {name: round(one) for name, one in limits.items()}}
