"""Photographs to train on: crops of the pictures in the wheels of scikit-learn and scikit-image."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

_SUBJECTS = {
    "cat": ("skimage", "data/chelsea.png", (95, 20, 355, 280)),
    "flower": ("sklearn", "datasets/images/flower.jpg", (220, 60, 540, 380)),
    "astronaut": ("skimage", "data/astronaut.png", (100, 0, 356, 256)),
    "coffee": ("skimage", "data/coffee.png", (150, 40, 500, 390)),
    "rocket": ("skimage", "data/rocket.jpg", (180, 60, 480, 360)),
    "china": ("sklearn", "datasets/images/china.jpg", (60, 40, 420, 400)),
}
"""Package, file, and where the subject is in it (left, top, right, bottom)."""

ODD_EXIF = (
    b"Exif\0\0MM\0*\0\0\0\x08"
    + struct.pack(">HHHL4s", 2, 0x0100, 2, 4, b"odd\0")
    + struct.pack(">HHLHHL", 0x0112, 3, 1, 6, 0, 0)
)
"""Notes of a camera that lay on its side, the width in letters: Pillow reads them, and cannot write them."""


def subject(name: str) -> Image.Image:
    """Cut the subject out of its photograph, in RGB."""
    package, file, box = _SUBJECTS[name]
    found = find_spec(package)
    assert found is not None and found.origin is not None
    with Image.open(Path(found.origin).parent / file) as photograph:
        return photograph.convert("RGB").crop(box)


def crops(name: str, count: int, size: tuple[int, int] = (96, 96)) -> Iterator[Image.Image]:
    """Cut `count` different windows of one subject, (width, height) in pixels."""
    whole = subject(name)
    width, height = size
    scale = max(width / whole.width, height / whole.height)
    for number in range(count):
        part = 0.75 + 0.05 * (number % 5)
        box_width, box_height = part * width / scale, part * height / scale
        left = (whole.width - box_width) * ((number * 3) % 7) / 6
        top = (whole.height - box_height) * ((number * 5) % 7) / 6
        yield whole.resize(size, Image.Resampling.LANCZOS, box=(left, top, left + box_width, top + box_height))


def save_crops(
    directory: Path, name: str, count: int, size: tuple[int, int] = (96, 96), *, start: int = 0
) -> list[Path]:
    """Write crops as `<subject>-<number>.png`; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, image in enumerate(crops(name, count, size), start):
        paths.append(directory / f"{name}-{number:02}.png")
        image.save(paths[-1])
    return paths
