"""Every kind of state is restored bit for bit, from disk and from shared memory, in equal files."""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from safetensors.torch import load_file
from torch import nn

from gpu_client.training.checkpoint import safetensors_file, state_files
from gpu_client.training.checkpoint.background_copy import copy_all
from gpu_client.training.checkpoint.safetensors_file import FileContents, FileLayout
from gpu_client.training.checkpoint.shared_memory import Arena
from gpu_client.training.checkpoint.state_tree import put_together, take_apart

Save = Callable[..., Path]


class Holder:
    """An object whose whole state is a given value."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def onto_disk(root: Path, **named: object) -> Path:
    directory = root / "disk"
    directory.mkdir()
    state_files.save_states(directory, state_files.collect(named), [])
    return directory


def into_memory(root: Path, **named: object) -> Path:
    arena = Arena(root)
    collected = state_files.collect(named)
    arena.begin()
    pairs = arena.allocate(collected.files)
    state_files.save_bundle(arena.directory, collected, [])
    copy_all(pairs)
    arena.finish(1, {}, collected.forms)
    return arena.directory


@pytest.fixture(params=[onto_disk, into_memory])
def save(request: pytest.FixtureRequest) -> Save:
    return request.param  # type: ignore[no-any-return]


def loaded(directory: Path, name: str = "odd") -> Any:
    holder = Holder()
    state_files.load_states(directory, {name: "tensors"}, {name: holder})
    return holder.state


def bits(value: Any) -> Any:
    """Return a value that equals another only if every bit and type of the originals are equal."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            value = value.coalesce()
            return "sparse", bits(value.indices()), bits(value.values()), tuple(value.shape)
        if value.is_quantized:
            return value.dtype, value.q_scale(), value.q_zero_point(), bits(value.int_repr())
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        flat = plain.as_strided((plain.numel(),), (1,))
        return value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return (
            type(value),
            [(key, bits(item)) for key, item in value.items()],
            bits(dict(vars(value))) if isinstance(value, OrderedDict) else None,
        )
    if isinstance(value, list | tuple):
        return type(value), [bits(item) for item in value]
    return type(value), repr(value)


# Types without any operation in torch are left out.
_BARE = re.compile(r"torch\.(u?int[1-7]|bits\w+|q\w+|float4\w+)")
DTYPES = {
    dtype
    for name in dir(torch)
    if isinstance(dtype := getattr(torch, name), torch.dtype) and not _BARE.fullmatch(str(dtype))
}


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_type_in_every_shape(tmp_path: Path, save: Save, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 256, (24 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        noise &= 1
    full = noise.view(dtype).view(4, 6)
    odd = {
        "full": full,
        "scalar": full[1, 2],
        "empty": full[:0],
        "one": full[0, 0].expand(1),
        "transposed": full.t(),
        "strided": full[::2, 1::3],
        "nested": {"list": [full[0].clone(), (full[1].clone(), 3)], 7: full.clone()},
    }
    assert bits(loaded(save(tmp_path, odd=Holder(odd)))) == bits(odd)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
def test_what_safetensors_cannot_hold_goes_into_the_bundle(tmp_path: Path, save: Save) -> None:
    odd = {
        "sparse": torch.eye(5).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.arange(4.0), 0.1, 3, torch.qint8),
        "complex128": torch.tensor([1 + 2j], dtype=torch.complex128),
        "dense": torch.arange(3.0),
    }
    directory = save(tmp_path, odd=Holder(odd))
    assert list(load_file(directory / "odd.safetensors")) == ["dense"]
    assert bits(loaded(directory)) == bits(odd)


def test_views_that_are_not_what_lies_in_memory(tmp_path: Path, save: Save) -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    odd = {"plain": base, "conjugated": base.conj(), "negated": base.conj().imag, "expanded": base.expand(3, 2)}
    found = loaded(save(tmp_path, odd=Holder(odd)))
    assert bits(found) == bits(odd)
    assert found["conjugated"].tolist() == [1 - 2j, 3 + 4j]


def test_special_numbers_keep_their_bits(tmp_path: Path, save: Save) -> None:
    payload = torch.tensor([0x7FC00001, 0xFF800000, 0x80000000, 1], dtype=torch.int64).to(torch.int32)
    odd = {"nan with a payload, -inf, -0.0, denormal": payload.view(torch.float32)}
    assert bits(loaded(save(tmp_path, odd=Holder(odd)))) == bits(odd)


def test_containers_keep_their_types_and_torchs_versions(tmp_path: Path, save: Save) -> None:
    module = nn.BatchNorm1d(3).state_dict()
    assert module._metadata
    odd = {
        "module": module,
        "counter": Counter({3: 2}),
        "text": ("\0baton tensor:text", ["\0baton text:\0baton shard:[2]:x"]),  # as placeholders look
        "deep": [("\0baton ", torch.ones(2)), [], {}, ()],
        "numbers": (math.inf, -0.0, True, None, "text", b"bytes", 2**70),
        1: "an int as a key",
        "1": "and its text",
        "a.b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        "__metadata__": torch.full((2,), 2.0),
        "": torch.full((2,), 3.0),
    }
    found = loaded(save(tmp_path, odd=Holder(odd)))
    assert bits(found) == bits(odd)
    assert found["module"]._metadata == module._metadata


class Tied(nn.Module):
    """An embedding that is its own output layer, and a slice of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(70, 300)
        self.head = nn.Linear(300, 70, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("part", self.embedding.weight.detach()[2:9])


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path, save: Save) -> None:
    model, other = Tied(), Tied()
    directory = save(tmp_path, model=model)
    stored = load_file(directory / "model.safetensors")
    assert sorted(stored) == ["embedding.weight", "part"]
    assert (directory / "model.safetensors").stat().st_size < 300 * 77 * 4 + 1000
    state_files.load_states(directory, {"model": "tensors"}, {"model": other})
    assert other.head.weight is other.embedding.weight
    assert bits(other.state_dict()) == bits(model.state_dict())


def test_an_optimizer_and_what_it_loads_is_its_own(tmp_path: Path, save: Save) -> None:
    torch.manual_seed(0)
    model = nn.Linear(200, 100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    model(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    directory = save(tmp_path, optimizer=optimizer)
    assert (directory / "state.pt").stat().st_size < 10_000, "its tensors are in a file that is read without a copy"
    fresh = torch.optim.AdamW(nn.Linear(200, 100).parameters(), lr=0.5)
    state_files.load_states(directory, {"optimizer": "tensors"}, {"optimizer": fresh})
    assert bits(fresh.state_dict()) == bits(optimizer.state_dict())
    file = directory / "optimizer.safetensors"
    before = file.read_bytes()
    for state in fresh.state.values():
        state["exp_avg"].add_(1)
    assert file.read_bytes() == before
    changed = bits(fresh.state_dict())
    with file.open("r+b") as stream:
        stream.write(bytes(len(before)))
    assert bits(fresh.state_dict()) == changed


def test_memory_and_disk_hold_the_same_files(tmp_path: Path) -> None:
    """A checkpoint that fell back to disk repeats the chunks of those in memory."""
    torch.manual_seed(0)
    state = {"model": Tied(), "more": Holder({"a": torch.ones(20000).double(), "b": [torch.ones(3).bool()]})}
    disk, memory = onto_disk(tmp_path, **state), into_memory(tmp_path, **state)
    for name in ("model.safetensors", "more.safetensors"):
        assert (disk / name).read_bytes() == (memory / name).read_bytes()
    assert sorted(path.name for path in memory.iterdir() if path.name != "baton.json") == sorted(
        path.name for path in disk.iterdir()
    )


def test_all_tensors_are_aligned_and_small_ones_do_not_cut_large_ones() -> None:
    large, small = torch.zeros(40_000), torch.zeros(3)
    byte, double = torch.zeros(3, dtype=torch.int8), torch.zeros(1, dtype=torch.float64)
    layout = FileLayout.of(FileContents({"a": small, "b": large, "c": small, "d": large, "e": byte, "f": double}, {}))
    assert list(layout.offsets) == ["b", "d", "f", "a", "c", "e"]
    assert all(layout.offsets[name] % 64 == 0 for name in "bd"), "a copy across cache lines is slower"
    assert layout.offsets["f"] % 8 == layout.offsets["a"] % 4 == 0
    odd = FileLayout.of(
        FileContents({"a": torch.zeros(70_001, dtype=torch.int8), "b": double, "c": large[:20_001]}, {})
    )
    assert list(odd.offsets) == ["b", "c", "a"]
    assert odd.offsets["b"] % 8 == odd.offsets["c"] % 4 == 0


def test_the_layout_does_not_depend_on_the_order_of_the_dictionary() -> None:
    one, two = torch.zeros(3), torch.zeros(40_000)
    assert FileLayout.of(FileContents({"a": one, "b": two}, {})) == FileLayout.of(
        FileContents({"b": two, "a": one}, {})
    )


tensors = npst.arrays(
    st.sampled_from(["float32", "float64", "int8", "int64", "bool", "uint16", "complex64"]),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
).map(lambda array: torch.from_numpy(array.copy()))
leaves = tensors | st.integers() | st.floats() | st.text() | st.none() | st.booleans()
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inner, max_size=4)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(nested)
@settings(max_examples=200, deadline=None)
def test_any_state_taken_apart_and_put_together_is_the_same(state: Any) -> None:
    parts = take_apart(state)
    assert bits(put_together(parts.structure, lambda key, _: parts.tensors[key], lambda *_: 1 / 0)) == bits(state)


@given(st.dictionaries(st.text(max_size=4), tensors, max_size=6))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_safetensors_itself_reads_what_is_written(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    parts = take_apart(state)
    path = tmp_path / "file.safetensors"
    safetensors_file.write(path, FileContents(parts.tensors, {}))
    assert bits(dict(sorted(load_file(path).items()))) == bits(dict(sorted(parts.tensors.items())))


def test_an_unknown_placeholder_is_damage() -> None:
    with pytest.raises(ValueError, match="does not know"):
        put_together("\0baton hologram:key", lambda *_: 1 / 0, lambda *_: 1 / 0)
