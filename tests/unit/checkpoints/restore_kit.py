"""Two checkpoints with common chunks, and the assertion on a restored one."""

from __future__ import annotations

from pathlib import Path

from gpu_client.checkpoints.restore.checkpoint_restore import Restored
from tests.kits.files.directories import files_below
from tests.unit.checkpoints.made_checkpoints import Maker


def contents(step: int) -> dict[str, bytes]:
    same = b"frozen" * 1000
    model = b"".join(b"%d-" % number + (b"%d" % step * 1333)[:3998] for number in range(3))
    return {"model.bin": model, "frozen.bin": same, "copy/frozen.bin": same, "empty": b""}


def made(step: int) -> Maker:
    """Make a checkpoint: a new file in one pack, as three chunks; a file that never changes in another pack."""
    maker = Maker(step=step)
    found = contents(step)
    model = found["model.bin"]
    maker.file("model.bin", [maker.chunk(model[start : start + 4000]) for start in (0, 4000, 8000)])
    frozen = maker.chunk(found["frozen.bin"], pack=1)
    maker.file("frozen.bin", [frozen])
    maker.file("copy/frozen.bin", [frozen])
    maker.file("empty", [])
    return maker


def assert_restored(restored: Restored | None, output: Path, step: int) -> None:
    """The directory is exactly the checkpoint, and nothing else is left."""
    assert restored is not None
    assert (restored.step, restored.epoch, restored.path) == (step, 1, output / f"checkpoint-{step}")
    assert files_below(restored.path) == contents(step)
    assert [path.name for path in output.iterdir()] == [f"checkpoint-{step}"]
