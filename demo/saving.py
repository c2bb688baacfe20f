"""Where the time of the attempts went, and what their checkpoints cost: from what the workers report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.contract.goodput import Goodput
from baton.contract.history import AttemptView

DEFINITIONS = {
    "goodput": "by attempt, as of its last report: seconds by what they went into, and the share of new steps",
    "checkpoints_stored": "of both jobs together, like all that follows",
    "checkpoint_stall_s": "how long the training stood still for a checkpoint, on average",
    "checkpoint_bytes": "of the checkpoints' files",
    "bytes_saved_by_addressing": "of these, what was stored already: by an earlier checkpoint, or by the other job",
    "bytes_saved_by_codec": "of these, what encoding saved",
    "checkpoint_bytes_sent": "what was left to upload",
}


@dataclass(frozen=True)
class Saving:
    """All attempts with a name for each, in the order in which they ran."""

    attempts: dict[str, Goodput]

    @classmethod
    def of(cls, interrupted: Sequence[AttemptView], undisturbed: Iterable[AttemptView]) -> Saving:
        """Of the two jobs. An attempt that reported nothing is left out."""
        named = [(f"attempt {one.epoch}", one) for one in interrupted] + [("undisturbed", one) for one in undisturbed]
        return cls({name: one.progress.goodput for name, one in named if one.progress and one.progress.goodput})

    def total(self, name: str) -> float:
        """Of all attempts."""
        return float(sum(getattr(one, name) for one in self.attempts.values()))

    @property
    def stall_s(self) -> float:
        """Of one checkpoint, on average."""
        return self.total("stalled_s") / max(self.total("checkpoints_committed"), 1)

    @property
    def by_addressing_bytes(self) -> int:
        """Not sent, for it was stored."""
        return int(self.total("reused_bytes") + self.total("encoded_bytes") - self.total("uploaded_bytes"))

    @property
    def by_codec_bytes(self) -> int:
        """Not stored, for it was encoded."""
        return int(self.total("raw_bytes") - self.total("reused_bytes") - self.total("encoded_bytes"))

    def as_dict(self) -> dict[str, Any]:
        """For `summary.json`."""
        seconds = [name for name in Goodput.model_fields if name.endswith("_s")]
        return {
            "goodput": {
                name: {**one.model_dump(include=set(seconds)), "share": round(share_of(one), 4)}
                for name, one in self.attempts.items()
            },
            "checkpoints_stored": int(self.total("checkpoints_committed")),
            "checkpoint_stall_s": round(self.stall_s, 4),
            "checkpoint_bytes": int(self.total("raw_bytes")),
            "bytes_saved_by_addressing": self.by_addressing_bytes,
            "bytes_saved_by_codec": self.by_codec_bytes,
            "checkpoint_bytes_sent": int(self.total("uploaded_bytes")),
        }

    @property
    def checkpoints_text(self) -> str:
        """How long they held the training up."""
        stored = f"{self.total('checkpoints_committed'):.0f} checkpoints"
        return f"{stored} stopped the training for {1000 * self.stall_s:.1f} ms each."

    def in_plain_words(self) -> list[str]:
        """A sentence or two a line."""
        if not self.attempts:
            return []
        shares = ", ".join(
            f"{name} {100 * share_of(one):.0f} % of {total_s(one):.0f} s" for name, one in self.attempts.items()
        )
        return [
            f"Goodput, the share of time that went into new steps: {shares}. {self.total('repeated_s'):.1f} s went "
            f"into repeated steps, {self.total('transferring_s'):.0f} s into waiting for bytes, "
            f"{self.total('idle_s'):.0f} s into starting and ending.",
            f"The training stood still for {1000 * self.stall_s:.1f} ms for each of "
            f"{self.total('checkpoints_committed'):.0f} checkpoints. Of their {size_text(self.total('raw_bytes'))}, "
            f"{size_text(self.by_addressing_bytes)} were stored already and not sent again, codecs saved "
            f"{size_text(self.by_codec_bytes)}, and {size_text(self.total('uploaded_bytes'))} went up.",
        ]


def total_s(goodput: Goodput) -> float:
    """All seconds that are accounted for."""
    return float(sum(value for name, value in goodput.model_dump().items() if name.endswith("_s")))


def share_of(goodput: Goodput) -> float:
    """New steps' share of the time, from 0 to 1."""
    return goodput.productive_s / max(total_s(goodput), 0.001)


def size_text(size_bytes: float) -> str:
    """For people: `1.2 MB`, `340 kB`."""
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.0f} kB"
