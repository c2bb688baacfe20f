"""Rounded deltas: what one round rounds away, a later round contributes."""

from __future__ import annotations

import copy

import pytest
import torch

from gpu_client.elastic.codecs import CODECS
from gpu_client.elastic.parameters import TrainedParameters
from gpu_client.elastic.rounds.local_progress import LocalProgress
from gpu_client.training.byte_transformer import ByteTransformer, TextSettings, compute_loss, read_text
from tests.kits.elastic.threads import ThreadedCluster, run_together

INT4 = CODECS["int4"]
VALUES = 128


def contribute(
    progress: LocalProgress, local: torch.nn.Parameter, delta: torch.Tensor, *, is_exact: bool
) -> torch.Tensor:
    """Hand over a delta, and return the values that the committed round contains."""
    parameters = TrainedParameters([("local", local)])
    with torch.no_grad():
        local -= delta
    assert progress.hand_over(parameters, 0.0) is not None
    sent = progress.prepare(slice(0, VALUES), is_exact=is_exact).clone()
    with progress.changed:
        progress.move(slice(0, VALUES), lambda: progress.outer.sub_(sent))
        progress.include(slice(0, VALUES))
        progress.finish_round(included=1)
    progress.proceed(parameters)
    assert torch.equal(local.detach(), progress.outer)
    return sent


def test_the_sum_of_all_averages_follows_the_sum_of_all_deltas() -> None:
    local = torch.nn.Parameter(torch.zeros(VALUES))
    progress = LocalProgress(torch.zeros(VALUES), INT4)
    progress.is_started, progress.is_apart = True, False
    delta = torch.full((VALUES,), 0.01)
    delta[::64] = 1.0
    sent = [contribute(progress, local, delta, is_exact=False) for _ in range(40)]
    assert not bool(sent[0][1:64].any()), "0.01 beside 1 is 0 in 4 bits"
    # The error stays below one quantum; without feedback it would be 40 times 0.01.
    assert float((sum(sent) - 40 * delta).abs().max()) < 0.16
    torch.testing.assert_close(40 * delta - sum(sent), progress.residual, atol=1e-4, rtol=0)
    contribute(progress, local, delta, is_exact=True)
    assert float(progress.residual.abs().max()) < 1e-6, "a round of one member owes nothing"


def test_rounded_values_pass_through_the_codec_unchanged() -> None:
    generator = torch.Generator().manual_seed(1)
    progress = LocalProgress(torch.zeros(5000), INT4)
    progress.delta.copy_(torch.randn(5000, generator=generator) * torch.logspace(-20, 5, 5000))
    rounded = progress.prepare(slice(0, 5000), is_exact=False)
    data, again = torch.empty(INT4.encoded_bytes(5000), dtype=torch.uint8), torch.empty(5000)
    INT4.encode(rounded, data)
    INT4.decode(data, again)
    assert torch.equal(again, rounded)


def test_the_residual_is_saved_and_a_node_that_adopts_a_newer_state_drops_it() -> None:
    with ThreadedCluster() as one, ThreadedCluster() as two:
        first, second = one.add(inner_steps=5, codec="int4"), two.add(inner_steps=5, codec="int4")
        first.train(5)
        first.outer._progress.residual.fill_(0.5)
        saved = copy.deepcopy(first.outer.state_dict())
        second.outer.load_state_dict(saved)
        assert torch.equal(second.outer._progress.residual, saved["residual"])
        second.outer._progress.begin_adoption()
        assert not bool(second.outer._progress.residual.any())
        second.outer._progress.notify(is_adopting=False)


SETTINGS = TextSettings(context=32, width=32, layers=1, heads=2)


def train_two_nodes(codec: str) -> float:
    """Train a tiny transformer on Python's own source for 6 rounds, and return the held-out loss."""
    text = read_text()[:200_000]
    window = torch.arange(SETTINGS.context + 1)
    with ThreadedCluster(2) as cluster:
        cluster.network.codec = CODECS[codec]
        nodes = []
        for _ in range(2):
            torch.manual_seed(3)
            nodes.append(cluster.add(model=ByteTransformer(SETTINGS), learning_rate=3e-3, inner_steps=10, codec=codec))

        def train(seat: int) -> None:
            node, chance = nodes[seat], torch.Generator().manual_seed(seat)
            node.outer.start()
            for _ in range(60):
                starts = torch.randint(150_000, (8, 1), generator=chance)
                loss = compute_loss(node.model, text[starts + window])
                node.optimizer.zero_grad()
                loss.backward()
                node.optimizer.step()
                node.outer.step(8)

        run_together(lambda: train(0), lambda: train(1), timeout_s=120)
        held_out = text[160_000 : 160_000 + 1000 * len(window)].view(-1, len(window))
        with torch.no_grad():
            return float(compute_loss(nodes[0].model, held_out))


def test_quantized_averages_train_as_well_as_exact_averages() -> None:
    exact = train_two_nodes("fp32")
    assert exact < 3.5, "the model has learned nothing"
    assert train_two_nodes("int8") == pytest.approx(exact, abs=0.01)
    assert train_two_nodes("int4") == pytest.approx(exact, abs=0.02)
