"""`baton ring`: create, inspect and verify; each error is one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gpu_client.cli.core.output import CommandOutput
from gpu_client.cli.core.session import CliSession
from gpu_client.cli.main import main
from gpu_client.ring.core.ring import make_ring, open_ring
from gpu_client.ring.format.manifest import RingManifest, manifest_key
from gpu_client.ring.format.records import SAMPLES, Versioned
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.filesystem import DirectoryStore
from gpu_client.ring.tools.status import read_status


class Command:
    """Runs `baton ring ...` in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capture = capture
        self._environ = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        code = main(["ring", *map(str, arguments)], CliSession(environ=self._environ))
        said = self._capture.readouterr()
        assert "Traceback" not in said.err + said.out
        return code, said.out, said.err


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)


def filled(place: Path, samples: int) -> None:
    with RingWriter(open_ring(str(place)), "w") as writer:
        for number in range(samples):
            writer.put({"x": np.full(10, number)}, seed=number)


def test_a_ring_is_made_filled_looked_at_and_verified(command: Command, tmp_path: Path) -> None:
    place = tmp_path / "ring"
    assert command("make", place, "--set", "cap=4", "--set", "retain=2")[0] == 0
    assert command("make", place, "--set", "retain=2", "--set", "cap=4")[0] == 0
    filled(place, 6)
    code, out, _ = command("status", place, "--json")
    said = json.loads(out)
    assert code == 0
    assert (said["readable"], said["cap"], said["inserted"], said["finished"], said["read"]) == (4, 4, 6, 0, 0)
    code, out, _ = command("status", place)
    assert "4 of 4" in out
    code, out, err = command("verify", place)
    assert (code, err.strip()) == (0, "4 objects read, 0 damaged")
    code, out, _ = command("watch", place, "--looks", "2", "--every", "0.1", "--json")
    assert [json.loads(line)["put_per_s"] for line in out.splitlines()] == [None, 0.0]


def test_what_is_damaged_is_found(command: Command, tmp_path: Path) -> None:
    place = tmp_path / "ring"
    command("make", place, "--set", "cap=3")
    filled(place, 3)
    ring = open_ring(str(place))
    one, two, _ = ring.store.keys(SAMPLES)
    path = place / one
    data = bytearray(path.read_bytes())
    data[-70] ^= 4
    path.write_bytes(data)
    (place / two).unlink()
    code, out, _ = command("verify", place, "--json")
    assert code == 1
    said = json.loads(out)
    assert said["objects"] == 3
    assert set(said["damaged"]) == {one, two}
    assert said["damaged"][two] == "missing"


def test_what_is_damaged_is_repaired(command: Command, tmp_path: Path) -> None:
    place = tmp_path / "ring"
    command("make", place, "--set", "cap=3")
    filled(place, 3)
    (place / open_ring(str(place)).store.keys(SAMPLES)[0]).unlink()
    (place / "pointer").write_bytes(b"")
    code, _, err = command("status", place)
    assert code == 1
    assert "baton ring verify RING --repair" in err
    code, out, err = command("verify", place)
    assert code == 1
    assert out.splitlines()[0].startswith("pointer: unreadable")
    assert err.splitlines() == [
        "3 objects read, 2 damaged",
        "Exclude the damaged objects with: baton ring verify RING --repair",
    ]
    code, _, err = command("verify", place, "--repair")
    assert code == 0
    assert err.splitlines()[-1].startswith("repaired: 2 samples readable in manifest ")
    code, out, _ = command("verify", place, "--repair", "--json")
    said = json.loads(out)
    assert (code, said["objects"], said["damaged"], said["readable"]) == (0, 2, {}, 2)
    assert command("verify", place)[0] == 0


def test_a_terminal_is_drawn_anew_and_keeps_the_last_look(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "ring"
    command("make", place, "--set", "cap=4")
    filled(place, 3)
    monkeypatch.setattr(CommandOutput, "live", True)
    code, out, err = command("watch", place, "--looks", "2", "--every", "0.1")
    assert (code, out) == (0, "")
    assert "75 %: 3 of 4 readable" in err
    assert "waits    readers unknown" in err
    code, out, err = command("watch", place, "--looks", "1", "--json")
    assert (len(out.splitlines()), err) == (1, "")


def test_watching_goes_on_when_the_ring_blinks(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "ring"
    command("make", place, "--set", "cap=4")
    filled(place, 3)
    record, asked = DirectoryStore.record, []

    def blinking(store: DirectoryStore, key: str) -> Versioned | None:
        if key == "pointer":
            asked.append(key)
            if len(asked) in (2, 3):
                raise OSError(5, "Input/output error")
        return record(store, key)

    monkeypatch.setattr(DirectoryStore, "record", blinking)
    code, out, err = command("watch", place, "--looks", "4", "--every", "0.1", "--json")
    assert (code, len(out.splitlines())) == (0, 2)
    assert err.splitlines() == ["[Errno 5] Input/output error. Retrying; Ctrl-C ends the command."]


def test_a_manifest_that_is_replaced_while_it_is_looked_at_is_no_error(tmp_path: Path) -> None:
    ring = make_ring(str(tmp_path / "ring"), RingSettings(cap=4, retain=2))
    filled(tmp_path / "ring", 3)
    manifest, gone = ring.manifest, []

    def late(number: int) -> RingManifest:
        if not gone:
            gone.append(number)
            filled(tmp_path / "ring", 5)
            ring.store.delete([manifest_key(number)])
        return manifest(number)

    ring.manifest = late  # type: ignore[method-assign]
    assert read_status(ring).inserted == 8
    assert gone


def test_a_generation_that_is_not_whole_is_published_when_asked(command: Command, tmp_path: Path) -> None:
    place = tmp_path / "ring"
    command("make", place, "--set", "cap=5", "--set", "mode=generation")
    filled(place, 3)
    assert json.loads(command("status", place, "--json")[1])["finished"] == 3
    code, _, err = command("publish", place)
    assert (code, err.strip()) == (0, "3 samples readable in manifest 2")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["status", "nowhere"], 1, "there is no directory nowhere"),
        (["make", "r", "--set", "cap=0"], 2, "invalid ring settings"),
        (["make", "r", "--set", "cap"], 2, "'cap' is not NAME=VALUE"),
        (["make", "r", "--set", "cap=3", "--set", "capp=3"], 2, "invalid ring settings"),
        (["make", "r", "--set", "cap=3", "--set", "min_size=4"], 2, "invalid ring settings"),
        (["make", "r", "--set", "cap=3", "--set", "publish_every_samples=4"], 2, "invalid ring settings"),
        (["make", "a file/r", "--set", "cap=3"], 1, "a file/r cannot hold a ring: Not a directory"),
        (["status", "empty"], 1, "there is no ring here"),
    ],
)
def test_what_is_wrong_is_said(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").touch()
    (tmp_path / "empty").mkdir()
    found, out, err = command(*arguments)
    assert (found, out) == (code, "")
    assert err.startswith(f"baton: {said}")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name == "nowhere") == []


def test_another_ring_of_that_name_is_refused(command: Command, tmp_path: Path) -> None:
    place = tmp_path / "ring"
    command("make", place, "--set", "cap=4")
    code, _, err = command("make", place, "--set", "cap=5")
    assert code == 1
    assert err.startswith("baton: a ring exists with cap 4 instead of 5")
