"""`baton data prefetch` from the Hub: selection, verification, faults, a killed process. Needs no control plane."""

from __future__ import annotations

import json
import random
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_client.cli.data import prefetch as command
from gpu_client.datasets.prefetch import partial_file, prefetcher
from gpu_client.datasets.prefetch.partial_file import UNIT_BYTES, partial_path
from gpu_client.datasets.prefetch.selection import ListedFile
from gpu_client.transport.retry import RetryPolicy
from tests.functional.cli.people import Baton
from tests.kits.files.directories import files_below, write_files
from tests.kits.network.fake_hub import COMMIT, TOKEN, FakeHub, _Handler, busy, sha256
from tests.kits.waiting import until

WEB, MATH = "hf:acme/web", "hf:acme/math"


def shards(name: str, count: int, size_bytes: int = 300) -> dict[str, bytes]:
    draw = random.Random(name)
    return {f"data/{name} {number:02}.parquet": draw.randbytes(size_bytes + number) for number in range(count)}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """A Hub with two data sets; no request may break its rules."""
    small = {"README.md": b"# web", ".gitattributes": b"*", "data/.hidden": b"x", "data/index.json": b"{}"}
    sets = {"acme/web": {**shards("web", 6), **small}, "acme/math": shards("math", 3)}
    with FakeHub(sets) as running:
        yield running
    assert running.leaks == []


@pytest.fixture
def user(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Baton]:
    """A user with a token and without a profile; no output contains the token."""
    monkeypatch.setattr(command, "HUB_POLICY", RetryPolicy(max_tries=4, first_delay_s=0.01, max_delay_s=0.05))
    made = Baton({"HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}, capsys, monkeypatch)
    yield made
    assert TOKEN not in "".join(made.heard)
    assert "Traceback" not in "".join(made.heard)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "datasets"


def without_manifest(place: Path) -> dict[str, bytes]:
    return {path: data for path, data in files_below(place).items() if path != "prefetch.json"}


def below(name: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"hf/{name}/{path}": data for path, data in files.items()}


def test_a_rank_fetches_its_share(hub: FakeHub, user: Baton, place: Path) -> None:
    """A foreign host in the link to the next page receives no request, because each request carries the token."""
    hub.next_page_host = "https://elsewhere.invalid"
    said = user("data", "prefetch", WEB, MATH, "--rank", 1, "--world", 3, "--filter", ".parquet", "--into", place).ok()
    web, math = shards("web", 6), shards("math", 3)
    share = {path: web[path] for path in sorted(web)[1::3]}
    expected = {**below("acme/web", share), **below("acme/math", {p: math[p] for p in sorted(math)[1::3]})}
    assert without_manifest(place) == expected
    total = sum(map(len, expected.values()))
    assert said.out == f"3 files ({total} B) fetched into {place}, 0 files unchanged\n"
    assert len([call for call in hub.served("hub") if "/tree/" in call]) == 5 + 2, "two entries on each page"
    manifest = json.loads((place / "prefetch.json").read_text())
    assert (manifest["version"], manifest["rank"], manifest["world"]) == (1, 1, 3)
    assert [(one["name"], one["revision"], one["ratio"]) for one in manifest["sources"]] == [
        (WEB, COMMIT, None),
        (MATH, COMMIT, None),
    ]
    assert manifest["sources"][0]["files"] == [
        {"path": f"hf/acme/web/{path}", "size_bytes": len(data), "checksum": f"sha256:{sha256(data)}"}
        for path, data in share.items()
    ]


def test_small_files_of_a_folder_come_from_the_hub_itself(hub: FakeHub, user: Baton, place: Path) -> None:
    hub.private = True
    user("data", "prefetch", WEB + "/data", "--filter", "index", "--into", place).ok()
    assert without_manifest(place) == {"hf/acme/web/data/index.json": b"{}"}
    assert hub.served("cdn") == []
    checksum = json.loads((place / "prefetch.json").read_text())["sources"][0]["files"][0]["checksum"]
    assert checksum == "git-blob:9e26dfeeb6e641a33dae4961196235bdb965b21b", "as `git hash-object` prints"


def test_ratios_and_a_dry_run(hub: FakeHub, user: Baton, place: Path) -> None:
    command = ("data", "prefetch", WEB + ":2", MATH + ":1", "--filter", "parquet", "--max-files", 4, "--into", place)
    said = user(*command, "--dry-run", "--json").ok().json
    assert [(one["ratio"], len(one["files"])) for one in said["sources"]] == [(2.0, 2), (1.0, 1)]
    assert said["to_fetch"] == {"files": 3, "bytes": 300 + 301 + 300}
    listed = user(*command, "--dry-run").ok().out
    assert "300 B  hf/acme/math/data/math 00.parquet\n" in listed
    assert listed.endswith(f"3 files (901 B) would be fetched into {place}, 0 files unchanged\n")
    assert not place.exists()
    assert not [call for call in hub.served("hub") if "/resolve/" in call]
    assert user(*command, "--json").ok().json["fetched"] == {"files": 3, "bytes": 901}


def test_a_repetition_verifies_and_fetches_the_damaged_file_only(hub: FakeHub, user: Baton, place: Path) -> None:
    user("data", "prefetch", MATH, "--into", place).ok()
    whole = without_manifest(place)
    damaged = place / "hf/acme/math/data/math 01.parquet"
    damaged.write_bytes(bytes(301))
    (damaged.parent / ("." + "0" * 16 + ".part")).write_bytes(b"of another version")
    hub.requests.clear()
    said = user("data", "prefetch", MATH, "--into", place).ok()
    assert said.out == f"1 file (301 B) fetched into {place}, 2 files unchanged\n"
    assert without_manifest(place) == whole
    assert hub.served("cdn") == [f"GET /{sha256(whole['hf/acme/math/data/math 01.parquet'])}"]


def test_a_token_file_opens_a_private_data_set(hub: FakeHub, user: Baton, place: Path, tmp_path: Path) -> None:
    hub.private = True
    del user.environ["HF_TOKEN"]
    arguments = ("data", "prefetch", MATH, "--into", place)
    user(*arguments).failed(3, f"source_missing: {MATH}: the Hub has no such data set, or the data set is private")
    user(*arguments, HF_TOKEN="hf_wrong").failed(3, "source_refused", "Invalid credentials", "HF_TOKEN")
    user(*arguments, HF_TOKEN="hf\nwrong").failed(3, "source_refused", "characters that no token has")
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    (tmp_path / ".cache/huggingface/token").write_text(TOKEN + "\n")
    user(*arguments).ok()
    assert len(without_manifest(place)) == 3


@pytest.mark.parametrize(
    ("name", "code", "parts"),
    [
        ("hf:acme", 2, ["invalid_source: 'hf:acme' is no data set of the Hub", "hf:ORG/NAME"]),
        ("hf:acme/none", 3, ["source_missing: hf:acme/none", "/datasets/acme/none"]),
        ("hf:acme/web@v2", 3, ["source_missing: hf:acme/web@v2: the Hub has no such revision or folder"]),
        ("hf:acme/web/none", 3, ["source_missing: hf:acme/web/none: the Hub has no such revision or folder"]),
        ("hf:acme/web:0", 2, ["invalid_source: the ratio of hf:acme/web is 0"]),
    ],
)
def test_names_without_a_data_set(user: Baton, place: Path, name: str, code: int, parts: list[str]) -> None:
    user("data", "prefetch", name, "--into", place).failed(code, *parts)
    assert not place.exists()


def test_usage(user: Baton, place: Path) -> None:
    user("data", "prefetch", WEB, "--rank", 3, "--world", 3).failed(2, "--rank is 3, with 3 ranks. Ranks are 0 to 2.")
    user("data", "prefetch", "digits", "--into", place).failed(2, "baton login")


def test_a_gated_data_set_is_refused(hub: FakeHub, user: Baton, place: Path) -> None:
    hub.gated = True
    user("data", "prefetch", MATH, "--into", place).failed(
        3, "source_refused", "permitted users only", f"{hub.url}/datasets/acme/math"
    )
    assert without_manifest(place) == {}


def test_a_busy_hub_is_asked_again_after_its_pause(hub: FakeHub, user: Baton, place: Path) -> None:
    """The second refusal states its pause in the Hub's own header only."""
    hub.script("/revision/main", busy(Retry_After="0"), busy(RateLimit='"api";r=0;t=0'))
    hub.script("00.parquet", busy(Retry_After="0"))
    hub.script(sha256(shards("math", 3)["data/math 01.parquet"]), busy(Retry_After="0"))
    user("data", "prefetch", MATH, "--into", place).ok()
    assert without_manifest(place) == below("acme/math", shards("math", 3))
    hub.script("/revision/main", busy(RateLimit='"api";r=0;t=4000'))
    user("data", "prefetch", MATH, "--into", place).failed(4, "no usable answer", "1 tries (last: 429)")


def test_bodies_that_end_early_and_expired_links_continue(hub: FakeHub, user: Baton, place: Path) -> None:
    size_bytes = 3 * UNIT_BYTES + 9
    data = hub.data_sets["acme/math"] = shards("math", 1, size_bytes)
    (content,) = data.values()

    def half(handler: _Handler) -> None:
        handler.send_data(content, sent=UNIT_BYTES + 100)

    def expire(handler: _Handler) -> None:
        hub.signature += 1
        type(handler).behave(handler)

    hub.script(sha256(content), half, expire)
    user("data", "prefetch", MATH, "--into", place).ok()
    assert without_manifest(place) == below("acme/math", data)
    ranges = [call.partition(" bytes=")[2] for call in hub.served("cdn")]
    assert ranges == ["", f"{UNIT_BYTES + 100}-{size_bytes - 1}", f"{UNIT_BYTES}-{size_bytes - 1}"]


def test_a_large_file_comes_in_ranges(hub: FakeHub, user: Baton, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (partial_file, prefetcher):
        monkeypatch.setattr(module, "RANGE_UNITS", 2)
    data = hub.data_sets["acme/math"] = shards("math", 2, 5 * UNIT_BYTES - 1)
    user("data", "prefetch", MATH, "--into", place).ok()
    assert without_manifest(place) == below("acme/math", data)
    mib = UNIT_BYTES
    expected = [(0, 2 * mib - 1), (2 * mib, 4 * mib - 1)]
    for content in data.values():
        ranges = [
            f"GET /{sha256(content)} bytes={first}-{last}" for first, last in (*expected, (4 * mib, len(content) - 1))
        ]
        assert sorted(call for call in hub.served("cdn") if sha256(content) in call) == ranges


def test_wrong_bytes_are_fetched_again_once(hub: FakeHub, user: Baton, place: Path) -> None:
    data = hub.data_sets["acme/math"]
    first, second, third = sorted(data)

    def wrong(handler: _Handler) -> None:
        handler.send_data(bytes(300))

    hub.script(sha256(data[first]), wrong)
    hub.script(sha256(data[second]), lambda handler: handler.send_data(bytes(301)), lambda h: h.send_data(bytes(301)))
    write_files(place, {"prefetch.json": b"of an earlier selection"})
    hub.script(third, lambda handler: handler.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"}))
    said = user("data", "prefetch", MATH, "--into", place)
    assert said.code == 1
    assert said.err.splitlines() == [
        "baton: files_missing: 2 of 3 files could not be fetched. Repeat the command: it fetches the missing files.",
        f"hf/acme/math/{second}: the bytes differ from sha256:{sha256(data[second])}",
        f"hf/acme/math/{third}: not on the Hub in revision {COMMIT}",
    ]
    assert files_below(place) == below("acme/math", {first: data[first]}), "no manifest, no partial file"
    user("data", "prefetch", MATH, "--into", place).ok()
    assert without_manifest(place) == below("acme/math", data)


def test_a_small_disk_is_known_before_the_first_byte(
    hub: FakeHub, user: Baton, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(place.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=902))
    arguments = ("data", "prefetch", MATH, "--into", place)
    user(*arguments).failed(1, "disk_too_small", "902 free bytes", "need 903 more")
    assert without_manifest(place) == {}
    assert hub.served("cdn") == []
    file = ListedFile.model_validate(user(*arguments, "--dry-run", "--json").ok().json["sources"][0]["files"][0])
    partial_path(place / file.path, file).write_bytes(bytes(file.size_bytes + 1))
    user(*arguments).ok()
    assert without_manifest(place) == below("acme/math", hub.data_sets["acme/math"]), "the partial file has space"


@pytest.mark.processes
def test_a_killed_process_continues_with_the_missing_units(hub: FakeHub, user: Baton, place: Path) -> None:
    data = hub.data_sets["acme/math"] = shards("math", 1, 5 * UNIT_BYTES)
    (content,) = data.values()
    arrived = 3 * UNIT_BYTES + 50
    released = threading.Event()

    def hang(handler: _Handler) -> None:
        handler.send_data(content, sent=arrived)
        handler.wfile.flush()
        released.wait(120)

    hub.script(sha256(content), hang)
    arguments = ("data", "prefetch", MATH, "--into", place)
    first = user.started(*arguments)
    partial = until(lambda: next(place.rglob(".*.part"), None), what="a partial file", every_s=0.02)
    until(lambda: partial.read_bytes()[-5:] == b"\1\1\1\0\0", what="three units", every_s=0.02)
    command_line = Path(f"/proc/{first.process.pid}/cmdline").read_bytes()
    assert b"prefetch" in command_line and TOKEN.encode() not in command_line
    user(*arguments).failed(2, "another fetch into", "is running")
    first.kill()
    released.set()
    assert list(files_below(place)) == [str(partial.relative_to(place))]
    user.started(*arguments).end().ok()
    assert without_manifest(place) == below("acme/math", data)
    assert hub.served("cdn")[1:] == [f"GET /{sha256(content)} bytes={3 * UNIT_BYTES}-{5 * UNIT_BYTES - 1}"]
    assert re.search(r'"version": 1', (place / "prefetch.json").read_text())
