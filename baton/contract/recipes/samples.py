"""Parameters that a recipe would take, made from its schema: what fails with all of them fails with any."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from baton.contract.base import JsonObject
from baton.contract.recipes.model import Parameter, Recipe

MAX_SAMPLES = 100
_ROUNDS = 8
_CHOICES = 32


class Sample(NamedTuple):
    """Of a job: its parameters, and where its inputs go."""

    given: JsonObject
    inputs: list[str]


def samples_of(recipe: Recipe) -> Iterator[Sample]:
    """Everything set, what is required alone, then one value after another; none if no value of one can be guessed."""
    values = {name: values_of(spec) for name, spec in recipe.parameters.items()}
    if not all(values.values()):
        return iter(())
    return islice(_samples(recipe, values), MAX_SAMPLES)


def values_of(spec: Parameter) -> list[Any]:
    """Some that the parameter may have: its default, choices, bounds, short texts."""
    found: list[Any] = []
    for value in (spec.default, *_guesses(spec)):
        known = any(type(value) is type(other) and value == other for other in found)
        if value is not None and not known and spec.problem(value) is None:
            found.append(value)
    return found


def _samples(recipe: Recipe, values: dict[str, list[Any]]) -> Iterator[Sample]:
    everywhere = [one.into for one in recipe.inputs]
    needed = [one.into for one in recipe.inputs if one.required]
    full = {name: some[0] for name, some in values.items()}
    least = {name: some[0] for name, some in values.items() if recipe.parameters[name].required}
    yield Sample(full, everywhere)
    yield Sample(least, needed)
    for number in range(1, _ROUNDS):
        yield Sample({name: some[number % len(some)] for name, some in values.items()}, everywhere)
    for name, some in values.items():
        for value in some[1:]:
            yield Sample({**full, name: value}, everywhere)
        for value in some:
            yield Sample({**least, name: value}, needed)


def _guesses(spec: Parameter) -> Iterator[Any]:
    if spec.type == "boolean":
        yield from (True, False)
    elif spec.type in ("string", "strings"):
        texts = (spec.choices or [])[:_CHOICES] or ["a" * max(spec.min_length, min(4, spec.max_length)), "1", ""]
        yield from texts if spec.type == "string" else ([text] for text in texts)
        if spec.type == "strings":
            yield from (texts[: spec.max_items], [])
    else:
        yield from _numbers(spec)


def _numbers(spec: Parameter) -> Iterator[int | float]:
    """Bounds, what lies between them, and what lies beside each."""
    bounds = [spec.minimum, spec.exclusive_minimum, spec.maximum, spec.exclusive_maximum]
    said = [bound for bound in bounds if bound is not None]
    near = [*said, *([sum(said) / len(said)] if said else []), 1.0, 0.0]
    step = spec.multiple_of or 1
    for number in near:
        whole = int(number // step) * step
        yield from (whole, whole + step, whole - step)
        if spec.type == "number":
            yield from (float(number), number + 0.5, number - 0.5)
