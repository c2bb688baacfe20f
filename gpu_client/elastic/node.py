"""Connect the training process to its world: port, identity, engine, and calls through the agent."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch.nn.parallel import DistributedDataParallel

from gpu_client.elastic.codecs import CODECS, DEFAULT_CODEC
from gpu_client.elastic.engines.engine import Engine
from gpu_client.elastic.engines.gloo_engine import GlooEngine
from gpu_client.elastic.engines.relay.relay_port import RelayPort
from gpu_client.elastic.engines.wire.identity import NodeIdentity
from gpu_client.elastic.engines.wire.listener import Listener
from gpu_client.elastic.engines.wire.wire_engine import WireEngine
from gpu_client.elastic.errors import ElasticSetupError, WorldCallError
from gpu_client.elastic.machine.local_ranks import LocalRanks
from gpu_client.elastic.machine.machine_outer import MachineOuter
from gpu_client.elastic.membership.agent_world import AgentWorldCalls, NodeSeat
from gpu_client.elastic.membership.solo_world import SOLO_NODE, SoloWorld
from gpu_client.elastic.membership.world_calls import WorldCalls
from gpu_client.elastic.outer import ElasticNode, ElasticOuter
from gpu_client.elastic.parameters import BUCKET_VALUES, TrainedParameters
from gpu_client.elastic.recovery.wire_transfer import StateServer, WireTransfer

ENGINES = ("wire", "gloo")
DEFAULT_ENGINE = "wire"
OuterLoop = ElasticOuter | MachineOuter
"""Outer loop of a node with one or several processes."""


def open_outer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    engine: str = DEFAULT_ENGINE,
    codec: str = DEFAULT_CODEC,
    variables: Mapping[str, str] = os.environ,
    rank: int = 0,
    processes: int = 1,
    after_step: Callable[[], object] = lambda: None,
    **options: Any,
) -> OuterLoop:
    """Return the outer loop of this process; outside of an elastic job, the loop of a world of one node.

    engine: "wire", or "gloo" for a trusted network. codec: "fp32", "bf16", "int8" or "int4", for the wire. rank,
    processes: of this machine. after_step: called in all of several processes after each step. options: see
    ElasticOuter. Raises ElasticSetupError.
    """
    if engine not in ENGINES:
        raise ElasticSetupError(f"there is no engine {engine!r}", f"Use one of {', '.join(ENGINES)}")
    if codec not in CODECS:
        raise ElasticSetupError(f"there is no codec {codec!r}", f"Use one of {', '.join(CODECS)}")
    _require_usable(model)
    if isinstance(model, DistributedDataParallel):
        # Nodes with one process have the names of the model itself.
        model = model.module

    def begin(parameters: TrainedParameters | None) -> ElasticOuter:
        return _open_node(
            model, optimizer, parameters, engine=engine, codec=codec, variables=variables, options=options
        )

    if processes == 1:
        return begin(None)
    return MachineOuter(model, optimizer, LocalRanks(rank, processes), begin, after_step)


def _require_usable(model: torch.nn.Module) -> None:
    """Refuse models whose parameters other libraries keep in a form of their own."""
    if any(type(one).__name__ == "FullyShardedDataParallel" for one in model.modules()):
        raise ElasticSetupError("the model is sharded by FSDP1", "Shard with fully_shard (FSDP2), or wrap in DDP")
    if type(model).__name__ == "DeepSpeedEngine" or any(hasattr(one, "ds_id") for one in model.parameters()):
        raise ElasticSetupError("the model belongs to DeepSpeed", "Shard with fully_shard (FSDP2), or wrap in DDP")


def _open_node(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: TrainedParameters | None,
    *,
    engine: str,
    codec: str,
    variables: Mapping[str, str],
    options: Mapping[str, Any],
) -> ElasticOuter:
    """Return the outer loop of a node. parameters: of a node with several processes."""
    values = sum(one.numel() for one in model.parameters() if one.requires_grad)
    bucket_bytes = 8 * max(BUCKET_VALUES, -(-values // 4096))
    seat = NodeSeat.read(variables)
    if seat is None:
        # Without a seat there is no peer, and a group of one node never uses its engine.
        lone = WireEngine(None, CODECS[codec])
        node = ElasticNode(SOLO_NODE, lone, SoloWorld(), WireTransfer(lone.dialer, bucket_bytes), codec=codec)
        return ElasticOuter(model, optimizer, node, parameters=parameters, **options)
    world = AgentWorldCalls(seat.socket)
    identity = NodeIdentity()
    wire = WireEngine(identity, CODECS[codec])
    server = StateServer()
    handlers = {**wire.handlers, **server.handlers}
    name = seat.new_node()
    try:
        listener = Listener(identity, handlers, _certificates_of(world), port=seat.port)
    except OSError as error:
        raise ElasticSetupError(
            f"port {seat.port} of this machine cannot be used ({error.strerror})",
            "Set BATON_ELASTIC_PORT of the agent to a free port that peers can reach, or to 0 for any free port",
        ) from error
    if engine == DEFAULT_ENGINE:
        wire.dialer.relay = RelayPort(world.relay, name, handlers)
    reducer: Engine = wire
    addresses = seat.addresses_at(listener.port)
    if engine == "gloo":
        rendezvous = socket.create_server(("0.0.0.0", 0))  # noqa: S104 - gloo is for trusted networks
        reducer = GlooEngine(rendezvous)
        # Joining nodes read the outer state at the other addresses.
        addresses.append(f"{addresses[0].rpartition(':')[0]}:{rendezvous.getsockname()[1]}")
    node = ElasticNode(
        name,
        reducer,
        world,
        WireTransfer(wire.dialer, bucket_bytes),
        addresses=tuple(addresses),
        certificate=identity.certificate,
        engine_name=engine,
        codec=codec if engine == "wire" else "fp32",
    )
    try:
        outer = ElasticOuter(model, optimizer, node, parameters=parameters, **options)
    except ValidationError as error:
        raise ElasticSetupError(
            f"the addresses {', '.join(addresses)} cannot be advertised",
            "Set BATON_ELASTIC_ADDRESSES of the agent to host:port, comma-separated",
        ) from error
    server.source = outer.source
    return outer


def _certificates_of(world: WorldCalls) -> Callable[[], Iterable[str] | None]:
    def read() -> list[str] | None:
        try:
            return [one.certificate for one in world.view().nodes]
        except WorldCallError:
            return None

    return read
