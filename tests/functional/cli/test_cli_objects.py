"""`baton data` and `baton fetch` transfer only changes, verify them, and finish after any interruption."""

from __future__ import annotations

import os
import random
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from baton.contract.jobs.job import JobState
from baton.contract.objects.dataset_manifest import DATASET_MANIFEST, DatasetManifest, is_manifest
from baton.contract.objects.parts import PARTS_FROM_BYTES
from baton.contract.worker.calls import DeclaredArtifact
from tests.functional.cli import people
from tests.functional.cli.people import Baton, Labour, finished, submit
from tests.kits.clouds.emulator import unique
from tests.kits.files.directories import files_below, write_files
from tests.kits.stack.stack import Stack
from tests.kits.waiting import until

pytestmark = [pytest.mark.emulator, pytest.mark.processes]


def stored(stack: Stack, prefix: str) -> dict[str, bytes]:
    keys = [key for key in stack.keys_below(prefix + "/", "training-data") if not is_manifest(key)]
    return {key.removeprefix(prefix + "/"): stack.read(key, "training-data") for key in keys}


def test_push_sends_what_is_new(baton: Baton, stack: Stack, tmp_path: Path) -> None:
    prefix = unique("set")
    place = write_files(tmp_path / "set", {"a.txt": b"a", "b ü/c.txt": b"c" * 1000, "empty": b""})
    assert baton("data", "push", place, prefix, "--dry-run", "--json").ok().json["to_send"] == [
        f"{prefix}/a.txt",
        f"{prefix}/b ü/c.txt",
        f"{prefix}/empty",
    ]
    assert stored(stack, prefix) == {}
    first = baton("data", "push", place, prefix + "/").ok()
    assert first.out == f"3 files (1.0 kB) sent to {prefix}/, 0 files unchanged\n"
    assert stored(stack, prefix) == files_below(place)
    again = baton("data", "push", place, prefix, "--json").ok().json
    assert (again["sent"], again["bytes"], again["unchanged"]) == ([], 0, 3)
    (place / "a.txt").write_bytes(b"b")
    (place / "new").write_bytes(b"new")
    changed = baton("data", "push", place, prefix, "--json").ok().json
    assert (changed["sent"], changed["unchanged"]) == ([f"{prefix}/a.txt", f"{prefix}/new"], 2)
    assert stored(stack, prefix) == files_below(place)


def named(stack: Stack, prefix: str) -> dict[str, str]:
    """BLAKE3s by path, as the manifest of the data set tells."""
    manifest = DatasetManifest.model_validate_json(stack.read(f"{prefix}/{DATASET_MANIFEST}", "training-data"))
    return {file.path: file.blake3 for file in manifest.files}


def test_a_push_ends_with_a_manifest_of_all_that_is_there(baton: Baton, stack: Stack, tmp_path: Path) -> None:
    prefix = unique("set")
    one = write_files(tmp_path / "one", {"a.txt": b"a", "sub/a.txt": b"other"})
    baton("data", "push", one, prefix).ok()
    assert named(stack, prefix) == {path: blake3(data).hexdigest() for path, data in files_below(one).items()}
    requests = len(stack.s3.requests())
    baton("data", "push", one, prefix).ok()
    assert stack.s3.requests()[requests:] == [], "nothing is new"
    two = write_files(tmp_path / "two", {"b.txt": b"b"})
    baton("data", "push", two, prefix).ok()
    everything = files_below(one) | files_below(two)
    assert named(stack, prefix) == {path: blake3(data).hexdigest() for path, data in everything.items()}
    (one / "a.txt").write_bytes(b"changed")
    baton("data", "push", one, prefix).ok()
    assert named(stack, prefix)["a.txt"] == blake3(b"changed").hexdigest()
    assert named(stack, prefix).keys() == everything.keys()


def test_equal_folders_are_equal_bytes_wherever_they_come_from(baton: Baton, stack: Stack, tmp_path: Path) -> None:
    """The stored bytes of a folder do not depend on the order, times, owners or rights of its files."""
    files = {f"{number}.txt": b"%d" % number for number in range(20)}
    places = [
        write_files(tmp_path / "one", {**files, "sub/a": b"a"}),
        write_files(tmp_path / "two", {"sub/a": b"a", **dict(reversed(files.items()))}),
    ]
    for path in places[1].glob("*.txt"):
        os.utime(path, (1, 1))
        path.chmod(0o600)
    found = []
    for place in places:
        prefix = unique("set")
        baton("data", "push", place, prefix).ok()
        keys = stack.keys_below(prefix + "/", "training-data")
        found.append({key.removeprefix(prefix): stack.read(key, "training-data") for key in keys})
    assert found[0] == found[1] and len(found[0]) == 22


def test_a_push_that_stopped_before_its_manifest_is_finished_by_a_repeat(
    baton: Baton, stack: Stack, tmp_path: Path
) -> None:
    prefix = unique("set")
    place = write_files(tmp_path / "set", {"a.txt": b"a"})
    with ExitStack() as sending:
        file = sending.enter_context(stack.s3.holding(rf"PUT /.*{prefix}/a\.txt"))
        running = baton.started("data", "push", place, prefix)
        file.wait()
        with stack.s3.holding(rf"PUT /.*{prefix}/\.baton/", drop=True) as held:
            sending.close()
            held.wait()
            running.kill()
    assert stored(stack, prefix) == {"a.txt": b"a"}
    assert baton("data", "push", place, prefix, "--json").ok().json["unchanged"] == 1
    assert named(stack, prefix) == {"a.txt": blake3(b"a").hexdigest()}
    assert b"unfinished" not in stack.read(f"{prefix}/{DATASET_MANIFEST}", "training-data")


def test_ls(baton: Baton, tmp_path: Path) -> None:
    prefix = unique("set")
    baton("data", "push", write_files(tmp_path / "set", {"a": b"12345", "b": b""}), prefix).ok()
    listed = baton("data", "ls", prefix, "--json").ok().json
    (manifest,) = [one for one in listed if is_manifest(one["key"])]
    listed.remove(manifest)
    assert [(one["key"], one["size_bytes"]) for one in listed] == [(f"{prefix}/a", 5), (f"{prefix}/b", 0)]
    shown = baton("data", "ls", prefix).ok()
    assert f"{prefix}/a" in shown.out
    assert "3 objects, " in shown.err
    assert baton("data", "ls", "nothing-here", "--json").ok().json == []
    baton("data", "ls", "--bucket", "elsewhere").failed(3, "unknown_bucket")
    baton("data", "ls", "../up").failed(3, "(field prefix)")


def test_push_interrupted_is_finished_by_a_repeat(baton: Baton, stack: Stack, tmp_path: Path) -> None:
    prefix = unique("set")
    place = write_files(tmp_path / "set", {f"{number:02}": b"%d" % number * 100_000 for number in range(12)})
    with stack.s3.holding(rf"PUT /.*{prefix}/0[6-9]") as held:
        running = baton.started("data", "push", place, prefix)
        held.wait()
        running.interrupt().failed(130, "interrupted")
    there = until(lambda: stored(stack, prefix), what="what was sent before")
    assert {name: data for name, data in files_below(place).items() if name in there} == there, "nothing is half-stored"
    repeated = baton("data", "push", place, prefix, "--json").ok().json
    assert 0 < len(repeated["sent"]) <= 12
    assert len(repeated["sent"]) + repeated["unchanged"] == 12
    assert stored(stack, prefix) == files_below(place)


LARGE = random.Random(1).randbytes(PARTS_FROM_BYTES + 1000)
"""Four parts of 16 MiB, and a small one."""


def parts_sent(stack: Stack, since: int = 0) -> list[int]:
    """Numbers of the parts that came to the store, one behind the other."""
    puts = (re.fullmatch(r"PUT /.*\?partNumber=(\d+)", request) for request in stack.s3.requests()[since:])
    return sorted(int(found[1]) for found in puts if found)


def test_push_killed_within_a_large_file_sends_only_the_missing_parts(
    baton: Baton, stack: Stack, tmp_path: Path
) -> None:
    prefix = unique("set")
    place = write_files(tmp_path / "set", {"large.bin": LARGE, "small.txt": b"small"})
    began = len(stack.s3.requests())
    with stack.s3.holding(rf"PUT /.*{prefix}/large\.bin\?partNumber=[25]", drop=True) as held:
        running = baton.started("data", "push", place, prefix)
        held.wait_for(2)
        until(lambda: stack.parts_of(f"{prefix}/large.bin", "training-data") == [1, 3, 4], what="the other parts")
        running.kill()
    assert parts_sent(stack, began) == [1, 2, 3, 4, 5]
    assert stored(stack, prefix) == {"small.txt": b"small"}, "parts are no object"
    again = len(stack.s3.requests())
    repeated = baton("data", "push", place, prefix, "--json").ok().json
    assert parts_sent(stack, again) == [2, 5]
    assert (repeated["sent"], repeated["unchanged"]) == ([f"{prefix}/large.bin"], 1)
    assert stored(stack, prefix) == files_below(place)
    assert stack.parts_of(f"{prefix}/large.bin", "training-data") == [], "the upload has ended"
    last = len(stack.s3.requests())
    unchanged = baton("data", "push", place, prefix, "--json").ok().json
    assert (unchanged["sent"], unchanged["unchanged"]) == ([], 2)
    assert stack.s3.requests()[last:] == [], "a large file is known by its etag"


def test_a_large_output_goes_up_in_parts_and_is_fetched_as_it_was(
    baton: Baton, stack: Stack, labour: Labour, tmp_path: Path
) -> None:
    began = len(stack.s3.requests())
    job_id = finished(baton, labour, tmp_path, {"model.bin": LARGE, "notes": b"small"})
    assert parts_sent(stack, began) == [1, 2, 3, 4, 5]
    baton("fetch", job_id, tmp_path / "got").ok()
    assert files_below(tmp_path / "got") == {"model.bin": LARGE, "notes": b"small"}


OUTPUTS = {"model.bin": b"weights" * 50_000, "samples/1 ü.png": b"png", "empty": b""}


def test_fetch(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = finished(baton, labour, tmp_path, OUTPUTS)
    said = baton("fetch", job_id, tmp_path / "got").ok()
    assert said.out == f"3 files (350.0 kB) fetched into {tmp_path / 'got'}, 0 files unchanged\n"
    assert files_below(tmp_path / "got") == OUTPUTS
    (tmp_path / "got" / "empty").unlink()
    again = baton("fetch", job_id[:12], tmp_path / "got", "--json").ok().json
    assert again["bytes"] == 0, "what is there is not fetched again"
    assert {one["path"]: one["fetched"] for one in again["files"]} == {
        "model.bin": False,
        "samples/1 ü.png": False,
        "empty": True,
    }
    assert files_below(tmp_path / "got") == OUTPUTS


def test_fetch_overwrites_nothing_unasked(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = finished(baton, labour, tmp_path, OUTPUTS)
    mine = write_files(tmp_path / "got", {"model.bin": b"mine", "notes.txt": b"keep"})
    baton("fetch", job_id, mine).failed(2, "model.bin", "would be overwritten", "--force")
    assert files_below(mine) == {"model.bin": b"mine", "notes.txt": b"keep"}
    baton("fetch", job_id, mine, "--force").ok()
    assert files_below(mine) == {**OUTPUTS, "notes.txt": b"keep"}


def test_a_checkpoint_is_fetched_as_files(baton: Baton, labour: Labour, stack: Stack, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path)
    labour.claim()
    labour.commit(10)
    labour.commit(20)
    said = baton("fetch", job_id[:12], tmp_path / "got", "--checkpoint", "10").ok()
    assert said.out == f"checkpoint of step 10 (2 B) fetched into {tmp_path / 'got/checkpoint-10'}\n"
    assert files_below(tmp_path / "got") == {"checkpoint-10/model.bin": b"10"}
    baton("fetch", job_id, tmp_path / "got", "--checkpoint", "10").failed(2, "checkpoint-10 exists", "--force")
    again = baton("fetch", job_id, tmp_path / "got", "--checkpoint", "10", "--force", "--json").ok().json
    assert (again["step"], again["bytes"]) == (10, 2)
    baton("fetch", job_id, tmp_path / "got", "--checkpoint", "11").failed(3, "no checkpoint at step 11")
    baton("fetch", job_id, tmp_path / "got", "--checkpoint", "10", "--so-far").failed(2, "--checkpoint", "--so-far")
    for key in stack.keys_below("packs/"):
        if stack.read(key) == b"20":
            stack.write(key, b"21")
    baton("fetch", job_id, tmp_path / "got", "--checkpoint", "20").failed(1, "step 20 is damaged", "baton show")
    assert files_below(tmp_path / "got") == {"checkpoint-10/model.bin": b"10"}, "no part of a damaged checkpoint"
    assert stack.job(job_id).checkpoint_step == 20


def test_fetch_bad_input(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path)
    baton("fetch", job_id, tmp_path / "got").failed(1, "is pending", f"baton watch {job_id[:8]}")
    baton("stop", job_id).ok()
    baton("fetch", job_id, tmp_path / "got").failed(1, "is canceled", f"baton retry {job_id[:8]}")
    nothing = finished(baton, labour, tmp_path, {})
    baton("fetch", nothing, tmp_path / "got").failed(2, "declared no outputs")
    assert not (tmp_path / "got").exists()
    done = finished(baton, labour, tmp_path, {"m": b"x"})
    (tmp_path / "file").touch()
    baton("fetch", done, tmp_path / "file").failed(2, "is not a directory")


def test_altered_bytes_never_appear(baton: Baton, labour: Labour, stack: Stack, tmp_path: Path) -> None:
    job_id = finished(baton, labour, tmp_path, OUTPUTS)
    key = next(one.key for one in stack.job(job_id).artifacts if one.path == "model.bin")
    stack.write(key, b"WEIGHTS" * 50_000)
    baton("fetch", job_id, tmp_path / "got").failed(1, "model.bin")
    assert not (tmp_path / "got" / "model.bin").exists()
    assert not list((tmp_path / "got").rglob("*.part"))


def test_a_false_digest_is_found_by_fetch(
    baton: Baton, labour: Labour, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`complete` takes it, since size and CRC fit."""
    false = blake3(b"something else").hexdigest()
    honest = people.upload_artifacts

    def lying(*given: Any, **more: Any) -> list[DeclaredArtifact]:
        declared = honest(*given, **more)
        return [one.model_copy(update={"blake3": false}) if one.path == "model.bin" else one for one in declared]

    monkeypatch.setattr(people, "upload_artifacts", lying)
    job_id = finished(baton, labour, tmp_path, OUTPUTS)
    assert stack.job(job_id).state is JobState.COMPLETE
    got = tmp_path / "got"
    for _ in range(2):
        baton("fetch", job_id, got).failed(1, "digest_mismatch: ", "model.bin: BLAKE3 is", false, "baton retry")
        assert files_below(got) == {path: data for path, data in OUTPUTS.items() if path != "model.bin"}


def test_a_full_disk_is_one_line_and_a_repeat_goes_on(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    """A fetch to a full disk ends with one line, and a repeat goes on; /dev/full stands for the disk, without root."""
    # /dev/full refuses only writes: an empty file would fail at fsync, unlike on a disk.
    outputs = {path: data for path, data in OUTPUTS.items() if data}
    job_id = finished(baton, labour, tmp_path, outputs)
    got = tmp_path / "got"
    full = Path(__file__).with_name("full_disk_baton.py")
    said = baton.started("fetch", job_id, got, wrapper=full, FULL_DISK=str(got)).end()
    said.failed(1, "no space left on this machine", "Free disk space, then repeat")
    assert said.err.count("writing") == 1
    assert "model.bin" not in files_below(got)
    assert not list(got.rglob("*.part"))
    baton("fetch", job_id, got).ok()
    assert files_below(got) == outputs


def test_a_place_that_is_none(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = finished(baton, labour, tmp_path, OUTPUTS)
    (tmp_path / "file").write_bytes(b"mine")
    baton("fetch", job_id, tmp_path / "file").failed(2, "file is not a directory")
    baton("fetch", job_id, tmp_path / "file" / "below").failed(1, "Not a directory", "Correct this, then repeat")
    (tmp_path / "got" / "model.bin").mkdir(parents=True)
    baton("fetch", job_id, tmp_path / "got").failed(1, "is a directory already", "Correct this, then repeat")
    assert files_below(tmp_path / "got") == {}
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_small_disk_that_fills_up(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    """A fetch to a real disk that fills up midway ends with one line, and a repeat goes on."""
    job_id = finished(baton, labour, tmp_path, OUTPUTS)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", disk], check=False, capture_output=True)
    if mount.returncode:
        pytest.skip("this machine may not mount")
    try:
        said = baton("fetch", job_id, disk).failed(1, "no space left on this machine", "Free disk space, then repeat")
        assert said.err.count("writing") == 1
        assert not list(disk.rglob("*.part"))
        subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        baton("fetch", job_id, disk).ok()
        assert files_below(disk) == OUTPUTS
    finally:
        subprocess.run(["umount", disk], check=True)


def test_fetch_interrupted_is_finished_by_a_repeat(baton: Baton, labour: Labour, stack: Stack, tmp_path: Path) -> None:
    job_id = finished(baton, labour, tmp_path, OUTPUTS)
    got = tmp_path / "got"
    with stack.s3.holding(r"GET /.*model\.bin") as held:
        running = baton.started("fetch", job_id, got)
        held.wait()
        until((got / "samples/1 ü.png").exists)
        running.interrupt().failed(130, "interrupted")
    assert "model.bin" not in files_below(got)
    assert not list(got.rglob("*.part"))
    baton("fetch", job_id, got).ok()
    assert files_below(got) == OUTPUTS


def test_fetch_killed_leaves_nothing_that_a_repeat_does_not_clear(
    baton: Baton, labour: Labour, stack: Stack, tmp_path: Path
) -> None:
    job_id = finished(baton, labour, tmp_path, OUTPUTS)
    got = tmp_path / "got"
    write_files(
        got, {f".{'0123456789abcdef'}.part": b"half", "samples/.fedcba9876543210.part": b"half", ".my.part": b"mine"}
    )
    with stack.s3.holding(r"GET /.*model\.bin") as held:
        running = baton.started("fetch", job_id, got)
        held.wait()
        baton("fetch", job_id, got).failed(2, "another fetch", "is running")
        running.kill()
    baton("fetch", job_id, got).ok()
    assert files_below(got) == {**OUTPUTS, ".my.part": b"mine"}
