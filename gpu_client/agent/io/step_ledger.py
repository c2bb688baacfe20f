"""Record a job's finished steps and their files in the job's checkpoints.

```
checkpoint-<step>/...         files of the script
checkpoint-<step>/.baton/     added by the agent once a step is finished
    steps.json                {"format": 1, "finished": ["prepare"], "base": 101}
    kept/...                  files that the finished steps left in the output directory
```

When a step ends, a checkpoint of `.baton` alone records the end. Every later checkpoint repeats the record, so that any
checkpoint is the whole state of the job. The checkpoints of a job share one numbering: a step's checkpoints begin at
`base`, beyond all earlier steps. The agent hides `.baton` from the script, and the script counts its steps from 0.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from baton.contract.base import MAX_STEP
from baton.contract.recipes.plan import RunPlan, StepOrder
from baton.contract.worker.calls import WorkItem
from gpu_client.agent.workspace.slots import JobDirectories, disk_errors
from gpu_client.checkpoints.local.directory_files import resolve_files
from gpu_client.checkpoints.restore.checkpoint_restore import Restored, RestoreFailed

RECORD = ".baton"
_STEPS = "steps.json"
_KEPT = "kept"
_FORMAT = 1
_CHECKPOINT = re.compile(r"checkpoint-[0-9]{1,15}")


def get_plan(item: WorkItem) -> RunPlan:
    """Return the job's plan; a bare command is a plan of one step."""
    return item.plan or RunPlan(steps=[StepOrder(name="command", command=item.command)])


class StepLedger:
    """Record of one attempt's steps. `base` is added to the step numbers of the present step."""

    def __init__(self, steps: Sequence[StepOrder], directories: JobDirectories) -> None:
        self._steps = list(steps)
        self._directories = directories
        self._kept: Path | None = None
        self.finished: list[str] = []
        self.base = 0

    def to_job_step(self, step: int) -> int:
        """Convert a step of the present training to a step of the job, at most MAX_STEP."""
        return min(step + self.base, MAX_STEP)

    def remaining_steps(self) -> list[StepOrder]:
        """Return the remaining steps. The ledger does not record the last step, whose end is the end of the job."""
        return self._steps[len(self.finished) :]

    def describe(self, order: StepOrder) -> str:
        """Return the place of a step, such as `step prepare (1 of 2)`."""
        return f"step {order.name} ({self._steps.index(order) + 1} of {len(self._steps)})"

    def resume(self, restored: Restored | None) -> Path | None:
        """Continue from a restored checkpoint. Returns the present step's checkpoint; None for a start from scratch.

        Raises RestoreFailed for a record of other steps, DiskFullError.
        """
        if restored is None:
            return None
        record = restored.path / RECORD
        if len(self._steps) == 1 or not (record / _STEPS).is_file():
            return restored.path
        self._read(record / _STEPS, restored.step)
        with disk_errors(self._directories.root):
            kept = self._directories.root / f"{_KEPT}-{len(self.finished)}"
            if (record / _KEPT).is_dir():
                (record / _KEPT).rename(kept)
            else:
                kept.mkdir()
            self._kept = kept
            # A step may change its files in place, and the next checkpoint must contain the unchanged files, therefore
            # the files are copied and not linked.
            shutil.copytree(kept, self._directories.output, dirs_exist_ok=True)
            shutil.rmtree(record)
            if not any(restored.path.iterdir()):
                restored.path.rmdir()
                return None
            return restored.path.rename(restored.path.with_name(f"checkpoint-{restored.step - self.base}"))

    def finish(self, order: StepOrder, last_step: int) -> tuple[int, Path]:
        """Finish a step. Returns the step and path of the checkpoint to commit.

        `last_step` is the job's largest known step number. Copies the files that the step keeps, and removes the step's
        checkpoints. Raises BadDirectory for links out of the output directory, DiskFullError.
        """
        number = len(self.finished) + 1
        with disk_errors(self._directories.root):
            kept = self._directories.root / f"{_KEPT}-{number}"
            kept.mkdir()
            if order.keeps is not None and self._kept is not None:
                shutil.copytree(self._kept, kept, dirs_exist_ok=True)
            for name, source in resolve_files(self._directories.output).items():
                if _is_kept(name, order.keeps):
                    (kept / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, kept / name)
            for path in self._directories.output.iterdir():
                if _CHECKPOINT.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
            self._kept = kept
            self.finished.append(order.name)
            step = max(self.base, last_step) + 1
            self.base = step + 1
            directory = self._directories.staging / f"finished-{number}"
            directory.mkdir()
            self.attach_record(directory)
        return step, directory

    def attach_record(self, checkpoint: Path) -> bool:
        """Add the record to a staged checkpoint; returns False without finished steps. Raises OSError."""
        if self._kept is None:
            return False
        record = checkpoint / RECORD
        if record.is_symlink() or record.is_file():
            record.unlink()
        shutil.rmtree(record, ignore_errors=True)
        record.mkdir()
        fields = {"format": _FORMAT, "finished": self.finished, "base": self.base}
        (record / _STEPS).write_text(json.dumps(fields), encoding="utf-8")
        for name, source in resolve_files(self._kept).items():
            target = record / _KEPT / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(source, target)
        return True

    def _read(self, path: Path, step: int) -> None:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            finished, base = [str(name) for name in fields["finished"]], int(fields["base"])
            fits = fields["format"] == _FORMAT and 0 <= base <= step + 1
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RestoreFailed(f"{RECORD}/{_STEPS} of the checkpoint of step {step} is damaged: {error}") from error
        names = [order.name for order in self._steps]
        if not fits or finished != names[: len(finished)] or len(finished) >= len(names):
            raise RestoreFailed(f"the checkpoint of step {step} is of other steps ({', '.join(finished)[:200]})")
        self.finished, self.base = finished, base


def _is_kept(name: str, keeps: Iterable[str] | None) -> bool:
    """Return True for a kept output. Checkpoints and top-level names that begin with a dot are not kept."""
    top = name.partition("/")[0]
    if top.startswith(".") or _CHECKPOINT.fullmatch(top):
        return False
    return keeps is None or any(name == kept or name.startswith(f"{kept}/") for kept in keeps)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Too many links, or a file system without links; the copy raises any other error.
        shutil.copy2(source, target)
