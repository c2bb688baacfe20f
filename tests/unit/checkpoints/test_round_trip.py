"""Commit and restore are bit-identical for any content and codec, from the cloud and the local cache."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.contract.checkpoints.manifest import Manifest
from gpu_client.checkpoints.local.chunk_cache import LocalChunkCache
from gpu_client.checkpoints.restore.checkpoint_restore import restore
from gpu_client.checkpoints.save.checkpoint_commit import Committed, commit_checkpoint
from gpu_client.checkpoints.save.chunk_index import ChunkIndex
from gpu_client.transport.net.digests import hash_file
from gpu_client.transport.transfer.manager import Transfer
from tests.unit.checkpoints.fake_cloud import JOB_ID, FakeCloud

SLOW_LINE = 1e6
"""Bytes per second that every codec pays on."""

# All that torch.save takes; of those that need scales besides their bits, none.
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    *(getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)),
]  # fmt: skip


class Worker:
    """Commits directories and restores them, over one cloud."""

    def __init__(self, cloud: FakeCloud, transfer: Transfer, tmp_path: Path) -> None:
        self.cloud = cloud
        self.transfer = transfer
        self.tmp_path = tmp_path
        self.store = LocalChunkCache(tmp_path / "stores", JOB_ID)
        self.known = ChunkIndex.from_manifests([], self.store)
        self.digests: dict[int, dict[str, str]] = {}

    def place(self, step: int) -> Path:
        directory = self.tmp_path / f"staged-{step}"
        directory.mkdir()
        return directory

    def commit(self, step: int, directory: Path, *, upload_bytes_per_s: float | None = SLOW_LINE) -> Committed:
        self.digests[step] = digests_of(directory)
        committed = commit_checkpoint(
            self.cloud,
            self.transfer,
            self.cloud.item(epoch=1),
            directory,
            step,
            known=self.known,
            upload_bytes_per_s=upload_bytes_per_s,
            spool=self.tmp_path / "spool",
        )
        self.store.record_committed(committed.manifest, directory)
        return committed

    def assert_comes_back(self, step: int) -> Path:
        """Restore the step from the cloud alone, and with the local cache; check every byte, return the directory."""
        item = self.cloud.item()
        item = item.model_copy(update={"resume": [ref for ref in item.resume if ref.step == step]})
        for name, store in (("cold", None), ("warm", self.store)):
            restored = restore(self.cloud, self.transfer, item, self.tmp_path / name, store=store)
            assert restored is not None
            assert digests_of(restored.path) == self.digests[step]
        assert self.cloud.damaged == []
        return restored.path


def digests_of(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): hash_file(path).blake3
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def worker(cloud: FakeCloud, transfer: Transfer, tmp_path: Path) -> Worker:
    return Worker(cloud, transfer, tmp_path)


def filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Bits that are anything, NaNs and infinities among them; booleans are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    count = 1
    for size in shape:
        count *= size
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (max(count, 1) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)[:count].reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


@pytest.fixture
def _uninitialized_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill no new tensor, which float4 does not support: a training of another test may have asked for that."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


@pytest.mark.usefixtures("_uninitialized_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype(worker: Worker, dtype: torch.dtype) -> None:
    for step, seed in ((10, 1), (20, 1)):
        place = worker.place(step)
        state: dict[str, Any] = {
            "weights": filled(dtype, (300, 70), seed),
            "empty": torch.empty((0, 3), dtype=dtype),
            "scalar": filled(dtype, (), seed),
        }
        if step == 20:
            state["weights"][::50] = filled(dtype, (6, 70), 7)
        torch.save(state, place / "state.pt")
        worker.commit(step, place)
    found = torch.load(worker.assert_comes_back(20) / "state.pt", weights_only=True)
    for name, tensor in state.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == bits(tensor)


def nested(seed: int) -> dict[str, Any]:
    """Tied weights, views, and what an optimizer keeps."""
    tied = filled(torch.bfloat16, (400, 128), seed)
    return {
        "model": {"wte": tied, "lm_head": tied, "view": tied[::2, 1:64:3], "transposed": tied.t()},
        "optimizer": {
            "state": {0: {"step": torch.tensor(17.0), "exp_avg": torch.randn(400, 128), "exp_avg_sq": torch.zeros(99)}},
            "param_groups": [{"lr": 1e-5, "betas": (0.9, 0.95), "params": [0]}],
        },
        "rng": torch.get_rng_state(),
        "note": "ü 中文",
        "none": None,
        "frozen": torch.nn.Parameter(torch.ones(3), requires_grad=False),
    }  # fmt: skip


def test_nested_state_with_tied_weights_and_views(worker: Worker) -> None:
    for step in (10, 20):
        state = nested(3)
        state["model"]["wte"].view(torch.uint8)[step, :50] ^= 1
        place = worker.place(step)
        torch.save(state, place / "pytorch_model.bin")
        worker.commit(step, place)
    found = torch.load(worker.assert_comes_back(20) / "pytorch_model.bin", weights_only=True)
    assert found["model"]["wte"].data_ptr() == found["model"]["lm_head"].data_ptr(), "tied as they were"
    assert bits(found["model"]["view"]) == bits(state["model"]["view"])
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert found["note"] == "ü 中文"


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn((2000, 512), generator=generator).to(torch.bfloat16),
        "layer": torch.randn((1024, 512), generator=generator),
        "sparse": torch.zeros((3000, 512)),
        "small": torch.randn(17, generator=generator),
    }


def test_every_codec_is_used_and_comes_back(worker: Worker) -> None:
    """Weights that change a little become deltas, new ones planes; zeros are none, and noise stays what it is."""
    used: Counter[str] = Counter()
    for step in (10, 20, 30):
        place = worker.place(step)
        state = weights(1)
        state["embed"].view(torch.int16)[:: 10 + step] += step
        save_file(state, place / "model.safetensors")
        (place / "noise").write_bytes(random.Random(step).randbytes(300_000))
        committed = worker.commit(step, place)
        used.update(chunk.codec for chunk in committed.manifest.chunks)
    assert set(used) == {"raw", "zeros", "planes", "delta"}
    for step in (20, 30):
        path = worker.assert_comes_back(step)
    found = load_file(path / "model.safetensors")
    assert all(bits(found[name]) == bits(state[name]) for name in state)


def test_on_a_fast_line_everything_is_raw_and_comes_back(worker: Worker) -> None:
    place = worker.place(10)
    save_file(weights(1), place / "model.safetensors")
    committed = worker.commit(10, place, upload_bytes_per_s=10e9)
    assert {chunk.codec for chunk in committed.manifest.chunks} <= {"raw", "zeros"}
    worker.assert_comes_back(10)


def test_names_of_all_kinds(worker: Worker) -> None:
    place = worker.place(10)
    names = [
        "a b/ c",
        "ü/中文/🤗",
        "é",
        "e\u0301",
        ".hidden",
        "-rf",
        "x" * 255,
        "a'b\"c$d;e|f",
        "d/e/f/g/h/i",
        "%2e%2e",
        "~",
        "#",
    ]
    for number, name in enumerate(names):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"%d" % number * number)
    worker.commit(10, place)
    path = worker.assert_comes_back(10)
    assert len(digests_of(path)) == len(names)


def test_many_small_files(worker: Worker) -> None:
    place = worker.place(10)
    for number in range(1000):
        (place / f"d{number % 50}").mkdir(exist_ok=True)
        (place / f"d{number % 50}" / f"file {number}").write_bytes(b"%d," % number * (number % 97))
    committed = worker.commit(10, place)
    assert committed.uploaded_packs <= 2
    worker.assert_comes_back(10)


def test_a_sparse_file_of_5_gib(worker: Worker) -> None:
    place = worker.place(10)
    with (place / "sparse").open("wb") as file:
        file.write(b"begin")
        file.seek(3 * 1024**3 + 12_345)
        file.write(b"middle" * 1000)
        file.truncate(5 * 1024**3 + 1)
    committed = commit_checkpoint(worker.cloud, worker.transfer, worker.cloud.item(epoch=1), place, 10)
    assert isinstance(committed.manifest, Manifest)
    restored = restore(worker.cloud, worker.transfer, worker.cloud.item(), worker.tmp_path / "output")
    assert restored is not None
    path = restored.path / "sparse"
    assert path.stat().st_size == 5 * 1024**3 + 1
    assert path.stat().st_blocks * 512 < 64 * 1024**2
    assert list(data_of(path)) == list(data_of(place / "sparse"))


def data_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The non-zero runs of a sparse file, whatever holes its file system keeps."""
    with path.open("rb") as file:
        offset = 0
        while True:
            try:
                begin = os.lseek(file.fileno(), offset, os.SEEK_DATA)
            except OSError:
                return
            offset = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            file.seek(begin)
            data = file.read(offset - begin)
            if stripped := data.strip(b"\0"):
                yield begin + len(data) - len(data.lstrip(b"\0")), stripped
