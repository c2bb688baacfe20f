"""Test the import of a handler in a fresh process: CPU time and forbidden modules."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import get_args

import pytest

from bench.api.cold_start import TARGET_RATIO, TYPICAL, clients_of, cpu_seconds, handlers, loading, modules_of
from cdk.resources.access import ACCESS
from functions.api.http.route import Function

pytestmark = pytest.mark.processes

ROUNDS = 2
TRIES = 16
NEVER = {"torch", "requests", "boto3", "aws_xray_sdk", "hypothesis", "schemathesis", "starlette", "moto"}
MODELS_AND_ROUTERS = {"pydantic", "pydantic_core", "yaml", "aws_lambda_powertools.event_handler"}


def test_every_deployed_function_is_measured() -> None:
    assert handlers() == sorted(ACCESS)


@pytest.mark.timeout(900)
def test_every_handler_loads_within_half_as_much_again_as_a_plain_one() -> None:
    """Repeat the rounds for handlers above the limit, in turns with the plain handler, so that load affects both."""
    limits = {name: 1.0 if name == "authorizer" else TARGET_RATIO for name in handlers()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in limits}
    above = sorted(limits)
    for _ in range(TRIES):
        seconds = cpu_seconds({"": TYPICAL, **{name: loading(name) for name in above}}, ROUNDS)
        for name in above:
            found[name] += zip(seconds[name], seconds[""], strict=True)
        above = [name for name in above if ratio(found[name]) > limits[name]]
        if not above:
            return
    ratios = {name: round(ratio(found[name]), 2) for name in above}
    pytest.fail(f"above {TARGET_RATIO}, or the authorizer, which is in front of every cold call, above 1: {ratios}")


def ratio(rounds: Sequence[tuple[float, float]]) -> float:
    """CPU time of a handler against that of the plain one, from the same rounds.

    Others on the machine make either slower. The quickest of each, and the middle of the rounds' own ratios, both come
    to the truth with more rounds; a storm rarely spoils both.
    """
    quickest = min(mine for mine, _ in rounds) / min(plain for _, plain in rounds)
    return min(quickest, median(mine / plain for mine, plain in rounds))


def test_one_storm_does_not_make_a_handler_slow_and_a_slow_one_is_found() -> None:
    calm = [(1.3, 1.0)] * 4
    assert ratio([*calm, (4.0, 1.0)]) == ratio([*calm, (1.3, 0.5)]) == pytest.approx(1.3)
    assert ratio([(1.6, 1.0), (2.4, 1.5), (3.2, 2.0), (1.6, 1.1), (1.7, 1.0)]) > TARGET_RATIO


@pytest.mark.parametrize("name", sorted(ACCESS))
def test_no_handler_loads_what_it_does_not_need(name: str) -> None:
    loaded = modules_of(name)
    assert not NEVER & loaded
    own = {f"functions.api.routes.{name}"} if name in get_args(Function) else set()
    assert {module for module in loaded if module.startswith("functions.api.routes.")} == own
    assert not {module for module in loaded if module.startswith("baton.contract.rules")}, (
        "it is loaded where rules are checked"
    )


@pytest.mark.parametrize("name", ["admin", "fleet", "machines", "rings", "submitter"])
def test_a_handler_with_more_stores_shares_one_client_among_them(name: str) -> None:
    assert clients_of(name) == ["dynamodb"]


def test_the_authorizer_loads_neither_models_nor_routes() -> None:
    loaded = modules_of("authorizer")
    assert not MODELS_AND_ROUTERS & loaded
    ours = {module for module in loaded if module.startswith(("baton.contract.", "functions.api."))}
    assert ours == {
        "baton.contract.errors",
        "baton.contract.names",
        "functions.api.http",
        "functions.api.http.authorizer",
    }
