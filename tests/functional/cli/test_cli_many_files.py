"""More files than one list page: push, list, push again, fetch by a worker."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from baton.contract.objects.dataset_manifest import DATASET_MANIFEST
from gpu_client.agent.io.inputs import InputsDiffer, fetch_inputs
from tests.functional.cli.people import Baton, Labour, submit
from tests.kits.clouds.emulator import unique
from tests.kits.files.directories import files_below, write_files
from tests.kits.stack.stack import Stack

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

MORE_THAN_A_PAGE = 1010


def test_a_set_of_more_than_a_thousand_files(baton: Baton, labour: Labour, stack: Stack, tmp_path: Path) -> None:
    """More files than a list page are pushed, listed, pushed again and fetched; two folders have equal file names."""
    prefix = unique("set")
    # Their first half ends within a page, and names sort otherwise than numbers.
    names = [f"{folder}/{number}.jpg" for folder in ("left", "right") for number in range(MORE_THAN_A_PAGE // 4)]
    files = {name: f"picture {name}".encode() for name in names}
    files |= {name.replace(".jpg", ".txt"): f"a photo of {name}".encode() for name in names}
    files |= {f"more/{number}.bin": b"%d" % number for number in range(MORE_THAN_A_PAGE - len(files))}
    assert len(files) == MORE_THAN_A_PAGE
    place = write_files(tmp_path / "set", files)

    sent = baton("data", "push", "--no-check", place, prefix, "--json").ok().json
    assert len(sent["sent"]) == MORE_THAN_A_PAGE
    listed = {one["key"] for one in baton("data", "ls", prefix + "/", "--json").ok().json}
    assert listed == {f"{prefix}/{name}" for name in (*files, DATASET_MANIFEST)}
    (place / "right/7.txt").write_bytes(b"another caption")
    again = baton("data", "push", "--no-check", place, prefix, "--json").ok().json
    assert (again["sent"], again["unchanged"]) == ([f"{prefix}/right/7.txt"], MORE_THAN_A_PAGE - 1)

    submit(baton, labour, tmp_path, inputs=[{"prefix": prefix + "/", "into": "instance"}])
    item = labour.claim()
    data = tmp_path / "data"
    fetched = fetch_inputs(
        stack.client, stack.client.transfer, item, data, require_free=lambda _: None, cancel=threading.Event()
    )
    assert fetched == MORE_THAN_A_PAGE
    assert files_below(data / "instance") == files | {"right/7.txt": b"another caption"}


def test_a_folder_that_was_pushed_by_itself_before_and_then_with_what_is_above_it(
    baton: Baton, labour: Labour, stack: Stack, tmp_path: Path
) -> None:
    """A push of the outer folder also rewrites the manifest of an inner folder that was pushed before."""
    prefix = unique("set")
    place = write_files(tmp_path / "set", {"dogs/1.jpg": b"old", "dogs/2.jpg": b"same", "cats/1.jpg": b"cat"})
    baton("data", "push", "--no-check", place / "dogs", f"{prefix}/dogs").ok()
    (place / "dogs/1.jpg").write_bytes(b"newer")
    (place / "dogs/3.jpg").write_bytes(b"new")
    baton("data", "push", "--no-check", place, prefix).ok()
    for number, folder in enumerate(("", "dogs/")):
        submit(baton, labour, tmp_path, inputs=[{"prefix": f"{prefix}/{folder}"}])
        data = tmp_path / f"data-{number}"
        fetch_inputs(
            stack.client,
            stack.client.transfer,
            labour.claim(f"m-{number}"),
            data,
            require_free=lambda _: None,
            cancel=threading.Event(),
        )
        assert files_below(data) == files_below(place / folder)
    again = baton("data", "push", "--no-check", place, prefix, "--json").ok().json
    assert again["sent"] == []
    # And the other way about.
    (place / "dogs/2.jpg").write_bytes(b"other")
    baton("data", "push", "--no-check", place / "dogs", f"{prefix}/dogs").ok()
    submit(baton, labour, tmp_path, inputs=[{"prefix": f"{prefix}/"}])
    fetch_inputs(
        stack.client,
        stack.client.transfer,
        labour.claim("m-2"),
        tmp_path / "data",
        require_free=lambda _: None,
        cancel=threading.Event(),
    )
    assert files_below(tmp_path / "data") == files_below(place)


def test_a_part_of_a_pushed_folder_is_verified_as_the_whole_is(
    baton: Baton, labour: Labour, stack: Stack, tmp_path: Path
) -> None:
    """A worker verifies a part of a pushed folder by the folder's manifest, which lies above the part's list."""
    prefix = unique("set")
    place = write_files(tmp_path / "set", {"dogs/1.jpg": b"one", "dogs/2.jpg": b"two", "cats/1.jpg": b"cat"})
    baton("data", "push", "--no-check", place, f"sets/{prefix}").ok()

    def fetched(number: int, data: Path) -> int:
        submit(baton, labour, tmp_path, inputs=[{"prefix": f"sets/{prefix}/dogs/"}])
        return fetch_inputs(
            stack.client,
            stack.client.transfer,
            labour.claim(f"part-{number}"),
            data,
            require_free=lambda _: None,
            cancel=threading.Event(),
        )

    assert fetched(0, tmp_path / "whole") == 2
    assert files_below(tmp_path / "whole") == files_below(place / "dogs")
    stack.write(f"sets/{prefix}/dogs/2.jpg", b"owt", bucket="training-data")
    with pytest.raises(InputsDiffer, match="other bytes than were pushed"):
        fetched(1, tmp_path / "altered")
    stack.write(f"sets/{prefix}/dogs/2.jpg", b"longer", bucket="training-data")
    with pytest.raises(InputsDiffer, match=f"has 6 bytes, and was pushed with 3: push sets/{prefix}/ again"):
        fetched(2, tmp_path / "longer")
    baton("data", "push", "--no-check", place, f"sets/{prefix}").ok()
    assert fetched(3, tmp_path / "mended") == 2
