"""Where a job's time went and what its checkpoints weighed, in the words that people use. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.contract.goodput import Goodput
from baton.contract.history import AttemptView
from gpu_client.cli.core.formats import count, duration, size

_CAUSES = {
    "repeated_s": "repeated steps",
    "transferring_s": "waiting for transfers",
    "idle_s": "starting and ending",
    "stalled_s": "taking checkpoints",
}
"""Of everything that is not a new step."""


@dataclass(frozen=True)
class Loss:
    """Time that brought no new step. `name` is that of the field of Goodput."""

    name: str
    seconds: float

    @property
    def cause(self) -> str:
        """For people."""
        return _CAUSES[self.name]


def total_of(attempts: Iterable[AttemptView]) -> Goodput | None:
    """Of all attempts together; None where none has reported any."""
    found = [one.progress.goodput.model_dump() for one in attempts if one.progress and one.progress.goodput]
    return Goodput(**{name: sum(one[name] for one in found) for name in Goodput.model_fields}) if found else None


def total_s(goodput: Goodput) -> float:
    """All seconds that are accounted for."""
    return goodput.productive_s + sum(loss.seconds for loss in losses(goodput))


def losses(goodput: Goodput) -> list[Loss]:
    """What was lost to what, the largest first; nothing that is 0."""
    found = [Loss(name, getattr(goodput, name)) for name in _CAUSES]
    return sorted((loss for loss in found if loss.seconds), key=lambda loss: -loss.seconds)


def share_of(goodput: Goodput | None) -> float | None:
    """New steps' share of the time, from 0 to 1; None before any time has passed."""
    if goodput is None or not (whole_s := total_s(goodput)):
        return None
    return goodput.productive_s / whole_s


def percent(share: float | None) -> str:
    """`87%`; not 100% while anything is lost. "" if it is not known."""
    if share is None:
        return ""
    return f"{share:.0%}" if share == 1 or share < 0.995 else f"{int(share * 1000) / 10:g}%"


def share_text(goodput: Goodput, price_per_hour: float | None) -> str:
    """`87%: 13 min 32 s of 15 min 36 s (0.06 of 0.07) were new steps`; "" before any time has passed."""
    share = share_of(goodput)
    if share is None:
        return ""
    whole_s = total_s(goodput)
    money = ""
    if price_per_hour is not None:
        money = f" ({_cost(goodput.productive_s, price_per_hour)} of {_cost(whole_s, price_per_hour)})"
    return f"{percent(share)}: {short(goodput.productive_s)} of {short(whole_s)}{money} went into new steps"


def losses_text(goodput: Goodput, price_per_hour: float | None) -> str:
    """`repeated steps 31 s (0.01), waiting for transfers 12 s (<0.01)`; "" if nothing is lost."""
    said = []
    for loss in losses(goodput):
        money = "" if price_per_hour is None else f" ({_cost(loss.seconds, price_per_hour)})"
        said.append(f"{loss.cause} {short(loss.seconds)}{money}")
    return ", ".join(said)


def checkpoints_text(goodput: Goodput) -> str:
    """`8 stored, 1 passed over; 610.0 MB sent of 1.2 GB (52%); 0.2 s of standstill each`; "" if there was none."""
    stored, skipped = goodput.checkpoints_committed, goodput.checkpoints_skipped
    if not stored and not skipped:
        return ""
    said = ", ".join(f"{number} {word}" for number, word in ((stored, "stored"), (skipped, "passed over")) if number)
    if goodput.raw_bytes:
        share = goodput.uploaded_bytes / goodput.raw_bytes
        said += f"; {size(goodput.uploaded_bytes)} sent of {size(goodput.raw_bytes)} ({share:.0%})"
    if stored and goodput.stalled_s:
        said += f"; {short(goodput.stalled_s / stored)} of standstill each"
    return said


def goodput_lines(goodput: Goodput | None, price_per_hour: float | None) -> list[tuple[str, str]]:
    """Names and texts; empty ones where nothing is known."""
    if goodput is None:
        return []
    return [
        ("goodput", share_text(goodput, price_per_hour)),
        ("lost", losses_text(goodput, price_per_hour)),
        ("checkpoints", checkpoints_text(goodput)),
    ]


def short(seconds: float) -> str:
    """A duration; below ten seconds with a decimal, below a tenth in milliseconds."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 9.95 else duration(seconds)


def _cost(seconds: float, price_per_hour: float) -> str:
    cost = seconds * price_per_hour / 3600
    return "<0.01" if 0 < cost < 0.005 else f"{cost:.2f}"


WORTH_A_WORD_S = 600.0
"""In less time than this the start always takes much of it."""
TOLERABLE_SHARE = 1 / 3
"""Of the time may be lost before that is worth a word."""


def advice_on(attempts: Sequence[AttemptView], checkpoint_every: object) -> list[str]:
    """What to do where more than a third of the time is lost; nothing otherwise."""
    goodput = total_of(attempts)
    share = share_of(goodput)
    if goodput is None or share is None or total_s(goodput) < WORTH_A_WORD_S:
        return []
    if total_s(goodput) - goodput.productive_s <= TOLERABLE_SHARE * total_s(goodput):
        return []
    worst = losses(goodput)[0]
    lost = f"{percent(1 - share)} of the time in {count(len(attempts), 'attempt')} brought no new step"
    return [f"{lost}, mostly {worst.cause} ({duration(worst.seconds)}). {_remedy(worst.name, checkpoint_every)}"]


def _remedy(name: str, checkpoint_every: object) -> str:
    by_itself = checkpoint_every == "auto"
    if name == "repeated_s":
        if by_itself:
            return "Checkpoints come as often as pays already: machines that last longer would help."
        return "More frequent checkpoints would help: policy.checkpoint_every: auto (for scripts with our session)."
    if name == "stalled_s":
        fewer = "" if by_itself else "fewer of them (policy.checkpoint_every: auto), "
        return f"Cheaper checkpoints would help: {fewer}room in /dev/shm, session.checkpoint(..., overlap=True)."
    if name == "transferring_s":
        return "Machines with a faster line would help, or fewer and smaller inputs and outputs."
    return "What the command does before its first step and after its last one takes long: move it into the image."
