"""Diagnose failures of gloo's operations, whose errors do not name a member."""

from __future__ import annotations

from typing import Any

import torch
from conftest import gloo_members
from engines_kit import ROUND, TIMEOUT_S, Crew

from gpu_client.elastic.engines.engine import Bucket, Engine
from gpu_client.elastic.errors import PeerLostError


class FailingCollectives:
    """Collectives of a survivor whose operations end with an error of gloo."""

    def __init__(self, collectives: Any, message: str) -> None:
        self.abort = collectives.abort
        self.message = message

    def alltoall_base(self, *_: Any) -> Any:
        """Fail as gloo does."""
        raise RuntimeError(self.message)


def test_a_survivor_that_another_one_resets_names_the_silent_member() -> None:
    makers, peers = gloo_members(3)
    crew = Crew([make() for make in makers], peers)
    try:
        crew.open()
        for engine, message in zip(crew.engines, ("Operation timed out!", "Connection closed by peer"), strict=False):
            engine._collectives = FailingCollectives(engine._collectives, message)

        def reduce(rank: int, engine: Engine) -> None:
            if rank < 2:
                engine.reduce(ROUND, [Bucket(0, torch.ones(3), torch.empty(3))], [1 / 3] * 3, TIMEOUT_S, print)

        lost = crew.together(reduce)[:2]
        assert all(isinstance(one, PeerLostError) for one in lost)
        assert [(one.nodes, one.cause) for one in lost] == [((peers[2].node,), "silent")] * 2
    finally:
        crew.close()
