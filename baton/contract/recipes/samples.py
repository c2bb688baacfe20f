"""Generate sample parameters from a recipe's schema: a text that fails with every sample fails for every job."""

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
    """Parameters of a sample job, and the folders of its inputs."""

    given: JsonObject
    inputs: list[str]


def samples_of(recipe: Recipe) -> Iterator[Sample]:
    """Yield samples: all parameters set, only the required ones, then each value of each parameter.

    Yields nothing if some parameter has no guessable value.
    """
    values = {name: values_of(spec) for name, spec in recipe.parameters.items()}
    if not all(values.values()):
        return iter(())
    return islice(_samples(recipe, values), MAX_SAMPLES)


def values_of(spec: Parameter) -> list[Any]:
    """Return some allowed values of a parameter: default, choices, bounds, short texts."""
    found: list[Any] = []
    for value in (spec.default, *_guesses(spec)):
        known = any(type(value) is type(other) and value == other for other in found)
        if value is not None and not known and spec.problem(value) is None:
            found.append(value)
    return found


def _samples(recipe: Recipe, values: dict[str, list[Any]]) -> Iterator[Sample]:
    all_inputs = [folder.into for folder in recipe.inputs]
    required_inputs = [folder.into for folder in recipe.inputs if folder.required]
    full = {name: guesses[0] for name, guesses in values.items()}
    least = {name: guesses[0] for name, guesses in values.items() if recipe.parameters[name].required}
    yield Sample(full, all_inputs)
    yield Sample(least, required_inputs)
    for number in range(1, _ROUNDS):
        yield Sample({name: guesses[number % len(guesses)] for name, guesses in values.items()}, all_inputs)
    for name, guesses in values.items():
        for value in guesses[1:]:
            yield Sample({**full, name: value}, all_inputs)
        for value in guesses:
            yield Sample({**least, name: value}, required_inputs)


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
    """Yield the bounds, their mean, and the neighbors of each."""
    all_bounds = [spec.minimum, spec.exclusive_minimum, spec.maximum, spec.exclusive_maximum]
    bounds = [bound for bound in all_bounds if bound is not None]
    near = [*bounds, *([sum(bounds) / len(bounds)] if bounds else []), 1.0, 0.0]
    step = spec.multiple_of or 1
    for number in near:
        whole = int(number // step) * step
        yield from (whole, whole + step, whole - step)
        if spec.type == "number":
            yield from (float(number), number + 0.5, number - 0.5)
