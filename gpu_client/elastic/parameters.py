"""Copy a model's trained parameters to and from one flat float32 tensor on the CPU, and describe the parameters."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from baton.contract.elastic.world import NodeProgram, TensorShape
from gpu_client.elastic.errors import ElasticSetupError

BUCKET_VALUES = 1 << 20
"""4 MiB of float32 in each bucket."""
MAX_BUCKETS = 4096
"""Limit of buckets: members exchange one bit and, after a difference, one hash for each bucket."""
MAX_DESCRIBED = 256
MOVED_VALUES = 1 << 24
"""Values that move between CPU and GPU at a time, as float32: 64 MiB of temporary memory."""


def split_buckets(values: int, bucket_values: int = BUCKET_VALUES) -> list[slice]:
    """Split the positions 0..values into consecutive buckets; larger buckets if there were more than MAX_BUCKETS."""
    size = max(bucket_values, -(-values // MAX_BUCKETS))
    return [slice(start, min(start + size, values)) for start in range(0, values, size)]


class Stripes(NamedTuple):
    """Positions of a flat tensor: `length` positions from `begin` on, and from each multiple of `period` later."""

    begin: int
    length: int
    period: int

    def cut(self, start: int, end: int) -> Iterator[slice]:
        """Yield the stripes between two positions."""
        first = max(0, (start - self.begin) // self.period)
        for begin in range(self.begin + first * self.period, end, self.period):
            found = slice(max(begin, start), min(begin + self.length, end))
            if found.start < found.stop:
                yield found


@dataclass(frozen=True)
class ParameterPart:
    """Part of a parameter that this process holds. place: the whole parameter in a flat tensor; box: the part therein.

    is_reader: no other process with the same values copies the part into a flat tensor.
    """

    tensor: torch.Tensor
    place: slice
    box: tuple[slice, ...]
    is_reader: bool

    @property
    def values(self) -> torch.Tensor:
        """Return the values without gradient history; for a DTensor, the values of this process."""
        return read_local(self.tensor.detach())

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the part's place in a flat tensor of all parameters."""
        return flat[self.place].view(self.tensor.shape)[self.box]

    @property
    def begin(self) -> int | None:
        """Return the first position of the part in a flat tensor; None if the part is not one range of positions."""
        inner = list(zip(self.box, self.tensor.shape, strict=False))[1:]
        if not self.values.is_contiguous() or any(one.stop - one.start != length for one, length in inner):
            return None
        first_row = self.box[0].start if self.box else 0
        return int(self.place.start + first_row * math.prod(self.tensor.shape[1:]))

    def cut(self, stripes: Stripes) -> Iterator[ParameterPart]:
        """Yield the stripes of a part that is one range of positions."""
        values, begin = self.values.view(-1), self.begin
        assert begin is not None
        for place in stripes.cut(begin, begin + len(values)):
            yield ParameterPart(values[place.start - begin : place.stop - begin], place, (), self.is_reader)


class TrainedParameters:
    """Trained parameters of a model in a fixed order, each once.

    A flat tensor has the whole parameters, of which a process may hold parts (FSDP2); `rank` is this process among the
    holders. sharded: modules that `fully_shard` has wrapped. Raises ElasticSetupError for a model without trained
    parameters, and for parameters that no flat copy can hold.
    """

    def __init__(
        self, named: Iterable[tuple[str, torch.Tensor]], rank: int = 0, sharded: Iterable[torch.nn.Module] = ()
    ) -> None:
        self._sharded: list[Any] = list(sharded)
        self._named = [(name, tensor) for name, tensor in named if tensor.requires_grad]
        self.values = sum(tensor.numel() for _, tensor in self._named)
        if not self.values:
            raise ElasticSetupError("the model has no trained parameters", "Pass a model with requires_grad parameters")
        self.parts: list[ParameterPart] = []
        end = 0
        for name, tensor in self._named:
            if not tensor.is_floating_point():
                raise ElasticSetupError(f"parameter {name!r} has dtype {tensor.dtype}", "Use floating point parameters")
            box, is_reader = _find_box(name, tensor) if _is_sharded(tensor) else ((), rank == 0)
            begin, end = end, end + tensor.numel()
            self.parts.append(ParameterPart(tensor, slice(begin, end), box, is_reader))
        self.read_values = sum(one.values.numel() for one in self.parts if one.is_reader)
        """Number of values that this process copies in `read`."""
        self.has_stripes = all(one.begin is not None for one in self.parts)
        """Every part can be cut."""

    def require_whole(self) -> None:
        """Raise ElasticSetupError if no holder reads some of the values."""
        if self.read_values != self.values:
            problem = f"this process holds {self.read_values} of the model's {self.values} parameters"
            raise ElasticSetupError(problem, "Shard the model over all processes of one machine")

    def allocate(self) -> torch.Tensor:
        """Return a flat tensor of zeros, which all holders of parts can access."""
        return torch.zeros(self.values)

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the whole parameters in a flat tensor, by name; they share the memory of `flat`."""
        places = (one.place for one in self.parts)
        return {name: flat[place].view(like.shape) for (name, like), place in zip(self._named, places, strict=True)}

    def stripe(self, buckets: Sequence[slice], fragments: int) -> list[Stripes | None]:
        """Return the positions of each fragment, which has every `fragments`-th bucket; None if parts cannot be cut."""
        length = buckets[0].stop
        found = [Stripes(one * length, length, fragments * length) for one in range(fragments)]
        return [*found] if fragments > 1 and self.has_stripes else [None] * fragments

    def choose(self, stripes: Stripes | None) -> Iterable[ParameterPart]:
        """Return all parts, or their stripes."""
        return self.parts if stripes is None else (part for one in self.parts for part in one.cut(stripes))

    def join(self, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the flat tensor of whole parameters by name. Raises ElasticSetupError for other names."""
        names = [name for name, _ in self._named]
        other = sorted({*names} ^ {*whole})
        if other:
            problem = f"parameter {other[0]!r} is in {'the model' if other[0] in names else 'the checkpoint'} alone"
            raise ElasticSetupError(problem, "Resume with the model of the checkpoint")
        return torch.cat([whole[name].reshape(-1) for name in names])

    def read(self, flat: torch.Tensor, stripes: Stripes | None = None) -> None:
        """Copy the parameters into `flat`. stripes: positions to copy, by default all."""
        for one in self.choose(stripes):
            if one.is_reader:
                for place, values in split_moves(one.view(flat), one.values):
                    # A GPU converts to float32 several times as fast as the CPU does.
                    place.copy_(values if values.device == place.device else values.to(place.dtype))

    def write(self, flat: torch.Tensor, less: torch.Tensor | None = None, stripes: Stripes | None = None) -> None:
        """Set the parameters to the values of `flat`, or of `flat - less`, rounded to their dtypes."""
        for one in self.choose(stripes):
            wanted = one.view(flat) if less is None else one.view(flat) - one.view(less)
            for values, place in split_moves(one.values, wanted):
                values.copy_(place.to(values.device))
        self._reshard()

    def add(self, flat: torch.Tensor, stripes: Stripes | None = None) -> None:
        """Add `flat` to the parameters."""
        for one in self.choose(stripes):
            for values, place in split_moves(one.values, one.view(flat)):
                values.add_(place.to(values.device))
        self._reshard()

    def _reshard(self) -> None:
        """Free whole parameters: after an evaluation, the next forward would take them in place of the moved parts."""
        for one in self._sharded:
            one.reshard()

    def forget_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the optimizer's states if any of them is not finite, because the states outlive the reset parameters."""
        if not has_finite_state(optimizer):
            optimizer.state.clear()

    def describe(self) -> list[TensorShape]:
        """Return name, dtype and shape of each parameter."""
        return [
            TensorShape(name=name[-256:], dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))
            for name, tensor in self._named
        ]


def split_moves(
    first: torch.Tensor, second: torch.Tensor, size: int = MOVED_VALUES
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield equal parts of two tensors of one shape, of about `size` values if the tensors are on two devices."""
    if first.device == second.device or first.numel() <= size:
        yield first, second
        return
    rows = max(1, size * len(first) // first.numel())
    yield from zip(first.split(rows), second.split(rows), strict=True)


def find_sharded_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules of a model that `fully_shard` has wrapped."""
    return [one for one in model.modules() if hasattr(one, "reshard")]


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def read_local(tensor: Any) -> torch.Tensor:
    """Return the tensor, or the part of a DTensor that this process holds; both share the memory of `tensor`."""
    local: torch.Tensor = tensor.to_local() if _is_sharded(tensor) else tensor
    return local


def _find_box(name: str, tensor: Any) -> tuple[tuple[slice, ...], bool]:
    """Return the box of this process in a DTensor, and True on the first of the processes that hold this box."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    odd = [one for one in tensor.placements if type(one) not in (Shard, Replicate)]
    if odd:
        raise ElasticSetupError(
            f"parameter {name!r} is placed as {type(odd[0]).__name__}",
            "Shard with fully_shard alone, over a mesh of one dimension, or of two with replicas in the first",
        )
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    coordinates = tensor.device_mesh.get_coordinate() or [1] * len(tensor.placements)
    replicas = [at for at, one in zip(coordinates, tensor.placements, strict=True) if isinstance(one, Replicate)]
    box = tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))
    return box, not any(replicas)


def has_finite_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return False if the optimizer's state in this process has NaN or infinity."""
    tensors = [one for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
    return all(bool(torch.isfinite(read_local(one)).all()) for one in tensors)


def describe_program(
    parameters: TrainedParameters,
    *,
    engine: str,
    codec: str,
    settings: Mapping[str, float | int | str | bool | None],
) -> NodeProgram:
    """Return the properties that all nodes of a world must share."""
    tensors = parameters.describe()
    described = json.dumps([[one.name, one.dtype, one.shape] for one in tensors])
    return NodeProgram(
        torch=torch.__version__.partition("+")[0],
        engine=engine,
        codec=codec,
        parameters=parameters.values,
        model_sha256=hashlib.sha256(described.encode()).hexdigest(),
        tensors=tensors[:MAX_DESCRIBED],
        settings=dict(settings),
    )
