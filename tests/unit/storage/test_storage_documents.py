"""Documents lose nothing."""

from __future__ import annotations

import types
import typing
from typing import Any

import pytest
from pydantic import BaseModel

from contract.errors import ErrorCode
from contract.history import EventType
from contract.jobs import Progress
from functions.domain.errors import Refusal
from functions.domain.records import Attempt, CheckpointRecord, Event, Job, Spec, TransferGrant
from functions.storage.documents import MAX_DOCUMENT_BYTES, dump, load


def models_within(annotation: Any) -> set[type[BaseModel]]:
    """The models that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {model for part in typing.get_args(annotation) for model in models_within(part)}


def all_models() -> set[type[BaseModel]]:
    found: set[type[BaseModel]] = set()
    pending: set[type[BaseModel]] = {Attempt, CheckpointRecord, Event, Job, TransferGrant, Progress}
    while pending:
        model = pending.pop()
        found.add(model)
        for field in model.model_fields.values():
            pending |= models_within(field.annotation) - found
    return found


def nullable(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType) and type(None) in typing.get_args(
        annotation
    )


def test_a_field_that_is_left_out_comes_back_as_none() -> None:
    models = all_models()
    assert len(models) > 10
    for model in models:
        for name, field in model.model_fields.items():
            if nullable(field.annotation):
                assert field.default is None, f"{model.__name__}.{name} would come back as {field.default!r}"


def test_none_within_free_form_values_stays() -> None:
    data = {"a": None, "b": [None, {"c": None}], "d": {"": None}, "f": 5e-324, "g": 2**70, "h": -0.0, "i": 1.0}
    event = Event(seq=1, type=EventType.SUBMITTED, at=1, epoch=0, data=data)
    assert load(Event, dump(event)) == event
    assert str(load(Event, dump(event)).data) == str(data)
    job = Job(
        id="j", tenant="t", spec=Spec(command=["\u00fc\U0001f600\x00"], parameters=data), created_at=1, updated_at=1
    )
    assert load(Job, dump(job)) == job


def test_the_size_is_counted_in_bytes() -> None:
    fits = Spec(command=["x" * (MAX_DOCUMENT_BYTES - 1000)])
    assert load(Spec, dump(fits)) == fits
    with pytest.raises(Refusal) as refused:
        dump(Spec(command=["\u00fc" * (MAX_DOCUMENT_BYTES // 2)]))
    assert refused.value.code is ErrorCode.PAYLOAD_TOO_LARGE
