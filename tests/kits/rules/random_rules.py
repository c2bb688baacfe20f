"""Random rules and streams from a seed through the whole controller, for the suite and the bench.

Unlike the properties' (tests/properties/test_rule_fuzz.py) they are made in bulk, 100,000 in minutes, and they go the
way that a training's do: a document's text, a controller that carries out what rules want, its state in a checkpoint.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from baton.contract.rules.document.rule import EVENTS
from baton.contract.rules.language.function_signatures import SUMMARIES
from tests.unit.controller.controller_kit import Setup, command

NAMES = ("loss", "eval.loss", "x", "grad_norm", "wall", "gpu.mem", "step", "ckpt.age", "lr", "cost", "y")
RULES_AT_ONCE = 10
STEPS = 14
_LEAVES = (*NAMES, *NAMES, "0", "1", "2.5", "1e300", "30s", "2GiB", "inf", "true", "false")
_PERIODS = ("3 checks", "1 step", "2 steps", "5s", "1m", "10m", "4 steps", "2 checks", "2 of 3", "3 of all", "soon")
_ACTIONS: tuple[Any, ...] = (
    *("stop", "save", "evaluate", "pause", "skip_batch", "rollback", "requeue", {"profile": 3}, {"hook": "mine"}),
    *({"stop": "failed"}, {"log": "x is {x:.2f} {loss}"}, {"alert": "{step:d} {y:.1%}"}, {"save": "best"}),
    *({"set": {"knob": "lr", "factor": 0.5, "min": 1e-6}}, {"set": {"knob": "broken", "value": 1}}, {"hook": "broken"}),
    *(
        {"rollback": {"to": "best", "skip": 3}},
        {"scale": {"group": "g", "delta": 1}},
        {"stop": 3},
        {"log": "{x.y.z!r}"},
    ),
)
_WILD: tuple[Any, ...] = (None, True, -1, 10**20, math.nan, "", "x" * 300, [], {}, [[1]], {"a": {"b": 1}}, "\0", "{}")
_VALUES: tuple[Any, ...] = (
    *(math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, -1e308, 5e-324, 1e16, 10**400, -(10**400), True, None),
    *("1.0", b"", [], object(), 2j, {}, "nan"),
)


class Hostile:
    """Value that raises on every operation."""

    def __float__(self) -> float:
        raise RuntimeError("no")

    __str__ = __repr__ = __float__  # type: ignore[assignment]


class Broken:
    """Knob that fails."""

    def read(self) -> float:
        raise OSError("no")

    def write(self, value: float) -> None:
        raise OSError("no")


class Knob:
    """Knob that works."""

    value = 1.0

    def read(self) -> float:
        return self.value

    def write(self, value: float) -> None:
        self.value = value


@dataclass
class Found:
    """Result of a run."""

    rules: int = 0
    refused: int = 0
    """Number of the rules that the check refused."""
    steps: int = 0
    fired: int = 0
    crashes: list[str] = field(default_factory=list)
    """Exceptions in the training loop and faults of the language itself, with rules and seed."""


def run(seed: int, rules: int) -> Found:
    """Run that many rules of a seed, ten at a time, each group on a stream of its own."""
    found = Found()
    for number in range(math.ceil(rules / RULES_AT_ONCE)):
        chance = random.Random(f"{seed}.{number}")
        said: list[Any] = []
        try:
            said += [_rule(chance, index) for index in range(RULES_AT_ONCE)]
            _train(chance, said, found)
        except Exception as error:
            found.crashes.append(f"seed {seed}.{number}: {type(error).__name__}: {error!s:.200}: {said!s:.2000}")
        found.rules += len(said)
    return found


def _train(chance: random.Random, said: list[Any], found: Found) -> None:
    """Run all sound rules on a stream with a checkpoint in the middle."""
    sound = [one for one in said if _is_sound(one)]
    found.refused += len(said) - len(sound)
    text = json.dumps({"rules": sound})
    before, after = _setup(text), _setup(text)
    for half, setup in enumerate((before, after)):
        if half:
            setup.steering.load_state_dict(json.loads(json.dumps(before.steering.state_dict(), allow_nan=False)))
            setup.steering.resume(STEPS // 2, [])
        for step in range(STEPS // 2 * half, STEPS // 2 * (half + 1)):
            setup.report(step, chance.choice((0.1, 1.0, 7.0, 1e6)), **_metrics(chance))
            if chance.random() < 0.2:
                setup.steering.report_event(chance.choice(EVENTS), step, _metrics(chance))
            if chance.random() < 0.05:
                setup.steering.receive(command(step + 1, chance.choice(("set", "save", "?")), knob="lr", factor=0.5))
            found.steps += 1
        setup.steering.close()
        found.fired += len(setup.agent.fired())
        found.crashes += list(_wrong(setup))


def _wrong(setup: Setup) -> Iterator[str]:
    """List wrong messages of the controller: unreadable sound rules, faults of its own."""
    for told in setup.agent.heard:
        if told["type"] == "rules_in_force" and told.get("rejected") is not None:
            yield f"sound rules are rejected: {told}"
        if told["type"] == "decision" and told["decision"] == "rule.error" and " is no number (" not in told["message"]:
            yield f"an error that no value has made: {told}"
        if "all counters begin anew" in str(told.get("message")):
            yield f"its own state is not taken back: {told}"


def _setup(text: str) -> Setup:
    setup = Setup(text)
    hooks = {"mine": lambda order: None, "broken": lambda order: 1 / 0}
    sources = {"y": lambda: 1 / 0}
    setup.steering.offer(knobs={"lr": Knob(), "broken": Broken()}, hooks=hooks, metrics=sources, evaluate=True)
    return setup


def _is_sound(rule: Any) -> bool:
    from baton.contract.rules.document.loader import load_values

    loaded = load_values({"rules": [rule]})
    if (loaded.rules is None) != bool(loaded.faults):
        raise AssertionError(f"neither rules nor faults: {loaded}")
    return loaded.rules is not None


def _metrics(chance: random.Random) -> dict[str, Any]:
    names = chance.sample((*NAMES, "train/f1-macro", "", "not a metric", "epoch"), chance.randint(0, 5))
    return {name: _value(chance) for name in names if name != "step"}


def _value(chance: random.Random) -> Any:
    kind = chance.random()
    if kind < 0.6:
        return chance.gauss(0, 3)
    if kind < 0.7:
        return float(chance.randint(-2, 2))
    return Hostile() if kind > 0.99 else chance.choice(_VALUES)


def _rule(chance: random.Random, index: int) -> Any:
    rule: dict[str, Any] = {"name": f"r{index}", "when": _condition(chance), "do": chance.choice(_ACTIONS)}
    for key, choices in (("for", _PERIODS), ("warmup", _PERIODS[:8]), ("cooldown", _PERIODS[:8])):
        if chance.random() < 0.25:
            rule[key] = chance.choice(choices)
    if chance.random() < 0.2:
        rule["clear"] = _condition(chance)
    if chance.random() < 0.2:
        key = chance.choice(("max_fires", "every", "on"))
        rule[key] = chance.choice({"max_fires": (1, 2, 0), "every": ("2 steps", "5s"), "on": ("log", ["step"])}[key])
    if chance.random() < 0.2:
        rule["mode"] = chance.choice(("enforce", "dry_run"))
    if chance.random() < 0.1:
        rule["on_error"] = chance.choice(("ignore", "stop"))
    if chance.random() < 0.05:
        rule[chance.choice((*rule, "unknown"))] = chance.choice(_WILD)
    return rule


def _condition(chance: random.Random) -> str:
    if chance.random() < 0.1:
        return _expression(chance, 4)
    if chance.random() < 0.3:
        return f"{_condition(chance)} {chance.choice(('and', 'or'))} {_condition(chance)}"
    if chance.random() < 0.1:
        return f"{chance.choice(('missing', 'isnan', 'not isfinite'))}({chance.choice(NAMES)})"
    kind = chance.random()
    left = _summary(chance) if kind < 0.6 else chance.choice(NAMES) if kind < 0.9 else _expression(chance, 2)
    bound = chance.choice(("0", "0", "0", "inf", "1", "x", left))
    return f"{left} {chance.choice(('<', '>', '>=', '==', '!='))} {bound}"


def _summary(chance: random.Random) -> str:
    name = chance.choice(list(SUMMARIES))
    function = SUMMARIES[name]
    if chance.random() < 0.1:
        argument = chance.choice(("0", "1.5", "x", "100001", "min, 2", "10GB"))
    elif function.window:
        argument = chance.choice(("2", "3", "7", "5s", "1m"))
    else:
        argument = "loss" if function.partner else chance.choice(("min", "max")) if function.goal else ""
    return f"{name}({chance.choice(NAMES)}{', ' * bool(argument)}{argument})"


def _expression(chance: random.Random, depth: int) -> str:
    if depth == 0 or chance.random() < 0.2:
        return chance.choice(_LEAVES)
    inner = [_expression(chance, depth - 1) for _ in range(3)]
    kind = chance.randrange(8)
    if kind == 0:
        return _summary(chance)
    if kind == 1:
        return f"{chance.choice(('abs', 'log', 'isnan', 'missing', '-', 'not '))}({inner[0]})"
    if kind == 2:
        return f"{chance.choice(('coalesce', 'min', 'max'))}({inner[0]}, {inner[1]})"
    if kind == 3:
        return f"clamp({inner[0]}, {inner[1]}, {inner[2]})"
    operator = chance.choice((*"+-*/%<>", "<=", "==", "and", "or"))
    return f"({inner[0]} {operator} {inner[1]})"
