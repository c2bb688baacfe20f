"""Learn the usual files of a script's checkpoints from the script's earlier checkpoints."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable

# The Hugging Face Trainer and accelerate write these files last.
_LAST_FILES = re.compile(r"trainer_state\.json|random_states_[0-9]+\.pkl")
# [0-9] and not \d, which also matches the digits of other writing systems.
_DIGITS = re.compile(r"[0-9]+")


class ExpectedFiles:
    """Expected files of a checkpoint: the kinds of files in the script's last complete checkpoint, with their counts.

    A resumed script can write fewer files than the checkpoint before (fewer ranks), and a running script can stop
    writing a kind. If such a script also deletes its checkpoints early, the agent would miss every checkpoint.
    Therefore two deleted checkpoints that lack expected files set a new expectation: all files of either of the two.
    """

    def __init__(self) -> None:
        self._usual: Counter[str] | None = None
        self._fell_short: deque[Counter[str]] = deque(maxlen=2)

    @property
    def known(self) -> bool:
        """Return True after the first learned checkpoint."""
        return self._usual is not None

    def learn(self, paths: Iterable[str]) -> None:
        """Expect the files of a complete checkpoint in later checkpoints."""
        self._usual = _kinds(paths)
        self._fell_short.clear()

    def lacks(self, paths: Iterable[str]) -> bool:
        """Return True if the script probably has more files to write.

        Before the first learned checkpoint, the method expects a file that trainers write last.
        """
        paths = list(paths)
        if self._usual is None:
            return not any(_LAST_FILES.fullmatch(path) for path in paths)
        kinds, former = _kinds(paths), self._fell_short
        falls_short = bool(self._usual - kinds)
        return falls_short and (len(former) < 2 or bool((former[0] | former[1]) - kinds))

    def learn_from_missed(self, paths: Iterable[str]) -> None:
        """Record the files of a deleted checkpoint that lacked expected files.

        Without an earlier checkpoint, these files become the expected files.
        """
        if self._usual is None:
            self.learn(paths)
        else:
            self._fell_short.append(_kinds(paths))


def strip_numbers(path: str) -> str:
    """Replace each number in a path by `#`, because numbers distinguish only steps, shards and ranks."""
    return _DIGITS.sub("#", path)


def _kinds(paths: Iterable[str]) -> Counter[str]:
    return Counter(map(strip_numbers, paths))
