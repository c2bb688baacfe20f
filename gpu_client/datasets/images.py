"""Inspect one image file: decode the image, measure its size, compute its perceptual hash."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from PIL import Image, ImageOps, UnidentifiedImageError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
"""Suffixes of image files."""

MASK_SUFFIX = ".mask.png"
"""Suffix of a mask file, which weighs the parts of the image beside the mask."""

MAX_PIXELS = 100_000_000
"""Limit of an image's pixels; a larger image is a mistake, or an attack on a machine's memory."""

THUMBNAIL = 128
_HASH = 8
HASH_BITS = _HASH * _HASH
_FLAT = 4
"""Minimum range of gray levels; an image with a smaller range has no gradients to compare."""


class BadImageError(Exception):
    """Error of a file that no training can use as an image; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class InspectedImage:
    """Facts about an image. `width` and `height` are the sizes of the upright image (EXIF)."""

    path: str
    size_bytes: int
    width: int
    height: int
    blake3: str
    perceptual_hash: int | None
    """64 bits that hardly differ between similar images; None for an image of a single color."""
    thumbnail: Image.Image | None
    """Thumbnail (50 kB of memory), if requested."""
    black: bool
    """True if every pixel is black."""

    @property
    def short_side(self) -> int:
        """Return the shorter side in pixels."""
        return min(self.width, self.height)


def is_image(path: Path) -> bool:
    """Return True if the file name is an image's name and no mask's name."""
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
            # The code below checks sizes; Pillow's other warnings concern unused metadata.
            warnings.simplefilter("ignore")
            with Image.open(file) as opened:
                if opened.width * opened.height > MAX_PIXELS:
                    raise BadImageError(f"has {opened.width} x {opened.height} pixels, more than {MAX_PIXELS:,}")
                if opened.mode.startswith(("I", "F")):
                    # Pillow would turn all values above 255 white.
                    raise BadImageError("has more than 8 bits a pixel and channel: save it with 8")
                opened.load()
                image = turn_upright(opened)
                grey = image.convert("L").resize((_HASH + 1, _HASH), Image.Resampling.BOX)
                coloured = image.convert("RGB")
                small = _thumbnail(coloured) if thumbnail else None
    except UnidentifiedImageError as error:
        raise BadImageError("is no image, despite its name") from error
    except Image.DecompressionBombError as error:
        raise BadImageError(f"has more than {MAX_PIXELS:,} pixels") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        # Pillow's decoders raise these errors for truncated or damaged files.
        raise BadImageError(f"does not decode: {error}") from error
    return InspectedImage(
        path=path,
        size_bytes=len(data),
        width=image.width,
        height=image.height,
        blake3=blake3(data).hexdigest(),
        perceptual_hash=_difference_hash(grey),
        thumbnail=small,
        black=is_black(coloured),
    )


def turn_upright(opened: Image.Image) -> Image.Image:
    """Turn an image upright by its EXIF orientation."""
    opened.getexif()
    # The transposition would write the EXIF entries again and fail for some cameras' notes, therefore the entries go.
    for name in ("exif", "Raw profile type exif"):
        opened.info.pop(name, None)
    return ImageOps.exif_transpose(opened)


def is_black(image: Image.Image) -> bool:
    """Return True if no pixel of an RGB image counts as a mask."""
    return image.convert("L").getextrema()[1] == 0


def describe_mask_fault(size: tuple[int, int], of: tuple[int, int], *, black: bool) -> str | None:
    """Return the fault of a mask of `size` for an image of size `of`; None for a usable mask."""
    if size != of:
        return f"has {size[0]} x {size[1]} pixels, its image {of[0]} x {of[1]}"
    return "is black everywhere: nothing of its image would count" if black else None


def _thumbnail(coloured: Image.Image) -> Image.Image:
    small = coloured.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    return small


def _difference_hash(grey: Image.Image) -> int | None:
    """Compute the difference hash: for each of 8 x 8 pixels, a bit that is 1 if the right neighbor is brighter.

    Source: Neal Krawetz, "Kind of Like That", hackerfactor.com, 2013.
    """
    levels = np.asarray(grey, dtype=np.int16)
    if int(levels.max()) - int(levels.min()) < _FLAT:
        return None
    bits = (levels[:, 1:] > levels[:, :-1]).reshape(-1)
    return int.from_bytes(np.packbits(bits).tobytes(), "big")
