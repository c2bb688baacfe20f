"""Advise on rounds that take too much of an elastic training's time. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from baton.contract.elastic.world import NodeProgram, RoundReport

MIN_ROUNDS = 3
"""Rounds before the first advice: the first rounds of a training are not typical."""
USED_ROUNDS = 8
SLOW_SHARE = 0.2
"""Part of a round's time that its reduce takes, above which a training that waits for the reduce receives advice."""
SLOW_OVERLAPPED_SHARE = 0.9
"""Limit of this share for a training that goes on during the reduce."""
GOOD_SHARE = 0.05
SMALLER_CODEC = {"fp32": ("bf16", 2.0), "bf16": ("int8", 2.0), "int8": ("int4", 1.9)}
"""Codec with the next smaller encoding, and the ratio of the encoded bytes."""


def advise_rounds(rounds: Sequence[RoundReport], program: NodeProgram | None) -> str:
    """Return one sentence about slow reduces and their remedies; empty if the reduces are short enough.

    rounds: the newest reported rounds, oldest first.
    """
    used = [one for one in rounds if one.contributors > 1 and one.round_s > 0][-USED_ROUNDS:]
    if program is None or len(used) < MIN_ROUNDS:
        return ""
    share = median(min(1.0, one.reduce_s / one.round_s) for one in used)
    overlaps = bool(program.settings.get("overlap"))
    if share < (SLOW_OVERLAPPED_SHARE if overlaps else SLOW_SHARE):
        return ""
    mbit_s = median(one.sent_bytes * 8 / 1e6 / max(one.reduce_s, 1e-3) for one in used)
    # The reduce takes as long as before, and only the inner steps become longer. An overlapped round as long as its
    # reduce does not show how long the inner steps are.
    factor = 2.0 if overlaps else share * (1 - GOOD_SHARE) / (GOOD_SHARE * max(1 - share, 0.01))
    remedies = [f"{math.ceil(factor)} times the inner_steps"]
    if program.codec in SMALLER_CODEC:
        codec, ratio = SMALLER_CODEC[program.codec]
        remedies.append(f"codec {codec} (a reduce {ratio:g} times as fast)")
    if not overlaps:
        remedies.append("fragments=4 (the training goes on during the reduces of parts)")
    return (
        f"The reduces take {share:.0%} of the time, at {mbit_s:.3g} Mbit/s. "
        f"Remedies: {', '.join(remedies[:-1])}{' or ' if len(remedies) > 1 else ''}{remedies[-1]}."
    )
