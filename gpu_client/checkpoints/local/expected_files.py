"""Learn the files that a script's checkpoints usually have from the checkpoints that the script has written."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable

# The Hugging Face Trainer and accelerate write these files last.
_LAST_FILES = re.compile(r"trainer_state\.json|random_states_[0-9]+\.pkl")
# [0-9] and not \d, which also matches the digits of other writing systems.
_DIGITS = re.compile(r"[0-9]+")


class ExpectedFiles:
    """The kinds of files of the script's last complete checkpoint, and how many files of each kind it had.

    A resumed script can write fewer files than the checkpoint that it resumed from (fewer ranks), and a running script
    can stop writing a kind. If such a script also deletes its checkpoints early, every checkpoint would be missed.
    Therefore the last two deleted checkpoints that fell short become the new measure: the next checkpoint is complete
    with all files that either of the two had.
    """

    def __init__(self) -> None:
        self._usual: Counter[str] | None = None
        self._fell_short: deque[Counter[str]] = deque(maxlen=2)

    @property
    def known(self) -> bool:
        """Return True once a checkpoint was learned."""
        return self._usual is not None

    def learn(self, paths: Iterable[str]) -> None:
        """Make the files of a complete checkpoint the measure of the next ones."""
        self._usual = _kinds(paths)
        self._fell_short.clear()

    def lacks(self, paths: Iterable[str]) -> bool:
        """Return True if the script probably has more files to write.

        Before the first checkpoint, a file that trainers write last is expected.
        """
        paths = list(paths)
        if self._usual is None:
            return not any(_LAST_FILES.fullmatch(path) for path in paths)
        kinds, former = _kinds(paths), self._fell_short
        falls_short = bool(self._usual - kinds)
        return falls_short and (len(former) < 2 or bool((former[0] | former[1]) - kinds))

    def learn_from_missed(self, paths: Iterable[str]) -> None:
        """Record the files of a deleted checkpoint that fell short of the measure.

        The first one becomes the measure, because no other checkpoint is known.
        """
        if self._usual is None:
            self.learn(paths)
        else:
            self._fell_short.append(_kinds(paths))


def strip_numbers(path: str) -> str:
    """Return the path with `#` for each number, which distinguishes only steps, shards and ranks."""
    return _DIGITS.sub("#", path)


def _kinds(paths: Iterable[str]) -> Counter[str]:
    return Counter(map(strip_numbers, paths))
