"""Print the verdicts of the rule language on generated rules and streams, the same in every process.

`python -m tests.kits.rules.verdicts FILE` evaluates the cases in FILE; only modules that Lambda has can be imported.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, NamedTuple

from baton.contract.rules.document.loader import load
from baton.contract.rules.document.rule import RuleSet
from baton.contract.rules.engine.rule_evaluator import Evaluator
from baton.contract.rules.engine.verdicts import Verdict

COUNT = 10_000
ALLOWED = frozenset(("baton", "tests", "yaml", "_yaml", *sys.stdlib_module_names))
"""Modules that the process may import; Lambda has more packages, and the language uses none of them."""
Observation = tuple[dict[str, Any], int, float, str]
"""Metrics, step, time, event."""


class Cases(NamedTuple):
    """Cases: number n uses document n % len(documents), and streams and groups alike."""

    documents: Sequence[str]
    refused: Sequence[str]
    """Documents with faults."""
    streams: Sequence[Sequence[Observation]]
    groups: Sequence[Sequence[float] | None]
    count: int

    def verdicts(self, shaped: Callable[[float, int], object] | None = None) -> Iterator[str]:
        """Evaluate each case. `shaped`: the form of finite numbers, if not float.

        Each twentieth case is evaluated as the control plane does it: by a new evaluator for each observation, which
        takes the state back that the one before left.
        """
        for text in self.refused:
            yield repr(load(text).faults)
        found = [load(text) for text in self.documents]
        for number in range(self.count):
            rules = found[number % len(found)].rules
            assert rules is not None
            stream = self.streams[number % len(self.streams)]
            if shaped is not None:
                stream = [_shaped(one, shaped) for one in stream]
            group = Group(self.groups[number % len(self.groups)])
            yield f"{number} {list(_said(rules, stream, group, again=number % 20 == 0))}"


class Group:
    """Group of jobs with equal values; this job is the first."""

    def __init__(self, values: Sequence[float] | None) -> None:
        self._values = values

    def members(self, metric: str, step: int | None) -> Sequence[float] | None:
        return self._values and self._values[(step or 0) % 2 :]

    def own(self, metric: str, step: int | None) -> float | None:
        return self._values[0] if self._values and not (step or 0) % 2 else None


def _shaped(observation: Observation, shaped: Callable[[float, int], object]) -> Observation:
    metrics, step, now, event = observation
    given = {
        name: shaped(value, number) if type(value) is float and value - value == 0 else value
        for number, (name, value) in enumerate(metrics.items())
    }
    return given, step, now, event


def _said(rules: RuleSet, stream: Sequence[Observation], group: Group, *, again: bool) -> Iterator[tuple[object, ...]]:
    evaluator = Evaluator(rules, group)
    for metrics, step, now, event in stream:
        for verdict in evaluator.observe(metrics, step=step, now=now, event=event):
            yield _plain(verdict)
        if again:
            state = json.dumps(evaluator.state_dict(), allow_nan=False)
            evaluator = Evaluator(rules, group)
            evaluator.load_state_dict(json.loads(state))
    for verdict in evaluator.statuses():
        yield _plain(verdict)


def _plain(verdict: Verdict) -> tuple[object, ...]:
    return (*map(str, verdict[:3]), *verdict[3:])


class Refusal(MetaPathFinder):
    """Importer that rejects all modules outside Lambda."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"{name} is not to be had in Lambda", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, Refusal())
    foreign = {name.partition(".")[0] for name in sys.modules} - ALLOWED - {"__main__"}
    print(sorted(name for name in foreign if not name.startswith(("_", "sitecustomize"))))
    for line in pickle.loads(Path(sys.argv[1]).read_bytes()).verdicts():
        print(line)
