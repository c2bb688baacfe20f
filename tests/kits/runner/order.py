"""Order of the test files: those that wait for processes run beside those that compute."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

TESTS = Path(__file__).parents[2]
FIRST = ("contract", "races", "e2e", "infrastructure", "conformance", "properties", "functional")
"""Folders whose tests wait, those with files of a minute first. All others, which compute, follow by name.

The workers meet in `conformance` or `properties`, where a file takes half a minute at most.
"""


class BothEnds(LoadFileScheduling):
    """Distribute whole files: the last worker takes the last file that is left, the others take the first.

    The first tests wait half of their time. If all workers began with these, a core would be idle for minutes, and
    later three workers would share two cores.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node is self.nodes[-1]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


@cache
def rank(path: Path) -> int:
    """Return the place of the file's folder in the run."""
    ranks = (number for number, folder in enumerate(FIRST) if path.is_relative_to(TESTS / folder))
    return next(ranks, len(FIRST))
