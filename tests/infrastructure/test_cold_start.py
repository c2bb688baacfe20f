"""Loading a handler in a fresh process: how long, and what it must not load."""

from __future__ import annotations

import pytest

from cdk.access import ACCESS
from tests.performance.cold_start import TARGET_RATIO, TYPICAL, cpu_seconds, handlers, loading, modules_of

pytestmark = pytest.mark.processes

ROUNDS = 5
TRIES = 5
NEVER = {"torch", "requests", "boto3", "aws_xray_sdk", "hypothesis", "schemathesis", "starlette", "moto"}
MODELS_AND_ROUTERS = {"pydantic", "pydantic_core", "yaml", "aws_lambda_powertools.event_handler"}


def test_every_deployed_function_is_measured() -> None:
    assert handlers() == sorted(ACCESS)


def test_every_handler_loads_within_half_as_much_again_as_a_plain_one() -> None:
    programs = {"": TYPICAL, **{name: loading(name) for name in handlers()}}
    quickest = dict.fromkeys(programs, float("inf"))
    # Others on the machine only make a process slower: with more rounds the quickest come closer to the truth.
    for _ in range(TRIES):
        for name, seconds in cpu_seconds(programs, ROUNDS).items():
            quickest[name] = min(quickest[name], *seconds)
        ratios = {name: round(quickest[name] / quickest[""], 2) for name in handlers()}
        if max(ratios.values()) <= TARGET_RATIO and ratios["authorizer"] <= 1:
            return
    pytest.fail(f"above {TARGET_RATIO}, or the authorizer, which is in front of every cold call, above 1: {ratios}")


@pytest.mark.parametrize("name", sorted(ACCESS))
def test_no_handler_loads_what_it_does_not_need(name: str) -> None:
    assert not NEVER & modules_of(name)


def test_the_authorizer_loads_neither_models_nor_routes() -> None:
    loaded = modules_of("authorizer")
    assert not MODELS_AND_ROUTERS & loaded
    ours = {module for module in loaded if module.startswith(("contract.", "functions.api."))}
    assert ours == {"contract.errors", "contract.names", "functions.api.authorizing", "functions.api.defaults"}
