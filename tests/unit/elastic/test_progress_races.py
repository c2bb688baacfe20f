"""The progress of a node counts once, in whatever order the main thread and the round thread touch it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_client.elastic.errors import StateLostError
from gpu_client.elastic.parameters import Stripes, TrainedParameters, split_buckets
from gpu_client.elastic.rounds.local_progress import Contribution, LocalProgress
from tests.kits.elastic.threads import ThreadedCluster, ThreadedNode, run_together
from tests.kits.waiting import soon

FOREVER = 10**6
VALUES, BUCKET, FRAGMENTS = 8, 2, 2
BUCKETS = split_buckets(VALUES, BUCKET)


class RacingParameters(TrainedParameters):
    """Parameters of 3, during whose next read `meanwhile` happens."""

    def __init__(self) -> None:
        self.local = torch.nn.Parameter(torch.full((VALUES,), 3.0))
        super().__init__([("local", self.local)])
        self.meanwhile: Callable[[], object] = lambda: None

    def read(self, flat: torch.Tensor, stripes: Stripes | None = None) -> None:
        super().read(flat, stripes)
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()


def begin(fragments: int = 1) -> tuple[RacingParameters, LocalProgress]:
    """Return local parameters of 3 beside outer parameters of 0, and 4 tokens."""
    parameters = RacingParameters()
    progress = LocalProgress(torch.zeros(VALUES), fragments=parameters.stripe(BUCKETS, fragments))
    progress.is_started, progress.is_apart, progress.tokens = True, False, 4
    progress.hold(parameters)
    progress.proceed(parameters)
    return parameters, progress


def move(progress: LocalProgress, *buckets: int, by: float = 1.0) -> None:
    for bucket in buckets:
        part = BUCKETS[bucket]
        with progress.changed:
            progress.move(part, lambda part=part: progress.outer[part].add_(by))  # type: ignore[misc]


def end_adoption(progress: LocalProgress) -> None:
    with progress.changed:
        progress.finish_round(included=0)
        progress.notify(is_adopting=False)


@pytest.mark.parametrize("fragments", [1, FRAGMENTS])
@pytest.mark.parametrize("ends", ["during the copy", "after the copy"])
def test_an_adoption_that_begins_while_the_delta_is_copied_keeps_the_progress(fragments: int, ends: str) -> None:
    parameters, progress = begin(fragments)

    def adopt() -> None:
        progress.begin_adoption()
        move(progress, 0, 1)
        if ends == "during the copy":
            move(progress, 2, 3)
            end_adoption(progress)

    parameters.meanwhile = adopt
    assert isinstance(progress.hand_over(parameters, 0.0), Contribution)
    if ends == "after the copy":
        move(progress, 2, 3)
        end_adoption(progress)
        assert progress.contribution is None, "the delta belongs to a round that the adoption has passed over"
    progress.proceed(parameters)
    assert parameters.local.tolist() == [4.0] * VALUES
    assert progress.pending_tokens == [4] * fragments


def test_a_round_thread_that_ends_while_the_delta_is_copied_costs_no_progress() -> None:
    parameters, progress = begin()
    parameters.meanwhile = lambda: progress.notify(is_apart=True, is_ended=True)
    progress.hand_over(parameters, 0.0)
    progress.proceed(parameters)
    progress.settle(parameters)
    assert parameters.local.tolist() == [3.0] * VALUES
    assert progress.pending_tokens == [4]
    assert progress.hand_over(parameters, 0.0) is None


def test_a_node_whose_thread_ends_in_an_adoption_keeps_parameters_of_one_round() -> None:
    parameters, progress = begin()
    progress.hand_over(parameters, 0.0)
    move(progress, 0)
    progress.begin_adoption()
    move(progress, 1, by=9.0)
    progress.notify(is_ended=True)
    progress.proceed(parameters)
    assert parameters.local.tolist() == [3.0] * VALUES


def test_steps_beside_a_refused_delta_count_in_the_next_delta() -> None:
    parameters, progress = begin()
    with torch.no_grad():
        parameters.local[0] = torch.inf
    refused = progress.hand_over(parameters, 0.0)
    assert refused is not None and refused.is_refused
    progress.proceed(parameters)
    with torch.no_grad():
        parameters.local += 1
    progress.tokens += 2
    progress.finish_round(included=0)
    contribution = progress.hand_over(parameters, 0.0)
    assert contribution is not None and progress.weigh(contribution, 0) == 2
    assert progress.delta.tolist() == [-1.0] * VALUES


def test_a_node_that_leaves_hands_over_again_what_a_round_has_passed_over() -> None:
    with ThreadedCluster() as cluster:
        node = cluster.add(inner_steps=FOREVER)
        node.train(3)
        progress = node.outer._progress
        hand_over = progress.hand_over

        def pass_over(*arguments: Any) -> Contribution | None:
            """Hand over in the last moment of a round that has begun without this node."""
            progress.hand_over = hand_over  # type: ignore[method-assign]
            with progress.changed:
                found = hand_over(*arguments)
                progress.finish_round(included=0)
            return found

        progress.hand_over = pass_over  # type: ignore[method-assign]
        node.outer.leave()
        assert (node.outer.round, node.outer.tokens) == (1, 0)


def stop_rounds(cluster: ThreadedCluster, **options: Any) -> tuple[ThreadedNode, threading.Event]:
    """Return one of two nodes whose threads wait in an exchange until the event."""
    nodes, released = [cluster.add(**options) for _ in range(2)], threading.Event()
    run_together(*[one.outer.start for one in nodes])
    for one in nodes:
        one.engine.at_call = lambda _: released.wait(60)
    return nodes[0], released


def test_a_node_that_leaves_in_an_adoption_keeps_parameters_of_one_round() -> None:
    with ThreadedCluster(2) as cluster:
        node, released = stop_rounds(cluster, inner_steps=FOREVER, overlap=True)
        node.step()
        before = node.values()
        node.outer._progress.begin_adoption()
        replica = node.outer._replica
        replica.adopt(0, torch.ones(2 * replica.size_of(0)), 7)
        released.set()
        node.outer.leave(timeout_s=0)
        assert all(torch.equal(one, other) for one, other in zip(before, node.values(), strict=True))
        with pytest.raises(StateLostError):
            node.outer.state_dict()


def test_a_node_that_lacks_steps_waits_for_the_end_of_an_adoption() -> None:
    with ThreadedCluster(2) as cluster:
        node, released = stop_rounds(cluster, inner_steps=4, fragments=2)
        progress = node.outer._progress
        progress.begin_adoption()
        node.outer.limit_steps(1, 5)
        training = threading.Thread(target=node.step, daemon=True)
        training.start()
        training.join(0.3)
        assert training.is_alive(), "the steps would be used up before the last round"
        node.outer.limit_steps(FOREVER, 5)
        end_adoption(progress)
        training.join(60)
        assert not training.is_alive()
        released.set()


def test_a_node_that_lacks_steps_does_not_wait_for_rounds_of_a_world_that_has_ended() -> None:
    with ThreadedCluster() as cluster:
        node = cluster.add(inner_steps=FOREVER)
        node.outer.start()
        node.outer.limit_steps(1, 5)
        node.outer.close()
        training = threading.Thread(target=node.step, daemon=True)
        training.start()
        training.join(60)
        ended = not training.is_alive()
        node.outer.limit_steps(FOREVER, 0)
        assert ended


def test_a_state_between_hand_over_and_commit_resumes_with_the_progress() -> None:
    options = {"inner_steps": 4, "overlap": True, "codec": "int4"}
    with ThreadedCluster() as one, ThreadedCluster() as two:
        first, second = one.add(**options), two.add(**options)
        first.train(4)
        soon(lambda: first.outer.round == 1)
        states = first.model.state_dict(), first.outer.state_dict()
        assert states[1]["shift"].numel(), "the round has moved what the training takes at its next step"
        second.model.load_state_dict(states[0])
        second.outer.load_state_dict(states[1])
        second.outer.start()
        first.outer._progress.follow(first.outer._parameters)
        assert all(torch.equal(*pair) for pair in zip(first.values(), second.values(), strict=True))
        assert torch.equal(first.outer._progress.residual, second.outer._progress.residual)

        progress = first.outer._progress
        progress.notify(is_apart=False)
        with progress.changed:  # The round thread cannot offer the delta meanwhile.
            first.outer._progress.tokens += 5
            progress.hand_over(first.outer._parameters, 0.0)
            progress.proceed(first.outer._parameters)
            saved = first.outer.state_dict()
        assert saved["tokens"].tolist() == [5], "the delta that was handed over is in no round yet"
        assert saved["round"] == 1
