"""Decide on the next action of an epoch's members: pure functions of the statuses that all members have exchanged.

Equal statuses give equal decisions at all members, therefore no member coordinates a round. An exchange may still fail
at one member and succeed at another one; the comments name the reason why each decision is safe in this case, too.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpu_client.elastic.rounds.member_status import MemberStatus

MIN_GRACE_S = 1.0
MAX_GRACE_S = 30.0
GRACE_DEVIATIONS = 4.0
MAX_HURRY_S = 30.0
MAX_LEAVE_HURRY_S = 5.0
"""A leaving member has a grace of 30 s or less for the whole round."""


@dataclass(frozen=True)
class CatchUp:
    """Bring members that lack the state of `reference` to this state; the other members wait."""

    reference: str


@dataclass(frozen=True)
class Reduce:
    """Reduce the deltas of `weights` for all buckets but the `kept` ones. members: members whose averages count."""

    round: int
    weights: Mapping[str, int]
    members: tuple[str, ...]
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class Conclude:
    """Compare hashes and commit, because all `members` hold all averages of the round."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Abandon:
    """Drop the averages of an uncommitted round; the deltas stay."""


@dataclass(frozen=True)
class Dismiss:
    """Begin anew from the outer state, without a round, because all members have refused their deltas."""


@dataclass(frozen=True)
class Reform:
    """Leave the group, and open the group of a newer epoch."""

    epoch: int


@dataclass(frozen=True)
class Hurry:
    """Ask the members that are not ready for the delta that they have."""


@dataclass(frozen=True)
class Wait:
    """Exchange statuses again after a pause."""


@dataclass(frozen=True)
class GiveUp:
    """End, because no member holds a complete outer state: all of them were fetching from members that are lost."""


Decision = GiveUp | CatchUp | Reduce | Conclude | Abandon | Dismiss | Reform | Hurry | Wait


def choose_reference(statuses: Sequence[MemberStatus]) -> MemberStatus:
    """Return the member whose outer state is the group's state.

    A member that was in step in a newer epoch wins against joiners of any round: a node that returns from an exclusion
    may bear rounds which the world has never committed.
    """
    return max(enumerate(statuses), key=lambda one: (one[1].synced_epoch, one[1].complete, one[1].round, -one[0]))[1]


def decide(statuses: Sequence[MemberStatus], epoch: int) -> Decision:
    """Return the next action of all members of `epoch`; `statuses` are in the order of ranks."""
    if not any(one.complete for one in statuses):
        return GiveUp()
    reference = choose_reference(statuses)
    if any(one.state != reference.state or not one.complete for one in statuses):
        return CatchUp(reference.node)
    unfinished = decide_unfinished(statuses)
    if unfinished is not None:
        return unfinished
    newest = max(one.next_epoch for one in statuses)
    if newest > epoch:
        return Reform(newest)
    return decide_begin(statuses)


def decide_unfinished(statuses: Sequence[MemberStatus]) -> Decision | None:
    """Decide about a round whose reduce began in an earlier epoch; None without such a round.

    A member commits only after all members of its epoch that took part have announced all averages. Therefore:
    if all participants hold all averages, one of them, or a lost one, may have committed, and the round is concluded;
    if any participant lacks an average, no member has committed and none can, so the round may change.
    """
    number = statuses[0].round + 1
    begun = {one.node: one.attempt for one in statuses if one.attempt is not None and one.attempt.round == number}
    if not begun:
        return None
    newest = max(begun.values(), key=lambda attempt: attempt.epoch)
    involved = [one.node for one in statuses if one.node in newest.members]
    held = [begun[node].tags for node in involved if node in begun]
    if len(held) < len(involved):
        return Abandon()
    # Equal tags alone mean equal bytes: a bucket that was reduced again by some members only has two averages.
    kept = tuple(place for place, tags in enumerate(zip(*held, strict=True)) if tags[0] and len(set(tags)) == 1)
    if len(kept) == len(newest.tags):
        return Conclude(tuple(involved))
    weights = {node: tokens for node, tokens in newest.weights.items() if node in involved}
    if not sum(weights.values()):
        return Abandon()
    return Reduce(number, weights, tuple(involved), kept)


def decide_begin(statuses: Sequence[MemberStatus]) -> Decision:
    """Decide whether a round begins, and with which members' deltas.

    A round begins when all members are ready, have left, or have no data. Once more than half of the members have been
    ready for the grace period, the others are asked to hurry, and after the duration of a few inner steps the round
    begins without their deltas. A ready member that leaves has them asked at once, and for less time.
    """
    members = tuple(one.node for one in statuses)
    weights = {one.node: one.weight for one in statuses if one.ready and one.weight}
    begin = Reduce(statuses[0].round + 1, weights, members) if weights else Dismiss()
    ready = sorted((one.ready_for_s for one in statuses if one.ready), reverse=True)
    staying = [one for one in statuses if one.ready or not (one.leaving or one.idle)]
    late = [one for one in staying if not one.ready]
    if not late:
        return begin if staying else Wait()
    urgent = [one.leaving_for_s for one in statuses if one.leaving and one.ready]
    if urgent:
        grace_s, waited_s, limit_s = 0.0, max(urgent), MAX_LEAVE_HURRY_S
    elif len(ready) > len(staying) // 2:
        grace_s, waited_s = max(one.grace_s for one in statuses), ready[len(staying) // 2]
        limit_s = MAX_HURRY_S
    else:
        return Wait()
    hurry_s = min(limit_s, 1.0 + 2 * max(one.step_s for one in late))
    if weights and waited_s >= grace_s + hurry_s:
        return begin
    return Hurry() if waited_s >= grace_s else Wait()


def normalize_weights(weights: Mapping[str, int], members: Sequence[str]) -> list[float]:
    """Return the share of each member by rank; the shares sum to 1."""
    total = sum(weights.values())
    return [weights.get(node, 0) / total for node in members]


def compute_grace_s(lags_s: Sequence[float]) -> float:
    """Return the patience with late members: median + 4 median deviations of the newest lags, within bounds."""
    if not lags_s:
        return MAX_GRACE_S
    median = statistics.median(lags_s)
    deviation = statistics.median(abs(one - median) for one in lags_s)
    return min(MAX_GRACE_S, max(MIN_GRACE_S, median + GRACE_DEVIATIONS * deviation))


def choose_repairs(hashes: Mapping[str, Sequence[int]]) -> dict[int, str]:
    """Return, for each bucket whose hashes differ, the member whose bytes all members take.

    The most frequent hash wins; among equally frequent hashes the one of the lowest rank. hashes: by member, in the
    order of ranks.
    """
    repairs = {}
    for bucket, column in enumerate(zip(*hashes.values(), strict=True)):
        if len(set(column)) > 1:
            winner = Counter(column).most_common(1)[0][0]
            repairs[bucket] = list(hashes)[column.index(winner)]
    return repairs
