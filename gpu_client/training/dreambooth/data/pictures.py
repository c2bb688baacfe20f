"""Find, check, caption, crop and resize the pictures of a job."""

from __future__ import annotations

import hashlib
import io
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from gpu_client.datasets.images import MASK_SUFFIX, SUFFIXES, describe_mask_fault, is_black, is_image, turn_upright
from gpu_client.training.dreambooth.config import PIXELS_PER_LATENT, DreamboothConfig
from gpu_client.training.dreambooth.errors import DataError

CAPTION_FILES = ("metadata.jsonl", "captions.jsonl")
_NAMED_FAULTS = 5

Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True)
class Picture:
    """Decodable image with its prompt and mask."""

    name: str
    source: Path | bytes
    prompt: str
    size: Size
    digest: str
    """Digest of the bytes of image and mask; equal digests mean equal latents."""
    mask: Path | None = None

    def open(self) -> Image.Image:
        """Decode the image upright in RGB."""
        return _decode(self.source)


@dataclass(frozen=True)
class Placement:
    """Transformation of a picture into a training image: resize, crop, optionally mirror."""

    resized: Size
    top: int
    left: int
    shape: Size
    flip: bool

    @classmethod
    def of(cls, original: Size, shape: Size, *, down: float, right: float, flip: bool) -> Placement:
        """Make the placement that covers `shape` with the least loss. `down`, `right`: place of the crop, 0 to 1."""
        scale = max(shape[0] / original[0], shape[1] / original[1])
        height = max(shape[0], round(original[0] * scale))
        width = max(shape[1], round(original[1] * scale))
        top, left = round((height - shape[0]) * down), round((width - shape[1]) * right)
        return cls((height, width), top, left, shape, flip)

    def pixels(self, picture: Picture) -> torch.Tensor:
        """Return the training image (3, height, width) from -1 to 1."""
        image = self._cut(_resized_images.get(picture, self.resized))
        return torch.from_numpy(np.asarray(image, dtype=np.float32) / 127.5 - 1).permute(2, 0, 1).contiguous()

    def weights(self, picture: Picture, outside: float) -> torch.Tensor:
        """Return the weights of latent pixels (1, height, width): 1 for a white mask, `outside` for a black mask."""
        size = self.shape[0] // PIXELS_PER_LATENT, self.shape[1] // PIXELS_PER_LATENT
        if picture.mask is None:
            return torch.ones(1, *size)
        size_of_image = self.resized[1], self.resized[0]
        mask = self._cut(_decode(picture.mask).convert("L").resize(size_of_image, Image.Resampling.BILINEAR))
        small = mask.resize((size[1], size[0]), Image.Resampling.BOX)
        white = torch.from_numpy(np.asarray(small, dtype=np.float32) / 255)[None]
        return outside + (1 - outside) * white

    def _cut(self, image: Image.Image) -> Image.Image:
        if self.flip:
            image = ImageOps.mirror(image)
        return image.crop((self.left, self.top, self.left + self.shape[1], self.top + self.shape[0]))


class _ResizedImages:
    """Cache of decoded and resized images, because decoding a large photograph takes longer than a step."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._images: OrderedDict[tuple[str, Size], Image.Image] = OrderedDict()

    def get(self, picture: Picture, size: Size) -> Image.Image:
        """Return the picture in `size`. The caller must not modify the image."""
        key = (picture.digest, size)
        if key in self._images:
            self._images.move_to_end(key)
            return self._images[key]
        image = picture.open().resize((size[1], size[0]), Image.Resampling.LANCZOS)
        self._images[key] = image
        self._size_bytes += _bytes_of(image)
        while self._size_bytes > self._limit_bytes and len(self._images) > 1:
            self._size_bytes -= _bytes_of(self._images.popitem(last=False)[1])
        return image


def _bytes_of(image: Image.Image) -> int:
    return image.width * image.height * len(image.getbands())


_resized_images = _ResizedImages(limit_bytes=2**30)


def read_instance_pictures(config: DreamboothConfig, data_dir: Path) -> list[Picture]:
    """Read the subject's pictures in the order of their names. Raises DataError."""
    folder = data_dir / config.instance_data_dir
    others: Path | None = None
    if not folder.is_dir():
        folder, others = data_dir, data_dir / config.class_data_dir
    paths = [path for path in _image_files(folder) if others is None or not path.is_relative_to(others)]
    if not paths:
        raise DataError(
            f"{folder} holds no image ({', '.join(sorted(SUFFIXES))})", "Check the prefix of the job's images"
        )
    captions = _captions(folder, paths) if config.use_captions else {}
    masks = _masks(folder, paths) if config.use_masks else {}
    return _pictures(folder, paths, config.instance_prompt, captions, masks)


def read_class_pictures(config: DreamboothConfig, data_dir: Path) -> list[Picture]:
    """Read the provided class pictures, up to the configured number. Raises DataError."""
    folder = data_dir / config.class_data_dir
    if not config.with_prior_preservation or config.class_prompt is None or not folder.is_dir():
        return []
    paths = _image_files(folder)[: config.num_class_images]
    return _pictures(folder, paths, config.class_prompt, {}, {})


def make_picture(name: str, encoded: bytes, prompt: str) -> Picture:
    """Make a picture from an image file's bytes."""
    image = _decode(encoded)
    return Picture(name, encoded, prompt, (image.height, image.width), _digest(encoded, None))


def _image_files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if is_image(path) and path.is_file() and _is_visible(path, folder))
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _is_visible(path: Path, folder: Path) -> bool:
    return not any(part.startswith(".") for part in path.relative_to(folder).parts)


def _pictures(
    folder: Path, paths: Sequence[Path], prompt: str, captions: Mapping[Path, str], masks: Mapping[Path, Path]
) -> list[Picture]:
    pictures, faults = [], []
    for path in paths:
        try:
            image = _decode(path)
            mask = masks.get(path)
            if mask is not None:
                _check_mask(mask, image)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, UnidentifiedImageError) as error:
            faults.append(f"{path.relative_to(folder)} ({error})")
            continue
        name = path.relative_to(folder).as_posix()
        digest = _digest(path.read_bytes(), mask.read_bytes() if mask else None)
        size = image.height, image.width
        pictures.append(Picture(name, path, captions.get(path, prompt), size, digest, mask))
    if paths and not pictures:
        raise DataError(f"none of the {len(paths)} images in {folder} can be decoded: {_some(faults)}", _REPLACE)
    if faults:
        raise DataError(f"{len(faults)} of {len(paths)} images in {folder} cannot be used: {_some(faults)}", _REPLACE)
    return pictures


_REPLACE = "Replace or remove them; `baton data validate` finds such files before they are uploaded"


def _decode(source: Path | bytes) -> Image.Image:
    with Image.open(source if isinstance(source, Path) else io.BytesIO(source)) as image:
        if image.mode.startswith(("I", "F")):
            # Pillow would turn all values above 255 white.
            raise ValueError("has more than 8 bits a pixel and channel: save it with 8")
        return turn_upright(image).convert("RGB")


def _digest(content: bytes, mask: bytes | None) -> str:
    hasher = hashlib.blake2b(content, digest_size=16)
    if mask is not None:
        hasher.update(b"\0mask\0" + mask)
    return hasher.hexdigest()


# --- captions and masks ------------------------------------------------------------------------------------------


def _captions(folder: Path, paths: Sequence[Path]) -> dict[Path, str]:
    """Read the caption of every image. Raises DataError with the images without captions."""
    listed = dict(_listed_captions(folder))
    captions = {}
    for path in paths:
        beside = path.with_suffix(".txt")
        text = _text_of(beside) if beside.is_file() else listed.get(path, "")
        if text.strip():
            captions[path] = " ".join(text.split())
    missing = [path.relative_to(folder).as_posix() for path in paths if path not in captions]
    if missing:
        raise DataError(
            f"use_captions: {len(missing)} of {len(paths)} images have no caption: {_some(missing)}",
            f"Put <name>.txt beside each, or list them in {' or '.join(CAPTION_FILES)}",
        )
    return captions


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # Some editors write a byte order mark.
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error})", "Write captions as text in UTF-8") from error


def _listed_captions(folder: Path) -> Iterator[tuple[Path, str]]:
    for file in (path for name in CAPTION_FILES for path in sorted(folder.rglob(name)) if _is_visible(path, folder)):
        # JSON texts may contain Unicode line ends, at which `splitlines` would split.
        for number, line in enumerate(_text_of(file).split("\n"), 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                name, entry_text = entry["file_name"], entry.get("text")
                text = entry_text if entry_text is not None else entry.get("caption")  # Null is absent.
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(f"{file}, line {number}: {error!r}", _CAPTION_LINE) from error
            if not isinstance(name, str) or not isinstance(text, str):
                raise DataError(f"{file}, line {number}: no file_name and text", _CAPTION_LINE)
            yield file.parent / name, text


_CAPTION_LINE = 'Each line is an object: {"file_name": "1.jpg", "text": "a photo of ..."}'


def _masks(folder: Path, paths: Sequence[Path]) -> dict[Path, Path]:
    """Find the mask of every image. Raises DataError with the images without masks."""
    masks = {path: path.with_name(path.stem + MASK_SUFFIX) for path in paths}
    missing = [path.relative_to(folder).as_posix() for path, mask in masks.items() if not mask.is_file()]
    if missing:
        raise DataError(
            f"use_masks: {len(missing)} of {len(paths)} images have no mask: {_some(missing)}",
            f"Put <name>{MASK_SUFFIX} beside each",
        )
    return masks


def _check_mask(mask: Path, image: Image.Image) -> None:
    found = _decode(mask)
    fault = describe_mask_fault(found.size, image.size, black=is_black(found))
    if fault is not None:
        raise ValueError(f"its mask {fault}")


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_FAULTS
    return ", ".join(names[:_NAMED_FAULTS]) + (f" and {more} more" if more > 0 else "")
