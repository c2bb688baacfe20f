"""Draw pictures of shapes, slowly, each from its seed alone.

`python -m demo.ring.shapes FILE SEED FIRST COUNT` draws pictures into a file, to measure a model with.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NAMES = ("disc", "triangle", "square", "star", "cross")
SIDE = 32
"""Side of a picture in pixels."""
NICE = 10
"""Niceness of processes that draw: on one machine the training has priority."""
_FINER = 4
"""Sampling points along the side of a pixel."""
_SHADOW_POINTS = 18
"""Sampling points towards the lamp; the share of them inside the shape is the shadow."""

Points = NDArray[np.float64]


def render(seed: Sequence[int]) -> tuple[NDArray[np.float32], int]:
    """Draw a lit shape with a soft shadow on a grained ground; returns pixels (1, SIDE, SIDE) and index in `NAMES`."""
    chance = np.random.default_rng(list(seed))
    label = int(chance.integers(len(NAMES)))
    size, turned = chance.uniform(0.4, 0.65), chance.uniform(0, 2 * np.pi)
    middle = chance.uniform(-0.25, 0.25, 2)
    lamp = chance.uniform(0, 2 * np.pi)
    ground = chance.uniform(0.4, 0.6)
    paint = ground + chance.choice([-1, 1]) * chance.uniform(0.15, 0.35)
    outline = _outline(NAMES[label], size, turned) + middle

    axis = (np.arange(SIDE * _FINER) + 0.5) / (SIDE * _FINER) * 2 - 1
    x, y = np.meshgrid(axis, axis)
    inside = _inside(outline, x, y)
    shadow = np.zeros_like(x)
    for point in range(1, _SHADOW_POINTS + 1):
        away = 0.4 * point / _SHADOW_POINTS
        shadow += _inside(outline, x - away * np.cos(lamp), y - away * np.sin(lamp))
    lit = ground * (1 - 0.5 * shadow / _SHADOW_POINTS)
    fine = np.where(inside > 0, paint + 0.15 * (x * np.cos(lamp) + y * np.sin(lamp)), lit)
    coarse = fine.reshape(SIDE, _FINER, SIDE, _FINER).mean(axis=(1, 3))
    return (coarse + chance.normal(0, 0.06, coarse.shape)).astype(np.float32)[None], label


def held_out(path: Path) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Read the pictures and labels of a file that `main` has written."""
    with np.load(path) as found:
        return found["images"], found["labels"]


def _outline(name: str, size: float, turned: float) -> Points:
    """Return the corners in order."""
    corners, radii = {
        "disc": (24, (1.0,)),
        "triangle": (3, (1.1,)),
        "square": (4, (1.05,)),
        "star": (10, (1.15, 0.45)),
        "cross": (12, (1.1, 1.1, 0.45)),
    }[name]
    angles = np.arange(corners) * 2 * np.pi / corners
    if name == "cross":
        # Two corners at the end of each arm, one between two arms.
        angles = np.repeat(np.arange(4), 3) * np.pi / 2 + np.tile([-0.3, 0.3, np.pi / 4], 4)
    radius = size * np.resize(radii, corners)
    return np.stack([radius * np.cos(angles + turned), radius * np.sin(angles + turned)], axis=1)


def _inside(outline: Points, x: Points, y: Points) -> Points:
    """Return 1 for the points inside the outline: a ray from them crosses an odd number of sides."""
    crossed = np.zeros(x.shape, dtype=bool)
    for (x1, y1), (x2, y2) in zip(outline, np.roll(outline, -1, axis=0), strict=True):
        level = (y1 > y) != (y2 > y)
        crossed ^= level & (x < (x2 - x1) * (y - y1) / (y2 - y1) + x1)
    return crossed.astype(np.float64)


def main(file: str, seed: str, first: str, count: str) -> None:
    """Draw `count` pictures."""
    drawn = [render([int(seed), number]) for number in range(int(first), int(first) + int(count))]
    np.savez(file, images=np.stack([image for image, _ in drawn]), labels=np.array([label for _, label in drawn]))


if __name__ == "__main__":
    main(*sys.argv[1:])
