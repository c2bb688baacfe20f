"""Workers refuse the folder of a killed push, and a repeated push completes the folder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.contract.objects.dataset_manifest import DATASET_MANIFEST, DatasetManifest, is_manifest
from gpu_client.agent.io.inputs import InputsDiffer, fetch_inputs
from tests.functional.cli.people import Baton, Labour, submit
from tests.kits.clouds.emulator import unique
from tests.kits.files.directories import files_below, write_files
from tests.kits.stack.stack import Stack

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

Fetched = Callable[[str], dict[str, bytes]]


@pytest.fixture
def fetched(baton: Baton, labour: Labour, stack: Stack, tmp_path: Path) -> Fetched:
    """Return a function that fetches a prefix as a worker does, and returns the files."""
    count = 0

    def fetch(prefix: str) -> dict[str, bytes]:
        nonlocal count
        count += 1
        submit(baton, labour, tmp_path, inputs=[{"prefix": prefix}])
        item, data = labour.claim(f"m-{count}"), tmp_path / f"data-{count}"
        fetch_inputs(
            stack.client, stack.client.transfer, item, data, require_free=lambda _: None, cancel=threading.Event()
        )
        return files_below(data)

    return fetch


def killed(baton: Baton, stack: Stack, place: Path, prefix: str, at: str) -> None:
    """A push, killed while it sends what matches."""
    with stack.s3.holding(rf"PUT /.*{prefix}/{at}", drop=True) as held:
        running = baton.started("data", "push", place, prefix)
        held.wait()
        running.kill()


def manifest(stack: Stack, folder: str) -> DatasetManifest:
    return DatasetManifest.model_validate_json(stack.read(folder + DATASET_MANIFEST, "training-data"))


def keys(stack: Stack, prefix: str) -> set[str]:
    return {key for key in stack.keys_below(prefix + "/", "training-data") if not is_manifest(key)}


def numbered(first: str) -> dict[str, bytes]:
    return {f"{first}{number:02}": b"%d" % number * 1000 for number in range(12)}


def test_half_of_a_first_push_is_refused_and_a_repeat_is_whole(
    baton: Baton, stack: Stack, tmp_path: Path, fetched: Fetched
) -> None:
    prefix = unique("set")
    place = write_files(tmp_path / "set", numbered("a/"))
    killed(baton, stack, place, prefix, "a/1[01]")
    assert 0 < len(keys(stack, prefix)) < 12
    for folder in ("", "a/"):
        with pytest.raises(InputsDiffer, match=f"a push to {prefix}/ was not finished: repeat it"):
            fetched(f"{prefix}/{folder}")
    baton("data", "push", place, prefix).ok()
    assert fetched(f"{prefix}/") == files_below(place)
    assert fetched(f"{prefix}/a/") == files_below(place / "a")


def test_half_of_an_addition_is_refused_and_what_was_known_before_stays(
    baton: Baton, stack: Stack, tmp_path: Path, fetched: Fetched
) -> None:
    prefix = unique("set")
    first = write_files(tmp_path / "first", numbered("a"))
    baton("data", "push", first, prefix).ok()
    before = manifest(stack, f"{prefix}/")
    second = write_files(tmp_path / "second", numbered("b"))
    killed(baton, stack, second, prefix, "b1[01]")
    assert manifest(stack, f"{prefix}/") == before.model_copy(update={"unfinished": True})
    with pytest.raises(InputsDiffer, match="was not finished"):
        fetched(f"{prefix}/")
    baton("data", "push", second, prefix).ok()
    assert fetched(f"{prefix}/") == files_below(first) | files_below(second)
    named = manifest(stack, f"{prefix}/")
    assert {file.path for file in named.files} == files_below(first).keys() | files_below(second).keys()


def test_folders_with_manifests_of_their_own_are_told_where_they_change(
    baton: Baton, stack: Stack, tmp_path: Path, fetched: Fetched
) -> None:
    prefix = unique("set")
    place = write_files(tmp_path / "set", {"dogs/1": b"dog", "cats/1": b"cat"})
    for folder in ("dogs", "cats"):
        baton("data", "push", place / folder, f"{prefix}/{folder}").ok()
    cats = stack.read(f"{prefix}/cats/{DATASET_MANIFEST}", "training-data")
    write_files(place, {"dogs/2": b"another"})
    killed(baton, stack, place, prefix, "dogs/2")
    assert manifest(stack, f"{prefix}/dogs/").unfinished
    assert stack.read(f"{prefix}/cats/{DATASET_MANIFEST}", "training-data") == cats
    for folder in ("", "dogs/"):
        with pytest.raises(InputsDiffer, match="was not finished"):
            fetched(f"{prefix}/{folder}")
    baton("data", "push", place, prefix).ok()
    assert fetched(f"{prefix}/") == files_below(place)
    assert fetched(f"{prefix}/dogs/") == files_below(place / "dogs")
    assert stack.read(f"{prefix}/cats/{DATASET_MANIFEST}", "training-data") == cats


def test_what_was_removed_here_stays_and_is_told_until_delete_says_otherwise(
    baton: Baton, stack: Stack, tmp_path: Path, fetched: Fetched
) -> None:
    prefix = unique("set")
    place = write_files(tmp_path / "set", {**numbered("a/"), "b/1": b"1", "b/2": b"2", "c": b"c"})
    baton("data", "push", place / "b", f"{prefix}/b").ok()
    baton("data", "push", place, prefix).ok()
    beside = write_files(tmp_path / "beside", {"x": b"x"})
    baton("data", "push", beside, f"{prefix}-other").ok()
    everything = keys(stack, prefix)
    for gone in ("a/00", "a/01", "a/02", "b/2"):
        (place / gone).unlink()
    extra = [f"{prefix}/{gone}" for gone in ("a/00", "a/01", "a/02", "b/2")]
    said = baton("data", "push", place, prefix).ok()
    assert f"4 stored files below {prefix}/, not in {place} but still in the data set" in said.err
    assert "a/00, a/01, a/02, ...; --delete" in said.err
    told = baton("data", "push", place, prefix, "--json").ok().json
    assert (told["not_in_dir"], told["deleted"]) == (extra, [])
    said = baton("data", "push", place, prefix, "--delete", "--dry-run").ok()
    assert f"Would delete 4 stored files below {prefix}/, not in {place}: a/00" in said.err
    assert keys(stack, prefix) == everything
    told = baton("data", "push", place, prefix, "--delete", "--json").ok().json
    assert (told["not_in_dir"], told["deleted"]) == (extra, extra)
    assert keys(stack, prefix) == everything - set(extra)
    assert keys(stack, f"{prefix}-other") == {f"{prefix}-other/x"}
    assert {file.path for file in manifest(stack, f"{prefix}/").files} == files_below(place).keys()
    assert [file.path for file in manifest(stack, f"{prefix}/b/").files] == ["1"]
    assert fetched(f"{prefix}/") == files_below(place)
    assert fetched(f"{prefix}/b/") == {"1": b"1"}
    again = baton("data", "push", place, prefix, "--delete").ok()
    assert "stored file" not in again.err


def test_a_deletion_that_was_killed_is_finished_by_a_repeat(
    baton: Baton, stack: Stack, tmp_path: Path, fetched: Fetched
) -> None:
    prefix = unique("set")
    place = write_files(tmp_path / "set", {"a": b"a", "b": b"b"})
    baton("data", "push", place, prefix).ok()
    (place / "a").unlink()
    whole = manifest(stack, f"{prefix}/")
    stack.write(
        f"{prefix}/{DATASET_MANIFEST}",
        whole.model_copy(update={"unfinished": True}).model_dump_json().encode(),
        bucket="training-data",
    )
    with pytest.raises(InputsDiffer, match="was not finished"):
        fetched(f"{prefix}/")
    baton("data", "push", place, prefix, "--delete").ok()
    assert fetched(f"{prefix}/") == {"b": b"b"}
    assert [file.path for file in manifest(stack, f"{prefix}/").files] == ["b"]


def test_all_files_sent_and_no_manifest_is_finished_by_a_repeat_that_sends_nothing(
    baton: Baton, stack: Stack, tmp_path: Path, fetched: Fetched
) -> None:
    prefix = unique("set")
    place = write_files(tmp_path / "set", {"a": b"a"})
    baton("data", "push", place, prefix).ok()
    whole = stack.read(f"{prefix}/{DATASET_MANIFEST}", "training-data")
    unfinished = manifest(stack, f"{prefix}/").model_copy(update={"unfinished": True})
    stack.write(f"{prefix}/{DATASET_MANIFEST}", unfinished.model_dump_json().encode(), bucket="training-data")
    baton("data", "push", place, prefix, "--dry-run").ok()
    assert manifest(stack, f"{prefix}/") == unfinished, "a dry run writes nothing"
    assert baton("data", "push", place, prefix, "--json").ok().json["sent"] == []
    assert stack.read(f"{prefix}/{DATASET_MANIFEST}", "training-data") == whole
    assert fetched(f"{prefix}/") == {"a": b"a"}
