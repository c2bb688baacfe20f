"""The files that a script's checkpoints usually have, learned from those that it has written."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable

# The Hugging Face Trainer and accelerate write these behind everything else.
_LAST_FILES = re.compile(r"trainer_state\.json|random_states_[0-9]+\.pkl")
# [0-9], not \d: other scripts' digits are not what a training script writes.
_DIGITS = re.compile(r"[0-9]+")


class ExpectedFiles:
    """The kinds of files of the script's last complete checkpoint, and how many files of each kind it had.

    A resumed script may write fewer than the checkpoint that it resumed from has (fewer ranks), and a running one may
    stop writing a kind. A script that removes its checkpoints early would then lose every one. So the two last removed
    checkpoints that fell short become the measure instead: the next one is complete with all that either of them had.
    """

    def __init__(self) -> None:
        self._usual: Counter[str] | None = None
        self._fell_short: deque[Counter[str]] = deque(maxlen=2)

    @property
    def known(self) -> bool:
        """Whether there was a checkpoint to learn from."""
        return self._usual is not None

    def learn(self, paths: Iterable[str]) -> None:
        """Take the files of a complete checkpoint as the measure of the next ones."""
        self._usual = _kinds(paths)
        self._fell_short.clear()

    def lacks(self, paths: Iterable[str]) -> bool:
        """Return True if more files are probably coming.

        Before the first checkpoint the script is expected to end with a file that trainers write last.
        """
        paths = list(paths)
        if self._usual is None:
            return not any(_LAST_FILES.fullmatch(path) for path in paths)
        kinds, former = _kinds(paths), self._fell_short
        falls_short = bool(self._usual - kinds)
        return falls_short and (len(former) < 2 or bool((former[0] | former[1]) - kinds))

    def learn_from_missed(self, paths: Iterable[str]) -> None:
        """Note the files of a checkpoint that the script has removed, and that did not have all of the measure.

        The first one is the measure: nothing else tells what the script writes.
        """
        if self._usual is None:
            self.learn(paths)
        else:
            self._fell_short.append(_kinds(paths))


def strip_numbers(path: str) -> str:
    """Return the path without the numbers that tell steps, shards and ranks apart."""
    return _DIGITS.sub("#", path)


def _kinds(paths: Iterable[str]) -> Counter[str]:
    return Counter(map(strip_numbers, paths))
