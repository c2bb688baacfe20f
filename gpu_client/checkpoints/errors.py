"""What can go wrong with checkpoints and outputs besides moving their bytes.

BatonError
├── BadDirectory      a directory cannot become a manifest: names, links, special files, nothing in it
├── CommitFailed      the control plane keeps asking for what was uploaded
├── RestoreFailed     there are checkpoints, but none could be fetched: do not start from nothing
└── MissingOutput     the training did not leave a declared output
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_client.transport.errors import BatonError


class BadDirectory(BatonError):  # noqa: N818 - named after what is wrong
    """A directory cannot become a manifest. The message names the entry and says why."""


class CommitFailed(BatonError):  # noqa: N818
    """The blobs were uploaded, yet the control plane does not see them."""


class RestoreFailed(BatonError):  # noqa: N818
    """Committed checkpoints exist but none could be fetched; starting from step 0 would throw them away."""


class MissingOutput(BatonError):  # noqa: N818
    """Declared outputs do not exist. `paths` are those, as declared."""

    def __init__(self, paths: Sequence[str], output_dir: str) -> None:
        self.paths = tuple(paths)
        super().__init__(f"the training left no {', '.join(self.paths)} in {output_dir}")
