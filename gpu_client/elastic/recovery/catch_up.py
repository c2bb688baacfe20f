"""Decide which parts of peers' outer states a node reads next to reach its peers' state. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpu_client.elastic.engines.engine import Peer
from gpu_client.elastic.recovery.state_transfer import PartRequest, StateDescription


def choose_target(descriptions: Mapping[Peer, StateDescription]) -> tuple[StateDescription, list[Peer]]:
    """Return the newest described state, and the peers that hold exactly this state.

    Reads through the object store cost money: relayed peers count only if all are relayed.
    """
    newest = max(descriptions.values(), key=lambda one: one.round)
    holders = {
        peer: one for peer, one in descriptions.items() if (one.round, one.hashes) == (newest.round, newest.hashes)
    }
    return newest, [peer for peer, one in holders.items() if not one.relayed] or list(holders)


def plan_parts(
    target: StateDescription,
    peers: Sequence[Peer],
    differing: Sequence[int],
    rounds: Sequence[int],
    limit: int,
    *,
    fragments: int = 1,
) -> list[tuple[Peer, PartRequest]]:
    """Return at most `limit` reads, spread over the peers.

    differing: buckets whose values differ from the target. rounds: by bucket, the round of the node's present values.
    fragments: rounds in which each bucket takes part once. A bucket whose missed averages the peers keep needs these
    only: half of the bytes for one round. These buckets come first, because peers keep averages of few rounds.
    """
    replays, states = [], []
    for bucket in differing:
        begin = rounds[bucket] + 1
        missed = range(begin + (bucket + 1 - begin) % fragments, target.round + 1, fragments)
        # After a long training, a new node misses more rounds than a set can hold.
        if 0 < len(missed) <= len(target.averages) and set(missed) <= set(target.averages):
            replays.append(PartRequest("average", missed[0], bucket))
        else:
            states.append(PartRequest("state", target.round, bucket))
    return [(peers[place % len(peers)], part) for place, part in enumerate([*replays, *states][:limit])]
