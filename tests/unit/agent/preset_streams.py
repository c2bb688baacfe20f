"""Generate losses of good and bad trainings, seeded, as the agent receives them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

Stream = Callable[[random.Random], list[float]]


def noise(chance: random.Random, points: int, scale: float) -> list[float]:
    return [chance.gauss(0, scale) for _ in range(points)]


def random_walk(chance: random.Random) -> list[float]:
    value, found = 2.0, []
    for _ in range(5000):
        value += chance.gauss(0, 0.01)
        found.append(value)
    return found


def wandering(chance: random.Random) -> list[float]:
    """Generate a value that returns to its mean, such as a reward."""
    value, found = 0.0, []
    for _ in range(5000):
        value = 0.97 * value + chance.gauss(0, 0.1)
        found.append(value)
    return found


def language_model(
    chance: random.Random, *, points: int = 5000, spikes: float = 0.004, tallest: float = 6
) -> list[float]:
    """Generate 10.8 down to 2.2 with spikes of up to `tallest` that last up to 100 steps."""
    found = [2.2 + 8.6 * math.exp(-at / 400) + 1.2 * math.exp(-at / 3000) for at in range(points)]
    found = [value + off for value, off in zip(found, noise(chance, points, 0.08), strict=True)]
    at = 0
    while at < points:
        if chance.random() < spikes:
            height, length = chance.uniform(0.5, tallest), chance.randint(3, 25)
            for behind in range(min(length * 4, points - at)):
                found[at + behind] += height * math.exp(-behind / length)
            at += length * 4
        at += 1
    return found


def cosine_restarts(chance: random.Random) -> list[float]:
    """Generate a loss that each restart, every 800 steps, lifts by up to 0.9 for 300 steps."""
    found = []
    for at in range(5000):
        lifted = 0.9 * math.exp(-at / 3000 - (at % 800) / 150) if at >= 800 else 0.0
        found.append((2.3 * math.exp(-at / 200) + 0.05 + lifted) * math.exp(chance.gauss(0, 0.1)))
    return found


def adversarial(chance: random.Random) -> list[float]:
    """Generate the loss of two adversarial networks: it swings, drifts and has a tail."""
    drift, found = 0.0, []
    for at in range(5000):
        drift += chance.gauss(0, 0.006)
        found.append(0.7 + 0.8 * math.sin(at / 90 + chance.gauss(0, 0.3)) + drift + chance.expovariate(3))
    return found


def diffusion(chance: random.Random) -> list[float]:
    """Generate one image a step at a random time step: noise without a trend."""
    return [chance.gammavariate(1.2, 0.1) for _ in range(5000)]


def harder_data(chance: random.Random) -> list[float]:
    """Generate a loss whose data become harder or easier every 500 steps."""
    return [2 * math.exp(-at / 300) + 0.3 + 0.4 * (at // 500 % 2) + chance.gauss(0, 0.05) for at in range(4000)]


def whole_batch(chance: random.Random) -> list[float]:
    """Generate a loss without noise, constant in the end."""
    return [round(2.3 * math.exp(-at / 200) + 0.01, 6) for at in range(4000)]


def constant(chance: random.Random) -> list[float]:
    return [math.log(10)] * 2000


HEALTHY: Mapping[str, Stream] = {
    stream.__name__: stream
    for stream in (
        random_walk, wandering, language_model, cosine_restarts, adversarial, diffusion, harder_data, whole_batch,
        constant,
    )
}  # fmt: skip


def collapse(chance: random.Random) -> list[float]:
    """Generate a language model's loss that rises from 2.8 to 7.3 within 50 steps of step 2000 and stays."""
    found = language_model(chance, points=2600)
    for at in range(2000, 2600):
        found[at] += (7.3 - 2.8) * (1 - math.exp(-(at - 2000) / 15))
    return found


def forgotten(chance: random.Random) -> list[float]:
    """Generate the loss of a classifier that knows nothing after step 600: ln 10."""
    found = [(2.3 * math.exp(-at / 60) + 0.03) * math.exp(chance.gauss(0, 0.4)) for at in range(600)]
    return found + [2.303 + chance.gauss(0, 0.02) for _ in range(400)]


def explosion(chance: random.Random) -> list[float]:
    """Generate a loss that grows by five per cent at each step."""
    found = language_model(chance, points=2300)
    return [value * math.exp(0.05 * max(0, at - 2000)) for at, value in enumerate(found)]


def quick_explosion(chance: random.Random) -> list[float]:
    """Generate a loss that becomes infinite."""
    found = language_model(chance, points=2600)
    return [value * 1.3 ** max(0, at - 2000) if at < 4700 else math.inf for at, value in enumerate(found)]


def slow_explosion(chance: random.Random) -> list[float]:
    found = language_model(chance, points=2900)
    return [value * math.exp(0.01 * max(0, at - 2000)) for at, value in enumerate(found)]


def broken_fine_tuning(chance: random.Random) -> list[float]:
    """Generate a diffusion loss with mean 0.12, and from step 800 on the loss of predicting from nothing."""
    return diffusion(chance)[:800] + [1 + chance.gauss(0, 0.1) for _ in range(400)]


DIVERGING: Mapping[str, tuple[Stream, int]] = {
    "collapse": (collapse, 2000),
    "forgotten": (forgotten, 600),
    "explosion": (explosion, 2000),
    "quick_explosion": (quick_explosion, 2000),
    "slow_explosion": (slow_explosion, 2000),
    "broken_fine_tuning": (broken_fine_tuning, 800),
}
"""Streams of damaged trainings, with the step at which the damage begins."""
