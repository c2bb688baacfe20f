"""Test recorded data sets and mixtures."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from gpu_client.ring.core.ring import make_ring, open_ring
from gpu_client.ring.errors import ObjectDamaged, RingError, RingMismatch, WaitedTooLong
from gpu_client.ring.format.records import SAMPLES
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.loader import RingLoader
from gpu_client.ring.reading.mixed_loader import MixedLoader
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.tools.recording import Recorded, record


def filled(place: Path, samples: int) -> str:
    ring = make_ring(str(place), RingSettings(cap=samples, max_ahead=10_000))
    with RingWriter(ring, "w", threads=False) as writer:
        for number in range(samples):
            writer.put({"x": np.full(4, number), "number": number}, seed=number)
    return str(place)


def recorded(place: str, directory: Path, samples: int, **more: Any) -> int:
    with RingReader(open_ring(place), threads=False, patience_s=0.1) as reader:
        return record(reader, directory, samples, **more)


def test_each_sample_is_recorded_once_in_another_order_with_where_it_came_from(tmp_path: Path) -> None:
    place = filled(tmp_path / "ring", 50)
    assert recorded(place, tmp_path / "set", 50, shard=16, shuffle=20, seed=1) == 0
    found = Recorded(tmp_path / "set")
    found.verify()
    numbers = [found[index]["number"] for index in range(len(found))]
    assert sorted(numbers) == list(range(50)) != numbers
    assert len(list((tmp_path / "set/shards").iterdir())) == 4
    assert [found.provenance(index)["seed"] for index in range(50)] == numbers
    assert found[-1]["number"] == numbers[-1]
    recorded(place, tmp_path / "again", 50, shard=16, shuffle=20, seed=1)
    again = Recorded(tmp_path / "again")
    assert [again[index]["number"] for index in range(50)] == numbers
    batch = next(iter(DataLoader(found, batch_size=10, num_workers=0)))
    assert batch["x"].shape == (10, 4)


def test_what_is_damaged_is_left_out_and_what_never_comes_is_not_waited_for(tmp_path: Path) -> None:
    place = filled(tmp_path / "ring", 6)
    key = open_ring(place).store.keys(SAMPLES)[2]
    (tmp_path / "ring" / key).write_bytes(b"short")
    assert recorded(place, tmp_path / "set", 5) == 1
    assert len(Recorded(tmp_path / "set")) == 5
    with pytest.raises(RingMismatch, match="already has a data set"):
        recorded(place, tmp_path / "set", 5)
    with pytest.raises(WaitedTooLong, match="no new samples"):
        recorded(place, tmp_path / "other", 7)
    with pytest.raises(RingMismatch, match="no recorded data set"):
        Recorded(tmp_path / "other")


def test_an_altered_shard_is_noticed(tmp_path: Path) -> None:
    recorded(filled(tmp_path / "ring", 6), tmp_path / "set", 6)
    path = tmp_path / "set/shards/00000"
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(ObjectDamaged):
        Recorded(tmp_path / "set").verify()
    path.unlink()
    with pytest.raises(ObjectDamaged, match="is not there"):
        Recorded(tmp_path / "set")[0]
    with pytest.raises(IndexError):
        Recorded(tmp_path / "set")[6]


def test_a_shard_that_is_whole_but_another_one_is_noticed(tmp_path: Path) -> None:
    for name in ("set", "other"):
        recorded(filled(tmp_path / f"ring of {name}", 6), tmp_path / name, 6, seed=len(name))
    (tmp_path / "set/shards/00000").write_bytes((tmp_path / "other/shards/00000").read_bytes())
    with pytest.raises(ObjectDamaged, match="differs from the recorded shard"):
        Recorded(tmp_path / "set").verify()


def test_any_altered_bit_of_the_index_is_noticed(tmp_path: Path) -> None:
    recorded(filled(tmp_path / "ring", 6), tmp_path / "set", 6, shard=3)
    path = tmp_path / "set/index.json"
    whole = path.read_bytes()
    kept = json.loads(whole)
    for bit in range(8 * len(whole)):
        altered = bytearray(whole)
        altered[bit // 8] ^= 1 << bit % 8
        path.write_bytes(altered)
        try:
            Recorded(tmp_path / "set")
        except RingMismatch:
            continue
        # Space between the words is no content, nor is a digest under another name one.
        assert {**json.loads(altered), "xxh3": kept["xxh3"]}.items() >= kept.items()


def test_a_data_set_of_before_there_was_a_digest_is_read(tmp_path: Path) -> None:
    recorded(filled(tmp_path / "ring", 6), tmp_path / "set", 6)
    path = tmp_path / "set/index.json"
    path.write_text(json.dumps({name: said for name, said in json.loads(path.read_bytes()).items() if name != "xxh3"}))
    assert len(Recorded(tmp_path / "set")) == 6


def mixture(place: str, found: Recorded) -> MixedLoader:
    live = RingLoader(place, batch_size=2, seed=4)
    return MixedLoader({"live": (live, 3.0), "recorded": (DataLoader(found, batch_size=2), 1.0)}, seed=9)


def test_sources_come_by_their_weights_and_a_resumed_training_gets_the_same(tmp_path: Path) -> None:
    place = filled(tmp_path / "ring", 20)
    recorded(place, tmp_path / "set", 20)
    loader = mixture(place, Recorded(tmp_path / "set"))
    names, live = [], []
    state: dict[str, Any] = {}
    for count, batch in enumerate(islice(loader, 200), 1):
        names.append(loader.name)
        if loader.name == "live":
            live.append(batch["number"].tolist())
        if count == 40:
            state = loader.state_dict()
    assert 110 < Counter(names)["live"] < 190
    resumed = mixture(place, Recorded(tmp_path / "set"))
    resumed.load_state_dict(state)
    again, more = [], []
    for batch in islice(resumed, 160):
        again.append(resumed.name)
        if resumed.name == "live":
            more.append(batch["number"].tolist())
    assert again == names[40:]
    assert more == live[-len(more) :]
    resumed.checkpointed()


class Folder(Dataset[Any]):
    """Files of one's own, as users read them."""

    def __init__(self, path: Path) -> None:
        self.files = sorted(path.glob("*.npy"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": np.load(self.files[index])}


def test_live_recorded_and_folder_are_mixed_and_what_has_an_end_begins_again(tmp_path: Path) -> None:
    place = filled(tmp_path / "ring", 20)
    recorded(place, tmp_path / "set", 20)
    (tmp_path / "own").mkdir()
    for number in (1000, 1001, 1002):
        np.save(tmp_path / "own" / f"{number}.npy", number)
    loader = MixedLoader(
        {
            "live": (RingLoader(place, batch_size=2), 1.0),
            "recorded": (DataLoader(Recorded(tmp_path / "set"), batch_size=2), 1.0),
            "own": (DataLoader(Folder(tmp_path / "own"), batch_size=2), 2.0),
            "never": (DataLoader(Folder(tmp_path / "own"), batch_size=2), 0.0),
        }
    )
    found: dict[str, list[int]] = {"live": [], "recorded": [], "own": []}
    for batch in islice(loader, 80):
        found[loader.name] += batch["number"].tolist()
    assert set(found["own"]) == {1000, 1001, 1002} and 45 < len(found["own"]) < 80, "begun again and again"
    assert set(found["live"]) <= set(range(20)) and set(found["recorded"]) == set(range(20))
    loader.checkpointed(loader.state_dict())


@pytest.mark.parametrize("weights", [{}, {"a": -1.0}, {"a": 0.0}, {"a": float("inf")}, {"a": float("nan")}])
def test_weights_that_mean_nothing_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(RingError, match="weights"):
        MixedLoader({name: ([1], weight) for name, weight in weights.items()})


def test_an_empty_source_is_told() -> None:
    with pytest.raises(RingError, match="the source a is empty"):
        next(iter(MixedLoader({"a": ([], 1.0)})))
