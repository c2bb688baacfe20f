"""Pieces of tensors written by any mesh are readable by any other, in one process that plays all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpu_client.training.checkpoint import safetensors_file, sharding, state_files
from gpu_client.training.checkpoint.safetensors_file import FileContents
from gpu_client.training.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointWriteError

Split = tuple[tuple[int, ...], tuple[Any, ...]]
"""Mesh and placements."""

SPLITS: list[Split] = [
    ((1,), (Shard(0),)),
    ((2,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((8,), (Shard(0),)),  # more ranks than rows: some have nothing
    ((2, 3), (Replicate(), Shard(0))),  # hybrid sharding: replicas of every piece
    ((2, 2), (Shard(0), Shard(1))),
]

whole = torch.arange(35, dtype=torch.float32).reshape(5, 7)


@pytest.fixture
def be_rank() -> Iterator[Callable[[int, int], None]]:
    """Makes this process one of several, as far as torch.distributed knows."""

    def become(rank: int, size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def piece(mesh: tuple[int, ...], placements: tuple[Any, ...]) -> DTensor:
    """Return this rank's piece of `whole`."""
    device_mesh = init_device_mesh("cpu", mesh)
    shape, offset = compute_local_shape_and_global_offset(whole.shape, device_mesh, placements)
    local = whole[tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))]
    return DTensor.from_local(
        local.contiguous(), device_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def size_of(split: Split) -> int:
    return int(torch.tensor(split[0]).prod())


class Holder:
    """A state of one sharded tensor, and one that every rank has."""

    def __init__(self, weight: Any) -> None:
        self.state = {"weight": weight, "count": torch.tensor(3)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def write_all(directory: Path, split: Split, be_rank: Callable[[int, int], None]) -> None:
    for rank in reversed(range(size_of(split))):
        be_rank(rank, size_of(split))
        collected = state_files.collect({"model": Holder(piece(*split))}, rank=rank, size=size_of(split))
        assert collected.sharded and set(collected.structures) == ({"model"} if rank == 0 else set())
        state_files.save_states(directory, collected, [] if rank == 0 else None)


@pytest.mark.parametrize("wrote", SPLITS, ids=str)
def test_any_mesh_reads_what_another_wrote(tmp_path: Path, be_rank: Callable[[int, int], None], wrote: Split) -> None:
    write_all(tmp_path, wrote, be_rank)
    for reads in SPLITS:
        for rank in range(size_of(reads)):
            be_rank(rank, size_of(reads))
            template = piece(*reads)
            holder = Holder(template)
            state_files.load_states(tmp_path, {"model": "tensors"}, {"model": holder})
            found = holder.state["weight"]
            assert isinstance(found, DTensor) and found.placements == template.placements
            assert found.shape == whole.shape and holder.state["count"] == 3
            assert torch.equal(found.to_local(), template.to_local())
    dist.destroy_process_group()
    plain = Holder(torch.zeros(5, 7))
    state_files.load_states(tmp_path, {"model": "tensors"}, {"model": plain})
    assert torch.equal(plain.state["weight"], whole)


def test_any_mesh_takes_its_piece_of_a_tensor_that_was_stored_whole(be_rank: Callable[[int, int], None]) -> None:
    for split in SPLITS:
        for rank in range(size_of(split)):
            be_rank(rank, size_of(split))
            template = piece(*split)
            found = sharding.cut("weight", whole, template)
            assert isinstance(found, DTensor) and found.placements == template.placements
            assert torch.equal(found.to_local(), template.to_local())
            assert sharding.cut("weight", whole, torch.zeros(5, 7)) is whole


def test_pieces_that_are_lost_are_damage(tmp_path: Path, be_rank: Callable[[int, int], None]) -> None:
    write_all(tmp_path, ((2,), (Shard(0),)), be_rank)
    dist.destroy_process_group()
    last = tmp_path / "model.rank1of2.safetensors"
    content = last.read_bytes()
    last.unlink()
    with pytest.raises(CheckpointDamagedError, match="not all processes' pieces of 'model'"):
        state_files.load_states(tmp_path, {"model": "tensors"}, {"model": Holder(torch.zeros(5, 7))})
    last.write_bytes(content)
    shifted = FileContents({"weight": torch.zeros(1, 7)}, {"offsets": json.dumps({"weight": [3, 0]})})
    safetensors_file.write(last, shifted)
    with pytest.raises(CheckpointDamagedError, match="7 elements are missing"):
        state_files.load_states(tmp_path, {"model": "tensors"}, {"model": Holder(torch.zeros(5, 7))})


def test_what_no_box_describes_is_refused(be_rank: Callable[[int, int], None]) -> None:
    be_rank(0, 2)
    mesh = init_device_mesh("cpu", (2,))
    summed = DTensor.from_local(whole, mesh, [Partial()], run_check=False)
    with pytest.raises(CheckpointWriteError, match=r"model\.weight is placed as Partial.*accelerator"):
        state_files.collect({"model": Holder(summed)}, rank=0, size=2)
    odd = DTensor.from_local(whole.to(torch.complex128), mesh, [Shard(0)], run_check=False)
    with pytest.raises(CheckpointWriteError, match=r"model\.weight is sharded and of type torch\.complex128"):
        state_files.collect({"model": Holder(odd)}, rank=0, size=2)


def test_an_optimizers_state_is_split_as_its_parameters(be_rank: Callable[[int, int], None]) -> None:
    be_rank(0, 2)
    parameter = nn.Parameter(piece((2,), (Shard(0),)))  # type: ignore[arg-type]
    plain = nn.Parameter(torch.zeros(5, 7))
    optimizer = torch.optim.AdamW([plain, parameter])
    live = optimizer.state_dict()
    assert sharding.find_counterpart(optimizer, live, ("state", 1, "exp_avg"), [5, 7]) is parameter
    assert sharding.find_counterpart(optimizer, live, ("state", 0, "exp_avg"), [5, 7]) is plain
    for path in (("state", 1, "exp_avg"), ("state", 2, "exp_avg"), ("other",)):
        with pytest.raises(CheckpointMismatchError, match=r"no live tensor determines.*fully_shard"):
            sharding.find_counterpart(optimizer, live, path, [9, 9])
    be_rank(0, 1)
    assert sharding.find_counterpart(optimizer, live, ("other",), [9, 9]) is None, "one process takes all of it"
