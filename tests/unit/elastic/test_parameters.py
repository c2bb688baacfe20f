"""Trained parameters travel to one flat tensor and back, and are described for the comparison of nodes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpu_client.elastic.errors import ElasticSetupError
from gpu_client.elastic.parameters import (
    MAX_BUCKETS,
    TrainedParameters,
    describe_program,
    find_sharded_modules,
    split_buckets,
    split_moves,
)


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3, bias=False), nn.LayerNorm(3))
    layers[1].weight.data = layers[1].weight.data.to(torch.bfloat16)
    layers[2].weight.requires_grad_(False)
    layers.tied = layers[0]
    return layers


def test_only_trained_parameters_are_read_written_and_shifted_each_once() -> None:
    layers = model()
    parameters = TrainedParameters(layers.named_parameters())
    assert parameters.values == 6 + 2 + 6 + 3
    flat = torch.empty(parameters.values)
    parameters.read(flat)
    assert torch.equal(flat[:6].view(2, 3), layers[0].weight)
    parameters.write(torch.arange(17.0))
    assert layers[2].bias.tolist() == [14, 15, 16]
    assert layers[2].weight.tolist() == [1, 1, 1]
    parameters.add(torch.full((17,), 0.5))
    parameters.read(flat)
    assert flat.tolist() == [value + 0.5 for value in range(17)]
    assert layers[1].weight.dtype == torch.bfloat16


def test_the_program_names_names_dtypes_and_shapes() -> None:
    def program(layers: nn.Module) -> dict[str, object]:
        parameters = TrainedParameters(layers.named_parameters())
        described = describe_program(parameters, engine="wire", codec="int8", settings={"outer_lr": 0.7})
        return described.model_dump()

    first = program(model())
    assert first == program(model())
    assert first["parameters"] == 17
    assert first["settings"] == {"outer_lr": 0.7}
    assert [(one["name"], one["dtype"], one["shape"]) for one in first["tensors"]] == [  # type: ignore[attr-defined]
        ("0.weight", "float32", [2, 3]),
        ("0.bias", "float32", [2]),
        ("1.weight", "bfloat16", [3, 2]),
        ("2.bias", "float32", [3]),
    ]
    assert program(model().double())["model_sha256"] != first["model_sha256"]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([], "no trained parameters"),
        ([("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))], "'phase' has dtype torch.complex64"),
    ],
)
def test_unusable_parameters_are_refused(named: list[tuple[str, torch.Tensor]], message: str) -> None:
    with pytest.raises(ElasticSetupError, match=message):
        TrainedParameters(named)


@pytest.mark.parametrize(("values", "bucket", "count"), [(10, 4, 3), (8, 4, 2), (1, 4, 1), (10**7, 1, MAX_BUCKETS)])
def test_buckets_cover_each_position_once(values: int, bucket: int, count: int) -> None:
    buckets = split_buckets(values, bucket)
    assert [one.start for one in buckets] == [0, *(one.stop for one in buckets[:-1])]
    assert buckets[-1].stop == values
    assert len(buckets) <= count


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((2,), (Shard(0),)), ((3,), (Shard(1),)), ((8,), (Shard(0),)), ((2, 2), (Replicate(), Shard(0)))],
)
def test_processes_read_each_value_of_a_sharded_model_once(mesh: tuple[int, ...], placements: tuple[Any, ...]) -> None:
    whole, bias = torch.arange(35.0).reshape(5, 7), torch.tensor([35.0, 36.0])
    flat, ranks = torch.full((37,), -1.0), math.prod(mesh)
    read_values = 0
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        _clear_sharding_prop_cache()  # The cache has the meshes of the rank that this process has played before.
        try:
            weight = distribute_tensor(whole.clone(), init_device_mesh("cpu", mesh), placements, src_data_rank=None)
            named = [("weight", nn.Parameter(weight)), ("bias", nn.Parameter(bias.clone()))]
            parameters = TrainedParameters(named, rank)
            with pytest.raises(ElasticSetupError, match="of the model's 37 parameters"):
                parameters.require_whole()
            local = weight.to_local().clone()
            parameters.read(flat)
            read_values += parameters.read_values
            parameters.write(torch.arange(37.0) * 3, torch.arange(37.0))
            parameters.add(torch.arange(37.0))
            assert torch.equal(weight.to_local(), 3 * local)
            assert torch.equal(named[1][1], 3 * bias)
            chosen = torch.arange(37) // 4 % 3 == 1
            stripes = parameters.stripe(split_buckets(37, 4), 3)[1]
            assert (stripes is None) == (not parameters.has_stripes) == (placements == (Shard(1),) and ranks > 1)
            parameters.write(torch.where(chosen, -1.0, torch.arange(37.0) * 3), None, stripes)
            parameters.add(torch.where(chosen, 1.0, 0.0), stripes)
            striped = torch.full((37,), -1.0)
            parameters.read(striped, stripes)
            written = torch.where(chosen, 0.0, torch.arange(37.0) * 3)
            own = distribute_tensor(written[:35].reshape(5, 7), weight.device_mesh, placements, src_data_rank=None)
            assert torch.equal(weight.to_local(), own.to_local())
            assert torch.equal(named[1][1], written[35:])
            assert not bool((striped[~chosen] >= 0).any()) or stripes is None, "other positions are not read"
        finally:
            dist.destroy_process_group()
    assert torch.equal(flat, torch.arange(37.0))
    assert read_values == 37


def test_placements_that_are_no_boxes_are_refused() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        summed = DTensor.from_local(torch.zeros(2), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
        with pytest.raises(ElasticSetupError, match=r"'weight' is placed as Partial.*fully_shard"):
            TrainedParameters([("weight", nn.Parameter(summed))])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (7, 3), (2, 9), (3, 2, 2)])
def test_moves_between_devices_take_each_value_once_in_bounded_parts(shape: tuple[int, ...]) -> None:
    values = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    parts = [one for one, _ in split_moves(values, torch.empty(shape, device="meta"), size=6)]
    assert torch.equal(torch.cat([one.flatten() for one in parts]), values.flatten())
    assert all(one.numel() <= 6 or len(one) == 1 for one in parts)
    assert len([*split_moves(values, values, size=1)]) == 1


def test_the_stripes_of_all_fragments_are_all_parameters_once() -> None:
    layers, values = model(), 17
    parameters = TrainedParameters(layers.named_parameters())
    whole, read = torch.empty(values), torch.full((values,), math.nan)
    parameters.read(whole)
    stripes = parameters.stripe(split_buckets(values, 3), 2)
    places = [one for found in stripes if found is not None for one in found.cut(0, values)]
    assert sorted(x for one in places for x in range(one.start, one.stop)) == [*range(values)]
    parameters.read(read, stripes[1])
    assert read.isnan().tolist() == [place // 3 % 2 == 0 for place in range(values)]
    parameters.read(read, stripes[0])
    assert torch.equal(read, whole)
    assert parameters.stripe(split_buckets(values, 3), 1) == [None]


def test_a_parameter_in_another_order_of_memory_is_copied_whole() -> None:
    kernel = nn.Parameter(torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last))
    parameters = TrainedParameters([("kernel", kernel)])
    assert parameters.stripe(split_buckets(24, 4), 3) == [None] * 3


class Sharded(nn.Linear):
    """Module as `fully_shard` leaves a module; counts the calls that free whole parameters."""

    reshards = 0

    def reshard(self) -> None:
        self.reshards += 1


def test_moved_parameters_are_those_of_the_next_forward_also_after_an_evaluation() -> None:
    layers = nn.Sequential(Sharded(2, 2), nn.Linear(2, 2))
    parameters = TrainedParameters(layers.named_parameters(), sharded=find_sharded_modules(layers))
    flat = torch.zeros(parameters.values)
    parameters.read(flat)
    assert layers[0].reshards == 0
    parameters.write(flat)
    parameters.add(flat)
    assert layers[0].reshards == 2
