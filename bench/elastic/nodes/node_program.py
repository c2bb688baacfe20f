"""Train as one node of a bench: the product's outer loop in a process of its own, with a trace of all that happens."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from bench.elastic.nodes.fault_points import FaultPoints, Throttle, install_points
from gpu_client.elastic import node as elastic_node
from gpu_client.elastic.outer import ElasticOuter
from gpu_client.elastic.rounds.epoch_protocol import ElasticEvent
from gpu_client.elastic.rounds.outer_replica import OuterReplica
from gpu_client.training.byte_transformer import (
    HELD_OUT_BYTES,
    ByteTransformer,
    TextSettings,
    compute_loss,
    read_text,
)

END = "end"
"""File in the cluster's folder with the number of the last round."""
SMALL_VALUES = 1_000_000
"""Outer states up to this size are hashed anew at each commit, without the product's own hash."""
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class NodePlan:
    """Task of a node. step_s: duration of an inner step, at least. values: parameters of a model that drifts at random.

    values 0: the transformer of `settings`, on Python's own library; loss_windows: held-out windows after each round.
    """

    values: int = 0
    inner_steps: int = 10
    step_s: float = 0.0
    codec: str = "int8"
    overlap: bool = False
    saves: bool = False
    """Copy the state as a checkpoint when one is due."""
    loss_windows: int = 0
    settings: Mapping[str, Any] | None = None


class Trace:
    """File of JSON lines, which survives the process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, kind: str, **fields: Any) -> None:
        """Append a line with the time of `time.monotonic`, which all processes share."""
        os.write(self._file, (json.dumps({"at": time.monotonic(), "kind": kind, **fields}) + "\n").encode())


def run(variables: Mapping[str, str], plan: NodePlan, folder: Path, namespace: str | None) -> None:
    """Train until the round that the file END names. folder: this process's own, inside the cluster's."""
    if namespace is not None:
        _enter(namespace)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.environ.update(variables)
    torch.set_num_threads(1)
    trace = Trace(folder / "trace.jsonl")
    points = FaultPoints(folder, trace.write)
    install_points(points, elastic_node)
    Throttle(folder).install()
    task = _Drift(plan) if plan.values else _Text(plan)

    def tell(event: ElasticEvent) -> None:
        trace.write("event", event=event.kind, round=event.round, message=event.message)

    outer = elastic_node.open_outer(
        task.model,
        task.optimizer,
        codec=plan.codec,
        inner_steps=plan.inner_steps,
        overlap=plan.overlap,
        on_event=tell,
    )
    _watch(outer._replica, trace, points)
    trace.write("born", node=outer.node)
    outer.start()
    trace.write("started", round=outer.round)
    _train(outer, task, plan, trace, points, folder.parent / END)
    trace.write("leaving", round=outer.round)
    outer.leave()
    state = outer.state_dict()
    digest = _digest(*state["params"].values(), state["momentum"])
    trace.write("end", round=outer.round, pending=outer.tokens, sha256=digest)


def _train(
    outer: ElasticOuter, task: _Drift | _Text, plan: NodePlan, trace: Trace, points: FaultPoints, end: Path
) -> None:
    measured = -1
    while True:
        try:
            if outer.round >= int(end.read_text()):
                return
        except FileNotFoundError:
            pass
        began = time.monotonic()
        if plan.loss_windows and outer.round != measured:
            measured = outer.round
            trace.write("loss", round=measured, loss=task.held_out_loss())
        task.step()
        time.sleep(max(0.0, began + plan.step_s - time.monotonic()))
        points.cross("step")
        worked = time.monotonic()
        outer.step(tokens=1)
        trace.write("step", round=outer.round, waited_s=time.monotonic() - worked)
        if plan.saves and outer.checkpoint_due:
            began = time.monotonic()
            state = outer.state_dict()
            took_s = time.monotonic() - began
            tensors = [*state.pop("params").values(), *state.values()]
            size = sum(one.nbytes for one in tensors if torch.is_tensor(one))
            trace.write("checkpoint", round=outer.round, seconds=took_s, bytes=size)


class _Drift:
    """Model of one large tensor whose inner steps cost nothing."""

    def __init__(self, plan: NodePlan) -> None:
        self.model = torch.nn.Module()
        self.model.values = torch.nn.Parameter(torch.zeros(plan.values))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self._noise = torch.randn(4096, generator=torch.Generator().manual_seed(os.getpid()))
        self._place = 0

    @torch.no_grad()
    def step(self) -> None:
        values = self.model.values
        start = self._place = (self._place + 4096 * 31) % max(1, len(values) - 4096)
        values[start : start + 4096] += 1e-3 * self._noise[: len(values) - start]

    def held_out_loss(self) -> float:
        return 0.0


class _Text:
    """Transformer of the example, on batches of this process."""

    def __init__(self, plan: NodePlan) -> None:
        settings = TextSettings(**(plan.settings or {}))
        torch.manual_seed(settings.seed)
        self.model = ByteTransformer(settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate)
        text = read_text()
        self._training, held_out = text[:-HELD_OUT_BYTES], text[-HELD_OUT_BYTES:]
        self._window = torch.arange(settings.context + 1)
        self._held_out = held_out[: plan.loss_windows * len(self._window)].view(-1, len(self._window))
        self._batch_size = settings.batch_size
        torch.seed()

    def step(self) -> None:
        starts = torch.randint(len(self._training) - len(self._window), (self._batch_size, 1))
        loss = compute_loss(self.model, self._training[starts + self._window])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        return compute_loss(self.model, self._held_out).item()


def _watch(replica: OuterReplica, trace: Trace, points: FaultPoints) -> None:
    """Trace the deltas that enter each reduce, and the content of each commit."""
    numbers = count()
    begin, commit, adopted = replica.begin_reduce, replica.commit, replica.finish_adoption

    def number_of(contribution: Any) -> int | None:
        return None if contribution is None else vars(contribution).setdefault("number", next(numbers))

    def begin_reduce(decided: Any, epoch: int, *arguments: Any) -> Any:
        unfinished = begin(decided, epoch, *arguments)
        trace.write("reduce", epoch=epoch, round=decided.round, delta=number_of(unfinished.contribution))
        return unfinished

    def note(kind: str, **fields: Any) -> None:
        state = replica.state
        digest = _digest(state.params, state.momentum) if len(state.params) <= SMALL_VALUES else None
        trace.write(kind, round=state.round, hash=f"{replica.hash:016x}", sha256=digest, **fields)

    def checked_commit() -> None:
        unfinished = replica.unfinished
        points.cross("commit")
        commit()
        tries = {epoch: dict(weights) for epoch, weights in unfinished.tries.items()}
        note("commit", epoch=unfinished.epoch, tags=unfinished.tags, tries=tries)
        points.cross("committed")

    def finish_adoption(description: Any) -> Any:
        result = adopted(description)
        note("adopted")
        return result

    replica.begin_reduce, replica.commit = begin_reduce, checked_commit  # type: ignore[method-assign]
    replica.finish_adoption = finish_adoption  # type: ignore[method-assign]


def _digest(*tensors: torch.Tensor) -> str:
    total = hashlib.sha256()
    for one in tensors:
        total.update(one.numpy())
    return total.hexdigest()[:16]


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", namespace).open() as place:
        if libc.setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
