"""Define the state machine of rented machines as data: transitions, deadlines, and the states that cost money."""

from __future__ import annotations

from dataclasses import dataclass

from baton.contract.fleets.fleet import MachineState as State

TRANSITIONS: dict[State, frozenset[State]] = {
    State.PLANNED: frozenset({State.REQUESTED, State.FAILED}),
    # A machine that turns out dearer than the cap ends before it boots.
    State.REQUESTED: frozenset({State.BOOTING, State.AMBIGUOUS, State.FAILED, State.TERMINATING}),
    State.AMBIGUOUS: frozenset({State.BOOTING, State.FAILED, State.TERMINATING}),
    State.BOOTING: frozenset({State.REGISTERED, State.LOST, State.TERMINATING}),
    State.REGISTERED: frozenset({State.READY, State.LOST, State.TERMINATING}),
    State.READY: frozenset({State.BUSY, State.DRAINING, State.LOST, State.TERMINATING}),
    State.BUSY: frozenset({State.READY, State.DRAINING, State.LOST, State.TERMINATING}),
    State.DRAINING: frozenset({State.LOST, State.TERMINATING}),
    State.LOST: frozenset({State.TERMINATING}),
    State.TERMINATING: frozenset({State.GONE}),
    State.GONE: frozenset(),
    # A create whose answer was lost can take effect after its absence seemed proved.
    State.FAILED: frozenset({State.TERMINATING}),
}

ORPHAN_WATCH_S = 24 * 3600
"""Time after an ambiguous create in which a late arrival is still recognized and destroyed."""


CHECKPOINT_GRACE_S = 300
"""Time that a draining machine has for its last checkpoint."""
CHECKPOINT_MARGIN_S = CHECKPOINT_GRACE_S + 120
"""Time before a machine must be gone at which the machine drains: the grace of its checkpoint and two ticks."""


ENROLS_WITHIN_S = 1800
"""Time after the intent of a create, or after a move to another host, within which the enrolment key is valid."""


@dataclass(frozen=True)
class Deadline:
    """Longest stay in a state, and the state that follows."""

    after_s: int
    then: State
    reason: str


DEADLINES: dict[State, Deadline] = {
    State.PLANNED: Deadline(120, State.FAILED, "the create was not begun in time"),
    State.BOOTING: Deadline(900, State.TERMINATING, "the machine did not start its worker in time"),
    State.REGISTERED: Deadline(180, State.TERMINATING, "the preflight check did not finish in time"),
    State.DRAINING: Deadline(CHECKPOINT_GRACE_S, State.TERMINATING, "the grace of the checkpoint is over"),
}

OVERDUE_S = 600
"""Time in a state without a deadline after which a person should look."""
OVERDUE: dict[State, str] = {
    State.AMBIGUOUS: (
        "no complete list of the provider has shown for 10 minutes whether the machine exists; its cost is reserved"
    ),
    State.TERMINATING: (
        "the provider was asked for the end of the machine 10 minutes ago, and no two complete lists lack the machine; "
        "its cost is counted: end the machine at the provider, or ask for the cause there"
    ),
}

EXISTING = frozenset(
    {State.BOOTING, State.REGISTERED, State.READY, State.BUSY, State.DRAINING, State.LOST, State.TERMINATING}
)
"""States in which the provider knows the machine, therefore bills the machine."""

MAYBE_EXISTING = EXISTING | {State.REQUESTED, State.AMBIGUOUS}
"""States in which the provider may bill the machine."""

USABLE = frozenset({State.READY, State.BUSY})
STARTING = frozenset({State.PLANNED, State.REQUESTED, State.AMBIGUOUS, State.BOOTING, State.REGISTERED})
"""States of a machine that will serve jobs later."""
NUDGING = frozenset({State.READY, State.TERMINATING})
"""States that let a tick follow at once if the machine's worker brings them about: by its enrolment, the end of its job
or of its drain, or a failed preflight check. A tick that follows from states that ticks bring about would repeat a
failing rent without a pause."""
