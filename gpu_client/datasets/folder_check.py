"""Check a folder of images before a training: find faults and warnings, count images."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from gpu_client.datasets.captions import read_captions
from gpu_client.datasets.images import (
    HASH_BITS,
    MASK_SUFFIX,
    BadImageError,
    InspectedImage,
    describe_mask_fault,
    inspect_image,
    is_image,
)

Severity = Literal["fault", "warning"]
CaptionsWanted = Literal["required", "optional"]

USUAL_SIDE = 512
"""Smallest resolution of the recipes in pixels; trainings would enlarge smaller images."""
ALIKE_BITS = 4
"""Maximum number of different bits, of 64, in the hashes of images that look equal to a person."""
WORKERS = 8
_ROWS = 256
"""Number of hashes compared with all hashes at a time; takes 100 MB for 100,000 images."""

_RATIOS = {
    "1:2": 1 / 2, "9:16": 9 / 16, "2:3": 2 / 3, "3:4": 3 / 4, "4:5": 4 / 5, "1:1": 1.0,
    "5:4": 5 / 4, "4:3": 4 / 3, "3:2": 3 / 2, "16:9": 16 / 9, "2:1": 2.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DatasetFinding:
    """Fault or warning. `code` is stable."""

    severity: Severity
    code: str
    path: str
    line: int | None = None
    message: str
    remedy: str


@dataclass(frozen=True)
class DatasetReport:
    """Images, captions and findings of a folder."""

    images: Sequence[InspectedImage]
    captions: Mapping[str, str]
    findings: Sequence[DatasetFinding] = field(default=())

    @property
    def faults(self) -> int:
        """Return the number of faults; a fault should prevent the training."""
        return sum(finding.severity == "fault" for finding in self.findings)

    @property
    def resolutions(self) -> dict[str, int]:
        """Return the number of images by resolution, the most frequent first."""
        counted = Counter(f"{image.width}x{image.height}" for image in self.images)
        return dict(sorted(counted.items(), key=lambda item: (-item[1], item[0])))

    @property
    def aspect_ratios(self) -> dict[str, int]:
        """Return the number of images by aspect ratio, from tall to wide."""
        counted = Counter(name_aspect_ratio(image.width, image.height) for image in self.images)
        return {name: counted[name] for name in _RATIOS if counted[name]}


def name_aspect_ratio(width: int, height: int) -> str:
    """Return the nearest usual aspect ratio, such as `3:2`."""
    found = np.log(width / height)
    return min(_RATIOS, key=lambda name: abs(float(np.log(_RATIOS[name]) - found)))


def check_folder(
    directory: Path,
    *,
    captions: CaptionsWanted = "optional",
    min_side: int | None = None,
    only: Collection[str] | None = None,
    thumbnails: Callable[[Sequence[str]], Iterable[str]] = lambda _: (),
    progress: Callable[[int], None] = lambda _: None,
) -> DatasetReport:
    """Check every image below `directory`. `min_side`: shorter sides are faults; None warns below USUAL_SIDE.

    `only`: paths below the folder of the images and masks to check, each with its mask or image; all captions are read.
    `thumbnails`: selects the paths whose thumbnails the report keeps. `progress` receives the number of newly finished
    images. Raises OSError if the folder cannot be listed.
    """
    files = sorted(list_files(directory))
    everything = sorted(place.relative_to(directory).as_posix() for place in files if is_image(place))
    masks = [place.relative_to(directory).as_posix() for place in files if place.name.endswith(MASK_SUFFIX)]
    paths = everything
    if only is not None:
        paths = [path for path in everything if path in only or _stem(path) + MASK_SUFFIX in only]
        beside = {_stem(path) + MASK_SUFFIX for path in paths}
        masks = [path for path in masks if path in only or path in beside]
    shown = frozenset(thumbnails(paths))
    images: list[InspectedImage] = []
    findings: list[DatasetFinding] = []
    with ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1), thread_name_prefix="inspect") as pool:
        for path, found in zip(
            paths, pool.map(lambda path: _inspect(directory, path, path in shown), paths), strict=True
        ):
            progress(1)
            if isinstance(found, InspectedImage):
                images.append(found)
            else:
                findings.append(
                    DatasetFinding(
                        severity="fault", code="undecodable", path=path, message=found, remedy="Replace or remove it."
                    )
                )
    if not images and len(paths) == len(everything):
        findings.append(
            DatasetFinding(
                severity="fault",
                code="no_images",
                path=".",
                message="there is no image that decodes",
                remedy="Put images (JPEG, PNG, WebP, ...) into the folder.",
            )
        )
    captioned = read_captions(directory, frozenset(everything))
    findings += [
        DatasetFinding(
            severity="fault", code="bad_caption", path=one.path, line=one.line, message=one.message, remedy=one.remedy
        )
        for one in captioned.faults
    ]
    findings += _small(images, min_side)
    findings += _same(images)
    findings += _uncaptioned(images, captioned.texts, captions)
    findings += _masks(directory, masks, images)
    order = {"fault": 0, "warning": 1}
    findings.sort(key=lambda finding: (order[finding.severity], finding.code, finding.path, finding.line or 0))
    return DatasetReport(images, captioned.texts, findings)


def list_files(directory: Path) -> Iterable[Path]:
    """List all regular files below the folder, without hidden files."""
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            place = Path(folder, name)
            if not name.startswith(".") and place.is_file():
                yield place


def _inspect(directory: Path, path: str, thumbnail: bool) -> InspectedImage | str:
    try:
        return inspect_image(directory / path, path, thumbnail=thumbnail)
    except BadImageError as error:
        return str(error)


def _small(images: Sequence[InspectedImage], min_side: int | None) -> list[DatasetFinding]:
    least = USUAL_SIDE if min_side is None else min_side
    return [
        DatasetFinding(
            severity="warning" if min_side is None else "fault",
            code="small",
            path=image.path,
            message=f"has {image.width} x {image.height} pixels; its shorter side is below {least}",
            remedy="Use a larger original: enlarging adds no detail.",
        )
        for image in images
        if image.short_side < least
    ]


def _same(images: Sequence[InspectedImage]) -> list[DatasetFinding]:
    """Find copies and similar images; a finding names the first such image."""
    findings: list[DatasetFinding] = []
    first: dict[str, InspectedImage] = {}
    for image in images:
        known = first.setdefault(image.blake3, image)
        if known is not image:
            findings.append(_like(image, "duplicate", f"has the same bytes as {known.path}"))
    unique = [(image, image.perceptual_hash) for image in first.values() if image.perceptual_hash is not None]
    having: dict[int, InspectedImage] = {}
    for image, image_hash in unique:
        having.setdefault(image_hash, image)
    alike = dict(zip(having, _first_alike(list(having)), strict=True))
    for image, image_hash in unique:
        known = having[alike[image_hash]]
        if known is not image:
            findings.append(_like(image, "near_duplicate", f"looks like {known.path}"))
    return findings


def _first_alike(hashes: Sequence[int]) -> list[int]:
    """Return, for each of the distinct hashes, the first similar hash, which may be the hash itself."""
    bits = np.unpackbits(np.array(hashes, dtype=">u8").view(np.uint8).reshape(-1, HASH_BITS // 8), axis=1)
    # The product of vectors of 1 and -1 gives the exact number of different bits, fast for many hashes.
    signs = bits.astype(np.float32) * 2 - 1
    found: list[int] = []
    for start in range(0, len(hashes), _ROWS):
        rows = signs[start : start + _ROWS]
        alike = rows @ signs[: start + len(rows)].T >= HASH_BITS - 2 * ALIKE_BITS
        found += [hashes[index] for index in alike.argmax(axis=1).tolist()]
    return found


def _like(image: InspectedImage, code: str, message: str) -> DatasetFinding:
    remedy = "Remove one of them: a repeated image is learned twice as strongly."
    return DatasetFinding(severity="warning", code=code, path=image.path, message=message, remedy=remedy)


def _stem(path: str) -> str:
    return str(PurePosixPath(path).with_suffix(""))


def _masks(directory: Path, paths: Iterable[str], images: Sequence[InspectedImage]) -> Iterable[DatasetFinding]:
    """Find the faults of masks that lie beside their images."""
    masked = {_stem(image.path): image for image in images}
    for path in paths:
        image = masked.get(path.removesuffix(MASK_SUFFIX))
        try:
            mask = inspect_image(directory / path, path)
        except BadImageError as error:
            why: str | None = str(error)
        else:
            size = mask.width, mask.height
            # A mask may precede its image, therefore a missing image is no fault.
            why = describe_mask_fault(size, size if image is None else (image.width, image.height), black=mask.black)
        if why is not None:
            remedy = "Make a new mask, or remove the file."
            yield DatasetFinding(severity="fault", code="bad_mask", path=path, message=why, remedy=remedy)


def _uncaptioned(
    images: Sequence[InspectedImage], captions: Mapping[str, str], wanted: CaptionsWanted
) -> list[DatasetFinding]:
    """Find images without caption, if captions are required or other images have captions."""
    lacking = [image for image in images if image.path not in captions]
    if not lacking or (wanted == "optional" and not captions):
        return []
    return [
        DatasetFinding(
            severity="fault" if wanted == "required" else "warning",
            code="no_caption",
            path=image.path,
            message="has no caption",
            remedy="Write it into a .txt file of the same name, or into captions.jsonl.",
        )
        for image in lacking
    ]
