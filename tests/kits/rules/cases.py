"""Generate rules and streams for tests.kits.rules.verdicts, and print the verdicts of a process that has loaded torch.

`python -m tests.kits.rules.cases FILE` writes the cases to FILE. Hypothesis draws depend on the modules that a process
has loaded, therefore the program runs in a process of its own.
"""

from __future__ import annotations

import json
import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from baton.contract.rules.document.loader import load_values
from tests.kits.rules.verdicts import COUNT, Cases, Observation
from tests.properties.test_rule_fuzz import EXPRESSION, SOUND, STREAM, document, rule

LONE = 80
DOCUMENTS, STREAMS, GROUPS = 101, 199, 31
"""No common divisor: all cases are different."""
SHAPES = (float, numpy.float64, lambda value: torch.tensor(value, dtype=torch.float64))


def made_up(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    found: list[Any] = []

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def take(one: Any) -> None:
        found.append(one)

    take()
    return found


def observations(stream: list[tuple[Any, int, float, str]]) -> Iterator[Observation]:
    """Steps and times that mostly go on."""
    step, now = 0, 0.0
    for metrics, steps, seconds, event in stream:
        step, now = step + steps, now + seconds if seconds - seconds == 0 else now
        yield metrics, step, now, event


def cases() -> Cases:
    lone = [*made_up(rule(SOUND, st.nothing()), LONE), *made_up(rule(EXPRESSION, st.nothing()), LONE)]
    sound = [one for one in lone if load_values(document([one])).rules is not None]
    refused = [json.dumps(document([one])) for one in lone if one not in sound]
    chance = random.Random(11)
    documents = [json.dumps(document(chance.sample(sound, chance.randint(1, 2)))) for _ in range(DOCUMENTS)]
    streams = [list(observations(one)) for one in made_up(STREAM, STREAMS)]
    groups = made_up(st.none() | st.lists(st.floats(-5, 5) | st.floats(), max_size=6), GROUPS)
    return Cases(documents, refused, streams, groups, COUNT)


if __name__ == "__main__":
    found = cases()
    Path(sys.argv[1]).write_bytes(pickle.dumps(found))
    for line in found.verdicts(lambda value, number: SHAPES[number % len(SHAPES)](value)):
        print(line)
