"""States on disk: plain data only, bit for bit, with shared tensors, and every random state."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gpu_client.training.checkpoint import state_files
from gpu_client.training.checkpoint.random_state import capture_random, restore_random
from gpu_client.training.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointWriteError


class Holder:
    """An object whose whole state is a given value."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Tied(nn.Module):
    """An embedding that is its own output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight


def saved(directory: Path, **named: object) -> dict[str, str]:
    collected = state_files.collect(named)
    state_files.save_states(directory, collected, [capture_random()])
    return collected.forms


def test_models_become_safetensors_with_tied_weights_once(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Tied()
    forms = saved(tmp_path, model=model)
    assert forms == {"model": "tensors"}
    stored = load_file(tmp_path / "model.safetensors")
    assert ("embedding.weight" in stored) != ("head.weight" in stored)
    torch.manual_seed(2)
    other = Tied()
    state_files.load_states(tmp_path, forms, {"model": other})
    assert other.head.weight is other.embedding.weight
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


def test_equal_models_make_equal_files(tmp_path: Path) -> None:
    model = Tied()
    contents = set()
    for attempt in range(6):
        (tmp_path / str(attempt)).mkdir()
        saved(tmp_path / str(attempt), model=model)
        contents.add((tmp_path / str(attempt) / "model.safetensors").read_bytes())
    assert len(contents) == 1, "an unchanged model would be uploaded again"


def test_odd_tensors_survive(tmp_path: Path) -> None:
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    odd = {
        "transposed": base.t(),
        "slice": base[1:],
        "whole": base,
        "bf16": torch.tensor([1.5, -0.0]).bfloat16(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "bool": torch.tensor([True, False]),
        "nan": torch.tensor([float("nan"), float("inf")]),
    }
    holder = Holder(None)
    forms = saved(tmp_path, odd=Holder(odd))
    state_files.load_states(tmp_path, forms, {"odd": holder})
    assert holder.state.keys() == odd.keys()
    for name, value in odd.items():
        assert holder.state[name].dtype == value.dtype
        assert torch.equal(holder.state[name].nan_to_num(), value.nan_to_num())


def test_everything_loads_with_weights_only(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3])  # keeps a Counter, which torch regards as safe
    assert isinstance(scheduler.state_dict()["milestones"], Counter)
    saved(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    bundle = torch.load(tmp_path / "state.pt", weights_only=True)
    assert set(bundle["states"]) == {"model", "optimizer", "scheduler"}
    stored = load_file(tmp_path / "optimizer.safetensors")
    assert torch.equal(stored["state.0.exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize(
    "state",
    [{"lr": np.float64(0.1)}, {"a": [{"deep": Path("x")}]}, {"f": lambda: None}, {"s": Holder(1)}],
)
def test_what_is_not_plain_data_is_refused_by_name(tmp_path: Path, state: Any) -> None:
    with pytest.raises(CheckpointWriteError, match="scheduler") as caught:
        saved(tmp_path, scheduler=Holder(state))
    assert "plain data" in str(caught.value)


@pytest.mark.parametrize("value", [3, {"a": 1}, object()])
def test_objects_without_state_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointWriteError, match=r"'thing'.*has no state_dict"):
        saved(tmp_path, thing=value)


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointWriteError, match="'state'"):
        saved(tmp_path, state=Holder({}))


def test_a_generator_of_ones_own_is_a_state(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    forms = saved(tmp_path, noise=generator)
    expected = torch.rand(3, generator=generator)
    other = torch.Generator()
    state_files.load_states(tmp_path, forms, {"noise": other})
    assert torch.equal(torch.rand(3, generator=other), expected)


def test_every_global_random_state_returns(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves a second value waiting inside, in Python and numpy
    np.random.standard_normal()
    saved(tmp_path)

    def draw() -> tuple[Any, ...]:
        return (
            random.gauss(0, 1),
            random.random(),
            np.random.standard_normal(),
            np.random.rand(),
            torch.randn(3).tolist(),
        )

    expected = draw()
    draw()
    restore_random(state_files.load_states(tmp_path, {}, {})[0])
    assert draw() == expected


def test_directory_states_get_a_place_of_their_own(tmp_path: Path) -> None:
    class Library:
        def __init__(self, text: str) -> None:
            self.text = text

        def save_state(self, directory: str) -> None:
            Path(directory).mkdir()
            (Path(directory) / "text").write_text(self.text)

        def load_state(self, directory: str) -> None:
            self.text = (Path(directory) / "text").read_text()

    forms = saved(tmp_path, library=Library("stored"))
    other = Library("")
    state_files.load_states(tmp_path, forms, {"library": other})
    assert (forms, other.text) == ({"library": "directory"}, "stored")


def test_a_library_that_writes_elsewhere_is_noticed(tmp_path: Path) -> None:
    class Stubborn:
        def save_state(self, directory: str) -> None:
            pass

        def load_state(self, directory: str) -> None:
            pass

    with pytest.raises(CheckpointWriteError, match="automatic_checkpoint_naming"):
        saved(tmp_path, accelerator=Stubborn())


def test_a_refused_state_is_a_mismatch(tmp_path: Path) -> None:
    forms = saved(tmp_path, model=nn.Linear(2, 2))
    with pytest.raises(CheckpointMismatchError, match="'model' does not accept"):
        state_files.load_states(tmp_path, forms, {"model": nn.Linear(2, 3)})


@pytest.mark.parametrize("name", ["state.pt", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"garbage" * 100, None])
def test_unreadable_files_are_damage_and_change_nothing(tmp_path: Path, name: str, content: bytes | None) -> None:
    forms = saved(tmp_path, model=nn.Linear(2, 2))
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content is None else content)
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(CheckpointDamagedError):
        state_files.load_states(tmp_path, forms, {"model": model})
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"a": torch.arange(3), "b": [1, (2.0, None)]}, {"a": torch.arange(3), "b": [1, (2.0, None)]}, True),
        ({"a": torch.arange(3)}, {"a": torch.arange(1, 4)}, False),
        ({"a": torch.arange(3)}, {"a": torch.arange(4)}, False),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.float64)}, False),
        ({"a": torch.zeros(2)}, {"a": [0.0, 0.0]}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([1, 2], [1], False),
        ({"a": 1}, [1], False),
        ("x", "y", False),
    ],
)
def test_states_are_compared_with_the_tensors_in_them(one: object, other: object, same: bool) -> None:
    assert state_files.is_same_state(one, other) is state_files.is_same_state(other, one) is same
