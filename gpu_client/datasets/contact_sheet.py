"""Draw the contact sheet: all images of a folder as thumbnails, with findings as colored frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from PIL import Image, ImageDraw, ImageFont

from gpu_client.datasets.folder_check import DatasetReport, Severity
from gpu_client.datasets.images import THUMBNAIL, InspectedImage

T = TypeVar("T")
MAX_SHOWN = 400
COLUMNS = 8
_GAP = 12
_TEXT = 28
_HEAD = 44
_COLOURS: Mapping[Severity | None, str] = {"fault": "#d03030", "warning": "#e09020", None: "#c8c8c8"}


def select_shown(images: Sequence[T]) -> Sequence[T]:
    """Select the images that fit onto a sheet, evenly over their paths."""
    return images[:: max(1, -(-len(images) // MAX_SHOWN))]


def draw_sheet(report: DatasetReport, target: Path) -> int:
    """Write the sheet as PNG. Returns the number of images on the sheet, at most about MAX_SHOWN. Raises OSError.

    The report must contain the thumbnails of `select_shown`.
    """
    everything = _cells(report)
    shown = select_shown(everything)
    columns = max(1, min(COLUMNS, len(shown)))
    rows = -(-len(shown) // columns)
    cell = (THUMBNAIL + _GAP, THUMBNAIL + _TEXT + _GAP)
    sheet = Image.new("RGB", (max(560, columns * cell[0] + _GAP), _HEAD + rows * cell[1] + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    large, small = ImageFont.load_default(16), ImageFont.load_default(11)
    warnings = len(report.findings) - report.faults
    draw.text((_GAP, 12), _head(report, len(shown), len(everything), warnings), "black", font=large)
    worst = _worst(report)
    for number, (path, image) in enumerate(shown):
        left = _GAP + number % columns * cell[0]
        top = _HEAD + number // columns * cell[1]
        colour = _COLOURS[worst.get(path)]
        if image is None:
            draw.rectangle((left, top, left + THUMBNAIL, top + THUMBNAIL), outline=colour, width=2)
            draw.text((left + 8, top + THUMBNAIL // 2 - 8), "does not decode", colour, font=small)
        else:
            _draw_one(sheet, draw, image, (left, top), colour)
            draw.text((left, top + THUMBNAIL + 15), f"{image.width} x {image.height}", "#707070", font=small)
        draw.text((left, top + THUMBNAIL + 3), _cut(draw, path, small), "black", font=small)
    sheet.save(target, format="PNG")
    return len(shown)


def _draw_one(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, image: InspectedImage, place: tuple[int, int], colour: str
) -> None:
    left, top = place
    assert image.thumbnail is not None
    width, height = image.thumbnail.size
    left, top = left + (THUMBNAIL - width) // 2, top + (THUMBNAIL - height) // 2
    sheet.paste(image.thumbnail, (left, top))
    draw.rectangle((left - 2, top - 2, left + width + 1, top + height + 1), outline=colour, width=2)


def _cells(report: DatasetReport) -> list[tuple[str, InspectedImage | None]]:
    """List all images by path; None for an image that does not decode."""
    cells: dict[str, InspectedImage | None] = {one.path: None for one in report.findings if one.code == "undecodable"}
    cells |= {image.path: image for image in report.images}
    return sorted(cells.items())


def _head(report: DatasetReport, shown: int, of: int, warnings: int) -> str:
    images = _count(of, "image") if shown == of else f"{shown} of {_count(of, 'image')}"
    faults = f"{_count(report.faults, 'fault')} (red), {_count(warnings, 'warning')} (orange)"
    return f"{images}, {_count(len(report.captions), 'caption')}: {faults}"


def _count(number_of: int, one: str) -> str:
    return f"{number_of} {one}{'' if number_of == 1 else 's'}"


def _worst(report: DatasetReport) -> dict[str, Severity]:
    worst: dict[str, Severity] = {}
    for finding in report.findings:
        if worst.get(finding.path) != "fault":
            worst[finding.path] = finding.severity
    return worst


def _cut(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Cut the beginning of a path, because its end distinguishes images."""
    if draw.textlength(text, font=font) <= THUMBNAIL:
        return text
    while text and draw.textlength("..." + text, font=font) > THUMBNAIL:
        text = text[1:]
    return "..." + text
