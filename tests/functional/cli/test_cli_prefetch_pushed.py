"""`baton data prefetch` of pushed data sets, from the local stack's store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_client.datasets.prefetch.partial_file import UNIT_BYTES
from tests.functional.cli.people import Baton
from tests.kits.clouds.emulator import unique
from tests.kits.files.directories import files_below, write_files
from tests.kits.network.fake_hub import TOKEN, FakeHub
from tests.kits.stack.stack import Stack

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

FILES = {f"a/{number}.bin": bytes([number]) * 1000 for number in range(5)} | {"b.bin": b"b" * (UNIT_BYTES + 1)}


@pytest.fixture
def prefix(baton: Baton, tmp_path: Path) -> str:
    """A pushed data set."""
    name = unique("set")
    baton("data", "push", write_files(tmp_path / "set", FILES), name).ok()
    return name


def fetched(place: Path) -> dict[str, bytes]:
    return {path: data for path, data in files_below(place).items() if path != "prefetch.json"}


def below(prefix: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{prefix}/{path}": data for path, data in files.items()}


def test_ranks_share_a_pushed_data_set(baton: Baton, stack: Stack, prefix: str, tmp_path: Path) -> None:
    place = tmp_path / "datasets"
    shares = [
        baton("data", "prefetch", prefix, "--rank", rank, "--world", 2, "--into", place, "--json").ok().json
        for rank in range(2)
    ]
    assert fetched(place) == below(prefix, FILES)
    assert [one["fetched"]["files"] for one in shares] == [3, 3]
    assert len({one["sources"][0]["revision"] for one in shares}) == 1
    manifest = json.loads((place / "prefetch.json").read_text())
    assert {**manifest, "directory": str(place), "fetched": shares[1]["fetched"]} == shares[1]
    assert all(file["checksum"].startswith("blake3:") for file in manifest["sources"][0]["files"])
    (place / prefix / "b.bin").write_bytes(b"c" * (UNIT_BYTES + 1))
    seen = len(stack.s3.requests("GET .*bin"))
    said = baton("data", "prefetch", prefix, "--into", place).ok()
    assert said.out == f"1 file (1.0 MB) fetched into {place}, 5 files unchanged\n"
    assert fetched(place) == below(prefix, FILES)
    assert len(stack.s3.requests("GET .*bin")) == seen + 1


def test_the_newest_manifest_of_a_subfolder_counts(baton: Baton, prefix: str, tmp_path: Path) -> None:
    """A folder within a pushed folder has no manifest of its own until a push of this folder."""
    baton("data", "prefetch", f"{prefix}/a", "--into", tmp_path / "first").ok()
    inner = {path: data for path, data in FILES.items() if path.startswith("a/")}
    assert fetched(tmp_path / "first") == below(prefix, inner)
    newer = write_files(tmp_path / "newer", {"0.bin": b"new"})
    baton("data", "push", newer, f"{prefix}/a").ok()
    for folder, files in (("/a", inner), ("", FILES)):
        place = tmp_path / f"second{len(files)}"
        baton("data", "prefetch", f"{prefix}{folder}", "--into", place).ok()
        assert fetched(place) == below(prefix, {**files, "a/0.bin": b"new"})


def test_an_unfinished_or_damaged_data_set_is_refused(baton: Baton, stack: Stack, prefix: str, tmp_path: Path) -> None:
    place = tmp_path / "datasets"
    stack.client.delete_object("training-data", f"{prefix}/a/1.bin")
    baton("data", "prefetch", prefix, "--into", place).failed(
        1, f"push_unfinished: {prefix}/a/1.bin is not stored as it was pushed", f"baton data push DIR {prefix}"
    )
    with stack.s3.holding(rf"PUT /.*{prefix}/a/1.bin", drop=True) as held:
        running = baton.started("data", "push", tmp_path / "set", prefix)
        held.wait()
        running.kill()
    baton("data", "prefetch", prefix, "--into", place).failed(
        1, f"push_unfinished: a push to {prefix}/ was not finished: repeat it"
    )
    assert not place.exists()
    baton("data", "push", tmp_path / "set", prefix).ok()
    stack.write(f"{prefix}/a/1.bin", b"x" * 1000, "training-data")
    said = baton("data", "prefetch", prefix, "--into", place)
    assert (said.code, said.out) == (1, "")
    summary, problem = said.err.splitlines()
    assert summary.startswith("baton: files_missing: 1 of 6 files could not be fetched")
    assert problem.startswith(f"{prefix}/a/1.bin: the bytes differ from blake3:")
    assert fetched(place) == below(prefix, {path: data for path, data in FILES.items() if path != "a/1.bin"})


def test_a_prefix_without_a_data_set(baton: Baton, tmp_path: Path) -> None:
    name = unique("none")
    baton("data", "prefetch", name, "--into", tmp_path / "d").failed(
        3, f"source_missing: no pushed data set lies below {name}/", f"baton data push DIR {name}"
    )


def test_pushed_data_and_the_hub_by_ratio(baton: Baton, prefix: str, tmp_path: Path) -> None:
    place = tmp_path / "datasets"
    web = {f"{number}.parquet": bytes([number]) * 200 for number in range(9)}
    with FakeHub({"acme/web": web}) as hub:
        baton(
            *("data", "prefetch", f"{prefix}:1", "hf:acme/web:2", "--max-files", 6, "--into", place),
            HF_ENDPOINT=hub.url,
            HF_TOKEN=TOKEN,
        ).ok()
        assert hub.leaks == []
    sources = json.loads((place / "prefetch.json").read_text())["sources"]
    assert [(one["name"], one["ratio"], len(one["files"])) for one in sources] == [
        (prefix, 1.0, 2),
        ("hf:acme/web", 2.0, 4),
    ]
    assert sorted(fetched(place)) == [f"hf/acme/web/{number}.parquet" for number in range(4)] + [
        f"{prefix}/a/0.bin",
        f"{prefix}/a/1.bin",
    ]
