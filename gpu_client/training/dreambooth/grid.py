"""Pictures of several steps in one: a row for each step with its number above, a column for each seed."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont

MAX_TILE_PIXELS = 512
MAX_SIDE_PIXELS = 16_384
"""What programs that show pictures can take; many stop at twice that."""
MAX_PIXELS = 40_000_000
_LEAST_WIDTH_PIXELS = 256
"""So that a title can be read above small pictures."""
_GAP_PIXELS = 4
_FONT_PIXELS = (12, 24)
_MAX_TITLE_LINES = 4

log = logging.getLogger("baton.training")


def picture_grid(rows: Mapping[int, Sequence[bytes]], title: str, resolution: int) -> Image.Image:
    """All pictures (encoded, square, `resolution` pixels a side) by step, with a title. Made smaller where they are
    many."""
    columns = max(len(row) for row in rows.values())
    tile = _tile(len(rows), columns, resolution)
    width = max(columns * (tile + _GAP_PIXELS) - _GAP_PIXELS, _LEAST_WIDTH_PIXELS)
    font = ImageFont.load_default(_font_pixels(tile))
    line = _line_pixels(tile)
    lines = _wrapped(title, font, width - line)
    height = line + tile
    grid = Image.new("RGB", (width, len(lines) * line + len(rows) * height), "white")
    draw = ImageDraw.Draw(grid)
    for number, text in enumerate(lines):
        draw.text((line // 4, number * line), text, fill="black", font=font)
    for number, step in enumerate(sorted(rows)):
        top = len(lines) * line + number * height
        draw.text((line // 4, top), f"step {step}", fill="black", font=font)
        for column, encoded in enumerate(rows[step]):
            place = column * (tile + _GAP_PIXELS), top + line
            try:
                with Image.open(io.BytesIO(encoded)) as picture:
                    grid.paste(picture.convert("RGB").resize((tile, tile)), place)
            except (OSError, SyntaxError, ValueError) as error:
                # The training is done: one picture less is no reason to lose it.
                log.warning("picture %d of step %d cannot be read: %s", column, step, error)
                draw.text(place, "unreadable", fill="red", font=font)
    return grid


def _tile(rows: int, columns: int, resolution: int) -> int:
    """The side of each picture in pixels."""
    fits = int((MAX_PIXELS / (rows * columns)) ** 0.5)
    tile = max(min(resolution, MAX_TILE_PIXELS, fits, MAX_SIDE_PIXELS // max(rows, columns)), 1)
    # A smaller one has smaller letters: they fit all the more.
    line = _line_pixels(tile)
    high = (MAX_SIDE_PIXELS - _MAX_TITLE_LINES * line) // rows - line
    return max(min(tile, MAX_SIDE_PIXELS // columns - _GAP_PIXELS, high), 1)


def _font_pixels(tile: int) -> int:
    least, most = _FONT_PIXELS
    return min(max(tile // 16, least), most)


def _line_pixels(tile: int) -> int:
    return _font_pixels(tile) * 4 // 3


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """The text in lines that fit; what is too long ends with three dots."""
    lines: list[str] = []
    # The font that comes with Pillow has European letters.
    for word in text.encode("latin-1", "replace").decode("latin-1").split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(word)
    lines = [_cut(line, font, width) for line in lines]
    if len(lines) > _MAX_TITLE_LINES:
        lines = [*lines[: _MAX_TITLE_LINES - 1], _cut(f"{lines[_MAX_TITLE_LINES - 1]} ...", font, width)]
    return lines


def _cut(line: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(f"{line}...") > width:
        line = line[:-1]
    return f"{line}..."
