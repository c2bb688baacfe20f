"""The example in every wire model's docstring is one: it parses, and names fields that exist."""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl

import pytest
from pydantic import BaseModel, ValidationError

from baton.contract.base import AnswerModel, WireModel
from baton.contract.worker.calls import HeartbeatAnswer

MODULES = (
    "admin.keys",
    "admin.sessions",
    "admin.shares",
    "admin.webhooks",
    "checkpoints.calls",
    "checkpoints.manifest",
    "elastic.nodes",
    "elastic.data",
    "elastic.relay",
    "elastic.world",
    "errors",
    "fleets.fleet",
    "fleets.registries",
    "jobs.curves",
    "jobs.events",
    "jobs.history",
    "jobs.job",
    "jobs.policy",
    "objects.artifacts",
    "objects.transfers",
    "recipes.calls",
    "recipes.model",
    "recipes.plan",
    "worker.calls",
)
JOB_ID = "146683a1-cb76-4702-9fef-fcccd32594f1"


def models() -> list[type[BaseModel]]:
    """Return every model of the contract."""
    found = []
    for name in MODULES:
        module = import_module(f"baton.contract.{name}")
        found += [
            member
            for member in vars(module).values()
            if inspect.isclass(member) and issubclass(member, BaseModel) and member.__module__ == module.__name__
        ]
    return found


def example_of(model: type[BaseModel]) -> tuple[dict[str, Any], bool]:
    """The example as a value, and whether it is complete (nothing left out as `...`)."""
    found = re.search(r"Example:\s+`([^`]+)`", inspect.cleandoc(model.__doc__ or ""))
    assert found, f"{model.__name__} has no example in its docstring"
    text = " ".join(found.group(1).split())
    if text.startswith("?"):
        return dict(parse_qsl(text[1:], strict_parsing=True)), True
    complete = ", ...}" not in text
    text = text.replace(", ...}", "}").replace("146683a1-...", JOB_ID).replace("<64 hex>", "a" * 64)
    return json.loads(text), complete


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_example_parses(model: type[BaseModel]) -> None:
    example, complete = example_of(model)
    assert set(example) <= {field.alias or name for name, field in model.model_fields.items()}
    try:
        model.model_validate(example)
    except ValidationError as error:
        # Where the example is cut, fields may be missing; nothing else may be wrong.
        assert not complete, error
        assert {problem["type"] for problem in error.errors()} == {"missing"}


def requests() -> list[type[WireModel]]:
    """Return every request model but `UploadedPart`, which may carry any answer of S3."""
    return [model for model in models() if issubclass(model, WireModel) and model.__name__ != "UploadedPart"]


@pytest.mark.parametrize("model", requests(), ids=lambda model: model.__name__)
def test_requests_refuse_unknown_fields(model: type[WireModel]) -> None:
    example, _ = example_of(model)
    with pytest.raises(ValidationError) as caught:
        model.model_validate({**example, "surprise": 1})
    assert ("extra_forbidden", ("surprise",)) in [(p["type"], p["loc"]) for p in caught.value.errors()]


@pytest.mark.parametrize("model", [m for m in models() if issubclass(m, AnswerModel)], ids=lambda m: m.__name__)
def test_answers_may_grow(model: type[AnswerModel]) -> None:
    example, _ = example_of(model)
    try:
        model.model_validate({**example, "surprise": 1})
    except ValidationError as error:
        assert {problem["type"] for problem in error.errors()} == {"missing"}


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_values_are_immutable(model: type[BaseModel]) -> None:
    assert model.model_config["frozen"] is True


@pytest.mark.parametrize(
    ("word", "meant"), [("rules", "continue"), (None, "continue"), ([7], "continue"), ("pause", "pause")]
)
def test_a_directive_of_a_later_version_is_no_directive(word: object, meant: str) -> None:
    example, _ = example_of(HeartbeatAnswer)
    answer = HeartbeatAnswer.model_validate(
        {**example, "epoch": 1, "lease_duration_s": 90, "heartbeat_interval_s": 30, "server_time": 1, "directive": word}
    )
    assert answer.directive == meant
