"""Run one member of a bench: `python -m bench.elastic.member_process`. Each line of stdin and stdout is a JSON object.

In: {rank, host, size, contenders, values, rounds}. Out: {certificate, ports}. In: {peers: [{host, certificate, ...}]}.
Out: {contender: {seconds: [...], sent_bytes}}.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllreduceOptions

from gpu_client.elastic.codecs import CODECS
from gpu_client.elastic.engines.engine import Bucket, Engine, EpochGroup, Peer
from gpu_client.elastic.engines.gloo_engine import GlooEngine
from gpu_client.elastic.engines.wire.identity import NodeIdentity
from gpu_client.elastic.engines.wire.listener import Listener
from gpu_client.elastic.engines.wire.wire_engine import WireEngine
from gpu_client.elastic.parameters import split_buckets
from tests.kits.network.ports import free_port

TIMEOUT_S = 120.0


class RawGloo(GlooEngine):
    """All-reduce of torch's gloo on one tensor of a type, without codecs or a fixed order."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def reduce(self, round_number: int, buckets: Any, weights: Any, timeout_s: float, completed: Any) -> None:
        """Average the first bucket, which is the whole delta."""
        bucket = buckets[0]
        total = (bucket.values * weights[0]).to(self._dtype)
        self._run(lambda: self.add_up(total, timeout_s), timeout_s)
        bucket.average.copy_(total)

    def add_up(self, total: torch.Tensor, timeout_s: float) -> Any:
        """Begin to replace `total` by the sum over all members, and return the work."""
        return self._collectives.allreduce([total], timeout=timedelta(seconds=timeout_s))


class Torchft(RawGloo):
    """All-reduce of torchft's ProcessGroupGloo; the signals of the bench go by torch's gloo."""

    def _connect(self, group: EpochGroup, timeout_s: float) -> tuple[Any, Any]:
        # Only this contender needs the package, which is not installed everywhere.
        from torchft.process_group import ProcessGroupGloo

        connected = super()._connect(group, timeout_s)
        self._group_of_torchft = ProcessGroupGloo(timeout=timedelta(seconds=timeout_s))
        rendezvous = f"{group.peers[0].addresses[0]}/torchft"
        self._group_of_torchft.configure(rendezvous, group.peers[group.rank].node, group.rank, group.size)
        return connected

    def add_up(self, total: torch.Tensor, timeout_s: float) -> Any:
        """Begin to replace `total` by the sum over all members, and return the work."""
        return self._group_of_torchft.allreduce([total], AllreduceOptions())


def main() -> None:
    """Reduce with all contenders in turn, as the bench asks, and answer with the times."""
    torch.set_num_threads(1)
    plan = _read()
    identity, certificates = NodeIdentity(), []
    ports, engines = {}, {}
    for name in plan["contenders"]:
        kind, _, codec = name.partition(" ")
        if kind != "wire":
            ports[name] = free_port()
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[codec]
            engines[name] = Torchft(dtype) if kind == "torchft" else RawGloo(dtype)
        else:
            engines[name] = engine = WireEngine(identity, CODECS[codec])
            ports[name] = Listener(identity, engine.handlers, lambda: certificates, plan["host"]).port
    _write({"certificate": identity.certificate, "ports": ports})
    peers = _read()["peers"]
    certificates += [peer["certificate"] for peer in peers]
    for name, engine in engines.items():
        members = [
            Peer(f"{rank}.1.{rank:08x}", (f"{one['host']}:{one['ports'][name]}",), one["certificate"])
            for rank, one in enumerate(peers)
        ]
        engine.open(EpochGroup(1, tuple(members), plan["rank"]), TIMEOUT_S)
    found = {name: {"seconds": [], "sent_bytes": 0} for name in engines}
    for number in range(plan["rounds"] + 1):
        for name, engine in engines.items():
            seconds, sent = _measure(engine, plan, number, whole=not name.startswith("wire"))
            # The first round fills caches and windows of TCP.
            if number:
                found[name]["seconds"].append(seconds)
                found[name]["sent_bytes"] = sent
    _write(found)
    for engine in engines.values():
        engine.exchange(b"end", TIMEOUT_S)
        engine.close()


def _measure(engine: Engine, plan: dict[str, Any], number: int, *, whole: bool) -> tuple[float, int]:
    values, average = _tensors(plan["values"], plan["rank"])
    parts = [slice(0, len(values))] if whole else split_buckets(len(values))
    buckets = [Bucket(index, values[part], average[part]) for index, part in enumerate(parts)]
    engine.exchange(b"begin", TIMEOUT_S)
    before, began = engine.traffic.sent_bytes, time.perf_counter()
    engine.reduce(number, buckets, [1 / plan["size"]] * plan["size"], TIMEOUT_S, lambda _: None)
    return time.perf_counter() - began, engine.traffic.sent_bytes - before


_kept: list[torch.Tensor] = []


def _tensors(values: int, rank: int) -> list[torch.Tensor]:
    if not _kept:
        _kept.extend((torch.randn(values, generator=torch.Generator().manual_seed(rank)), torch.zeros(values)))
    return _kept


def _read() -> Any:
    return json.loads(sys.stdin.readline())


def _write(document: Any) -> None:
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
