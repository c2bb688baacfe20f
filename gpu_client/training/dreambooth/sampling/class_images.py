"""Provide class images for prior preservation: from the job, from other attempts and jobs, or generated.

Each image is generated once. Later attempts find the images, on any machine, in the checkpoint that the job commits
before its first step (the store keeps a tenant's equal bytes once). Before this checkpoint, attempts receive the parts
of interrupted attempts. Later jobs receive the archive of a complete job (`shared_images.py` has both). Jobs on one
machine also share a directory, whose name is a digest of all values that determine the images.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.data.batches import PictureBatch, PictureBatches
from gpu_client.training.dreambooth.data.pictures import Picture, make_picture
from gpu_client.training.dreambooth.model.base_model import Models
from gpu_client.training.dreambooth.model.encoding import Encoder
from gpu_client.training.dreambooth.sampling.sampler import sample
from gpu_client.training.dreambooth.sampling.shared_images import (
    EarlierImages,
    ImageParts,
    open_shared_images,
    write_shared,
)
from gpu_client.training.errors import CheckpointMismatchError
from gpu_client.training.resumable_loader import derive_seed
from gpu_client.training.session.session import Session

OUTPUT_DIR = "class_images"
MAX_SETS = 32
"""Maximum number of image sets on a machine."""
_JPEG: dict[str, Any] = {"format": "JPEG", "quality": 95, "subsampling": 0}

log = logging.getLogger("baton.training")


class ClassImages:
    """Class images of a job and the order of their use. A state of the session."""

    def __init__(self, config: DreamboothConfig, provided: Sequence[Picture]) -> None:
        self._config = config
        self._provided = list(provided)[: config.num_class_images]
        self._encoded: list[bytes] = []
        self._key: str | None = None
        """Key of the generated images."""
        self._batches: PictureBatches | None = None
        self._shared = 0
        """Number of images from another job."""
        self._taken_over = 0
        """Number of images from interrupted attempts."""
        self.generated = 0
        """Number of images that this attempt has generated."""
        self._prepare()

    @property
    def missing(self) -> int:
        """Return the number of missing images."""
        return self._config.num_class_images - len(self._provided) - len(self._encoded)

    @property
    def batches(self) -> PictureBatches:
        """Return the batches of all images. Requires a complete set."""
        assert self._batches is not None
        return self._batches

    def __next__(self) -> PictureBatch:
        return next(self.batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the generated images as files, and the position in the order. Requires a complete set."""
        images = [torch.frombuffer(bytearray(encoded), dtype=torch.uint8) for encoded in self._encoded]
        return {"images": images, "shared": self._shared, "key": self._key, "batches": self.batches.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the images of an earlier attempt."""
        self._encoded = [image.numpy().tobytes() for image in state["images"]]
        self._shared, self._key = state["shared"], state["key"]
        if self.missing > 0:
            raise CheckpointMismatchError(
                f"the checkpoint was written with {self.missing} fewer class images",
                "Resume with the num_class_images and the class images that wrote it, or start a new job",
            )
        self._prepare()
        self.batches.load_state_dict(state["batches"])

    def complete(self, models: Models, encoder: Encoder, session: Session) -> bool:
        """Make the missing images. Returns False if the job stops earlier.

        At this time the LoRA is untrained and has no effect.
        """
        key = self._key = compute_key(self._config, models)
        shared, earlier = open_shared_images(session.data_dir, key), EarlierImages(session.data_dir, key)
        store, parts = _MachineCache(self._config, key), ImageParts(session, key)
        while self.missing and not session.should_stop:
            first = len(self._encoded)
            numbers = range(first, first + min(self._config.sample_batch_size, self.missing))
            given = [_sound(shared.read(_file_name(number))) for number in numbers]
            self._shared += len(numbers) - given.count(None)
            stored = [
                old or next(filter(None, map(_sound, earlier.read(_file_name(number)))), None)
                for number, old in zip(numbers, given, strict=True)
            ]
            self._taken_over += given.count(None) - stored.count(None)
            found = [old or store.read(number) for number, old in zip(numbers, stored, strict=True)]
            if None in found:
                fresh = iter(
                    self._generate(models, encoder, [n for n, old in zip(numbers, found, strict=True) if not old])
                )
                found = [old or store.keep(number, next(fresh)) for number, old in zip(numbers, found, strict=True)]
            for number, old, encoded in zip(numbers, stored, found, strict=True):
                assert encoded is not None
                self._encoded.append(encoded)
                if old is None:
                    parts.add(_file_name(number), encoded)
            if self.missing:  # Complete sets go into the checkpoint.
                parts.show_if_due()
            session.phase("class_images", len(self._provided) + len(self._encoded), self._config.num_class_images)
        if self.missing:
            parts.show()
        self._prepare()
        log.info(
            "class images: %d came with the job, %d were shared by another, %d were made by earlier attempts, "
            "%d are generated now, %d are missing",
            len(self._provided),
            self._shared,
            self._taken_over,
            self.generated,
            self.missing,
        )
        return not self.missing

    def write(self, output_dir: Path, models: Models) -> None:
        """Write the generated images as files, and the archive of new images for later jobs."""
        images = [(_file_name(number), encoded) for number, encoded in enumerate(self._encoded)]
        if images:
            (output_dir / OUTPUT_DIR).mkdir(parents=True, exist_ok=True)
        for name, encoded in images:
            (output_dir / OUTPUT_DIR / name).write_bytes(encoded)
        if len(images) > self._shared:
            # The images may be older than the present model, therefore the key of their generation counts.
            write_shared(output_dir, self._key or compute_key(self._config, models), images)

    def _prepare(self) -> None:
        if self.missing > 0:
            return
        prompt = self._config.class_prompt
        assert prompt is not None
        made = [make_picture(_file_name(number), encoded, prompt) for number, encoded in enumerate(self._encoded)]
        self._batches = PictureBatches([*self._provided, *made], self._config, purpose="class")

    def _generate(self, models: Models, encoder: Encoder, numbers: Sequence[int]) -> list[bytes]:
        assert self._config.class_prompt is not None
        with torch.no_grad():
            prompt = encoder.conditioning([self._config.class_prompt])
        seeds = [derive_seed("class image", self._config.seed, number) for number in numbers]
        images = sample(models, self._config, prompt, encoder.negative(), seeds)
        self.generated += len(images)
        return [_jpeg(image) for image in images]


class _MachineCache:
    """Cache of class images on this machine; jobs generate unreadable or unwritable images again."""

    def __init__(self, config: DreamboothConfig, key: str) -> None:
        self._folder: Path | None = None
        place = config.cache_dir if config.cache_dir is not None else "~/.cache/baton/dreambooth"
        if place:
            try:
                self._folder = Path(place).expanduser() / "class-images" / key
            except RuntimeError as error:  # Containers have users without a home directory.
                log.warning("class images are not kept on this machine: %s cannot be resolved (%s)", place, error)
                return
            self._make_room(self._folder)

    def read(self, number: int) -> bytes | None:
        if self._folder is None:
            return None
        try:
            encoded = (self._folder / _file_name(number)).read_bytes()
            make_picture("", encoded, "")
        except FileNotFoundError:
            return None
        except (OSError, SyntaxError, ValueError) as error:
            log.warning("class image %d in %s is damaged (%s): it is made again", number, self._folder, error)
            return None
        return encoded

    def keep(self, number: int, encoded: bytes) -> bytes:
        """Store an image atomically, because other jobs may read at the same time."""
        if self._folder is None:
            return encoded
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", delete=False) as stream:
                stream.write(encoded)
            Path(stream.name).replace(self._folder / _file_name(number))
        except OSError as error:
            log.warning("class images cannot be kept in %s (%s)", self._folder, error)
            self._folder = None
        return encoded

    @staticmethod
    def _make_room(folder: Path) -> None:
        with contextlib.suppress(OSError):  # An empty folder, or another job's removal.
            if folder.is_dir():
                os.utime(folder)
            others = (path for path in folder.parent.iterdir() if path != folder)
            newest_first = sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)
            for old in newest_first[MAX_SETS - 1 :]:
                shutil.rmtree(old, ignore_errors=True)


def compute_key(config: DreamboothConfig, models: Models) -> str:
    """Compute a digest of all values that determine the generated class images."""
    facts = {
        "model": models.fingerprint,
        "variant": config.variant,
        "precision": config.mixed_precision,
        "prompt": config.class_prompt,
        "resolution": config.resolution,
        "steps": config.num_inference_steps,
        "guidance_scale": config.guidance_scale,
        "seed": config.seed,
        "format": _JPEG,
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _sound(encoded: bytes | None) -> bytes | None:
    """Return `encoded` if the bytes are an image file, else None."""
    if encoded is None:
        return None
    try:
        make_picture("", encoded, "")
    except (OSError, SyntaxError, ValueError) as error:
        log.warning("a class image that was shared is damaged (%s)", error)
        return None
    return encoded


def _jpeg(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, **_JPEG)
    return stream.getvalue()


def _file_name(number: int) -> str:
    return f"{number:05}.jpg"
