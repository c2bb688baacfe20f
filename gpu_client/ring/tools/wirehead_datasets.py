"""Provide Wirehead's data sets, which need torch, on a ring in a directory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from gpu_client.ring.core.ring import open_ring
from gpu_client.ring.format.manifest import RingManifest
from gpu_client.ring.format.records import WRITERS, decode_record
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.tools.wirehead_log import WireheadConfig

logger = logging.getLogger("baton.ring")

_PATIENCE_S = 600.0
_OLD_S = 3600.0
"""Age in seconds from which a generation may be of an earlier run, despite a working generator."""


class MongoheadDataset(Dataset[Any]):  # type: ignore[misc, unused-ignore]
    """Samples of the newest generation, by index or by lists of indices.

    A list gives `{index: {"input", "label"}}`, the first array as floats, as in Wirehead; an index gives one entry. The
    constructor waits for the first generation. `generation`: number of the last read generation; in another generation,
    an index means another sample. In an incomplete generation, indices beyond its end wrap around.
    """

    def __init__(  # noqa: PLR0917 - the order of Wirehead's arguments
        self,
        config_path: str = "config.yaml",
        timeout: float = _PATIENCE_S,
        collection: Any = None,
        sample: Sequence[str] | None = None,
        transform: Any = None,
        normalize: Callable[[Any], Any] | None = None,
        id: Any = "id",
        keeptrying: Any = True,
    ) -> None:
        """`normalize` maps the first array. The ring ignores `collection`, `transform`, `id` and `keeptrying`."""
        of_mongodb = {"collection": collection is None, "transform": transform is None, "id": id == "id"}
        of_mongodb |= {"keeptrying": bool(keeptrying)}
        if ignored := [name for name, is_default in of_mongodb.items() if not is_default]:
            logger.warning("ignored, since there is no MongoDB here: %s", ", ".join(ignored))
        self._config = WireheadConfig.read(config_path)
        self._kinds = tuple(sample) if sample is not None else self._config.kinds[:2]
        self._normalize = normalize
        self._timeout_s = timeout
        self._config.ring()
        self._reader: RingReader | None = None
        self._at_end: Finalize | None = None  # type: ignore[type-arg, unused-ignore]
        self.generation = 0
        newest = self._newest()
        self._length = len(newest)
        ring = self._open_reader().ring
        age_s = ring.clock() - newest.at_ms / 1000
        generating = any(not decode_record(ring.store.record(key)).get("dead") for key in ring.store.keys(WRITERS))
        if age_s > _OLD_S or not generating:
            logger.warning(
                "the newest generation was made %.1f minutes ago%s: if it is of another run, remove %s to begin anew",
                age_s / 60,
                "" if generating else ", and no generator is at work",
                self._config.place,
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int | Sequence[int]]) -> list[Any]:
        """Return a batch of one generation for a DataLoader. Each index may be a list of indices."""
        newest = self._newest()
        self.generation = newest.number
        return [self._of(newest, index) for index in indices]

    def get(self, indices: Sequence[int]) -> Any:
        """Return the samples of a list of indices."""
        return self[list(indices)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_at_end": None}

    def _of(self, newest: RingManifest, index: int | Sequence[int]) -> Any:
        if isinstance(index, int | np.integer):
            return self._fetch(newest, [index])[index]
        return self._fetch(newest, index)

    def _fetch(self, newest: RingManifest, indices: Sequence[int]) -> dict[int, dict[str, Any]]:
        reader = self._open_reader()
        found = {}
        for index in indices:
            if not -self._length <= index < self._length:
                raise IndexError(f"there are {self._length} samples, and no {index}")
            # The reader substitutes a damaged sample and logs the substitution.
            sample, _ = reader.sample_or_another(newest.slots[index % self._length % len(newest)], newest)
            first = torch.as_tensor(sample[self._kinds[0]]).float()
            found[index] = {"input": self._normalize(first) if self._normalize else first}
            if len(self._kinds) > 1:
                found[index]["label"] = torch.as_tensor(sample[self._kinds[1]])
        reader.record_consumed(len(found))
        return found

    def _newest(self) -> RingManifest:
        reader = self._open_reader()
        found: RingManifest = reader.wait(lambda: reader.newest() or None, "no generation is complete")
        reader.keep_only([found.number])
        return found

    def _open_reader(self) -> RingReader:
        if self._reader is None or not self._reader.is_own_process():
            self._reader = RingReader(open_ring(self._config.place), patience_s=self._timeout_s)
            # A worker ends without atexit, and the reads of an unclosed reader would not count, therefore a finalizer
            # closes the reader.
            self._at_end = Finalize(None, self._reader.close, exitpriority=0)
        return self._reader


class MongoTupleheadDataset(MongoheadDataset):
    """Dataset of samples as pairs: a list of indices gives `[(input, label)]`."""

    def _of(self, newest: RingManifest, index: int | Sequence[int]) -> Any:
        if isinstance(index, int | np.integer):
            return tuple(self._fetch(newest, [index])[index].values())
        found = self._fetch(newest, index)
        return [tuple(found[one].values()) for one in index]
