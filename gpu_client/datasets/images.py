"""One image file: does it decode, how large is it, what does it look like."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from PIL import Image, ImageOps, UnidentifiedImageError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
"""Files that are meant to be images."""

MASK_SUFFIX = ".mask.png"
"""Of the file that says which parts of the image beside it count."""

MAX_PIXELS = 100_000_000
"""More is no photograph but a mistake, or meant to fill a machine's memory."""

THUMBNAIL = 128
_HASH = 8
HASH_BITS = _HASH * _HASH
_FLAT = 4
"""Of grey levels: what differs by less has no gradients to compare."""


class BadImageError(Exception):
    """The file is no image that training could use; the message says why."""


@dataclass(frozen=True, kw_only=True)
class InspectedImage:
    """What was found. `width` and `height` are as it is shown, after its EXIF orientation."""

    path: str
    size_bytes: int
    width: int
    height: int
    blake3: str
    looks: int | None
    """64 bits that hardly differ between images that look alike; None for one of a single colour."""
    thumbnail: Image.Image | None
    """Where one is wanted: 50 kB of memory."""
    black: bool
    """Everywhere."""

    @property
    def short_side(self) -> int:
        """Pixels."""
        return min(self.width, self.height)


def is_image(path: Path) -> bool:
    """Whether its name says so, and that it is no mask of another."""
    return path.suffix.lower() in SUFFIXES and not path.name.endswith(MASK_SUFFIX)


def inspect_image(file: Path, path: str, *, thumbnail: bool = False) -> InspectedImage:
    """Decode all of `file`; `path` is its name in the report. Raises BadImageError."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BadImageError(f"cannot be read: {error.strerror}") from error
    if not data:
        raise BadImageError("is empty")
    try:
        with warnings.catch_warnings():
            # Of sizes Pillow warns by itself; what else it has to say is about metadata that nobody reads.
            warnings.simplefilter("ignore")
            with Image.open(file) as opened:
                if opened.width * opened.height > MAX_PIXELS:
                    raise BadImageError(f"has {opened.width} x {opened.height} pixels, more than {MAX_PIXELS:,}")
                if opened.mode.startswith(("I", "F")):
                    # Pillow would make everything white that is above 255.
                    raise BadImageError("has more than 8 bits a pixel and channel: save it with 8")
                opened.load()
                opened.getexif()
                # Turning it writes these anew, which fails for what some cameras note; what was read is enough.
                for name in ("exif", "Raw profile type exif"):
                    opened.info.pop(name, None)
                image = ImageOps.exif_transpose(opened)
                grey = image.convert("L").resize((_HASH + 1, _HASH), Image.Resampling.BOX)
                coloured = image.convert("RGB")
                small = _thumbnail(coloured) if thumbnail else None
    except UnidentifiedImageError as error:
        raise BadImageError("is no image, whatever its name says") from error
    except Image.DecompressionBombError as error:
        raise BadImageError(f"has more than {MAX_PIXELS:,} pixels") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        # These are what Pillow's decoders raise for files that are cut short or damaged.
        raise BadImageError(f"does not decode: {error}") from error
    return InspectedImage(
        path=path,
        size_bytes=len(data),
        width=image.width,
        height=image.height,
        blake3=blake3(data).hexdigest(),
        looks=_looks(grey),
        thumbnail=small,
        black=is_black(coloured),
    )


def is_black(image: Image.Image) -> bool:
    """Whether no pixel of an image in RGB, read as a mask, counts."""
    return image.convert("L").getextrema()[1] == 0


def mask_fault(size: tuple[int, int], of: tuple[int, int], *, black: bool) -> str | None:
    """What is wrong with a mask of this width and height for an image of that; None for one to train with."""
    if size != of:
        return f"has {size[0]} x {size[1]} pixels, its image {of[0]} x {of[1]}"
    return "is black everywhere: nothing of its image would count" if black else None


def _thumbnail(coloured: Image.Image) -> Image.Image:
    small = coloured.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    return small


def _looks(grey: Image.Image) -> int | None:
    """The difference hash: for each pixel of 8 x 8, whether the one to its right is brighter.

    Source: Neal Krawetz, "Kind of Like That", hackerfactor.com, 2013.
    """
    levels = np.asarray(grey, dtype=np.int16)
    if int(levels.max()) - int(levels.min()) < _FLAT:
        return None
    bits = (levels[:, 1:] > levels[:, :-1]).reshape(-1)
    return int.from_bytes(np.packbits(bits).tobytes(), "big")
