"""Format goodput: the use of a job's time, and the cost of its checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.contract.jobs.goodput import Goodput
from baton.contract.jobs.history import AttemptView
from gpu_client.cli.core.formats import count, duration, size

_CAUSES = {
    "repeated_s": "repeated steps",
    "transferring_s": "waiting for transfers",
    "idle_s": "starting and ending",
    "stalled_s": "taking checkpoints",
}
"""Cause of each kind of time without new steps, by field of Goodput."""


@dataclass(frozen=True)
class LostTime:
    """Seconds without a new step. `name`: field of Goodput."""

    name: str
    seconds: float

    @property
    def cause(self) -> str:
        """Return the cause as text."""
        return _CAUSES[self.name]


def total_of(attempts: Iterable[AttemptView]) -> Goodput | None:
    """Sum the goodput of all attempts; None without a report of goodput."""
    found = [one.progress.goodput.model_dump() for one in attempts if one.progress and one.progress.goodput]
    return Goodput(**{name: sum(one[name] for one in found) for name in Goodput.model_fields}) if found else None


def total_s(goodput: Goodput) -> float:
    """Sum all seconds of a goodput."""
    return goodput.productive_s + sum(loss.seconds for loss in losses(goodput))


def losses(goodput: Goodput) -> list[LostTime]:
    """List the lost times greater than 0, largest first."""
    found = [LostTime(name, getattr(goodput, name)) for name in _CAUSES]
    return sorted((loss for loss in found if loss.seconds), key=lambda loss: -loss.seconds)


def share_of(goodput: Goodput | None) -> float | None:
    """Return the share of time spent on new steps, 0 to 1; None if no time has passed."""
    if goodput is None or not (whole_s := total_s(goodput)):
        return None
    return goodput.productive_s / whole_s


def percent(share: float | None) -> str:
    """Format a share as `87%`; never 100% if time was lost; "" if unknown."""
    if share is None:
        return ""
    return f"{share:.0%}" if share == 1 or share < 0.995 else f"{int(share * 1000) / 10:g}%"


def share_text(goodput: Goodput, price_per_hour: float | None) -> str:
    """Return `87%: 13 min 32 s of 15 min 36 s (0.06 of 0.07) went into new steps`; "" if no time has passed."""
    share = share_of(goodput)
    if share is None:
        return ""
    whole_s = total_s(goodput)
    money = ""
    if price_per_hour is not None:
        money = f" ({_cost(goodput.productive_s, price_per_hour)} of {_cost(whole_s, price_per_hour)})"
    return f"{percent(share)}: {short(goodput.productive_s)} of {short(whole_s)}{money} went into new steps"


def losses_text(goodput: Goodput, price_per_hour: float | None) -> str:
    """Return `repeated steps 31 s (0.01), waiting for transfers 12 s (<0.01)`; "" if no time was lost."""
    parts = []
    for loss in losses(goodput):
        money = "" if price_per_hour is None else f" ({_cost(loss.seconds, price_per_hour)})"
        parts.append(f"{loss.cause} {short(loss.seconds)}{money}")
    return ", ".join(parts)


def checkpoints_text(goodput: Goodput) -> str:
    """Return `8 stored, 1 skipped; 610.0 MB sent of 1.2 GB (52%); 0.2 s of stall each`; "" without checkpoints."""
    stored, skipped = goodput.checkpoints_committed, goodput.checkpoints_skipped
    if not stored and not skipped:
        return ""
    parts = ", ".join(f"{number} {word}" for number, word in ((stored, "stored"), (skipped, "skipped")) if number)
    if goodput.raw_bytes:
        share = goodput.uploaded_bytes / goodput.raw_bytes
        parts += f"; {size(goodput.uploaded_bytes)} sent of {size(goodput.raw_bytes)} ({share:.0%})"
    if stored and goodput.stalled_s:
        parts += f"; {short(goodput.stalled_s / stored)} of stall each"
    return parts


def goodput_lines(goodput: Goodput | None, price_per_hour: float | None) -> list[tuple[str, str]]:
    """Return names and texts for `CommandOutput.fields`; texts are empty if unknown."""
    if goodput is None:
        return []
    return [
        ("goodput", share_text(goodput, price_per_hour)),
        ("lost", losses_text(goodput, price_per_hour)),
        ("checkpoints", checkpoints_text(goodput)),
    ]


def short(seconds: float) -> str:
    """Format a duration; below 10 s with one decimal, below 0.1 s in milliseconds."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 9.95 else duration(seconds)


def _cost(seconds: float, price_per_hour: float) -> str:
    cost = seconds * price_per_hour / 3600
    return "<0.01" if 0 < cost < 0.005 else f"{cost:.2f}"


MIN_ADVISED_S = 600.0
"""Minimum seconds for advice, because the start dominates a shorter time."""
MAX_UNADVISED_SHARE = 1 / 3
"""Maximum share of lost time without advice."""


def advice_on(attempts: Sequence[AttemptView], checkpoint_every: object) -> list[str]:
    """Return advice if more than a third of the time is lost, else an empty list."""
    goodput = total_of(attempts)
    share = share_of(goodput)
    if goodput is None or share is None or total_s(goodput) < MIN_ADVISED_S:
        return []
    if total_s(goodput) - goodput.productive_s <= MAX_UNADVISED_SHARE * total_s(goodput):
        return []
    worst = losses(goodput)[0]
    lost = f"{percent(1 - share)} of the time in {count(len(attempts), 'attempt')} produced no new step"
    return [f"{lost}, mostly {worst.cause} ({duration(worst.seconds)}). {_remedy(worst.name, checkpoint_every)}"]


def _remedy(name: str, checkpoint_every: object) -> str:
    by_itself = checkpoint_every == "auto"
    if name == "repeated_s":
        if by_itself:
            return "The checkpoint interval is already optimal; use machines that are preempted less often."
        return "Take checkpoints more often: policy.checkpoint_every: auto (for scripts that use baton.Session)."
    if name == "stalled_s":
        fewer = "" if by_itself else "fewer checkpoints (policy.checkpoint_every: auto), "
        return f"Reduce the cost of checkpoints: {fewer}space in /dev/shm, session.checkpoint(..., overlap=True)."
    if name == "transferring_s":
        return "Use machines with a faster network, or fewer and smaller inputs and outputs."
    return "The command is slow before its first step or after its last step: move this work into the image."
