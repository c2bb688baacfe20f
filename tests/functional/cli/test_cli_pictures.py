"""Pictures of a running job: links in `baton watch`, files by `baton fetch --so-far`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from gpu_client.cli.core import session as session_module
from gpu_client.cli.jobs import watch
from gpu_client.transport.retry import RetryPolicy
from tests.functional.cli.people import Baton, Labour, Said, submit
from tests.functional.cli.test_cli_watching import steps
from tests.kits.files.directories import files_below
from tests.kits.network.proxies import FaultyProxy
from tests.kits.stack.stack import Stack

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

LINK = re.compile(r"^step (\d+): (\S+) \((.*), link valid for 15 min\) (http://\S+)$", re.MULTILINE)


@pytest.fixture(autouse=True)
def every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_INTERVAL_S", 0.1)


def picture(step: int, number: int = 0) -> dict[str, bytes]:
    return {f"validation/step-{step:06}-{number}.png": b"picture of step %d" % step}


def watched(baton: Baton, *arguments: object, acts: list[Callable[[], object]]) -> Said:
    """A person who watches; the links are taken out of what is searched for secrets: they are meant to be seen."""
    baton.session_options = {"sleep": steps(*acts)}
    said = baton("watch", *arguments)
    baton.heard[-2:] = [re.sub(r"https?://[^\s\"]*X-Amz-[^\s\"]*", "", text) for text in baton.heard[-2:]]
    return said


def test_a_link_for_each_new_picture_and_each_once(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path, outputs=["validation"])
    fetched: list[bytes] = []

    def show_again_elsewhere() -> None:
        labour.release()
        labour.claim("gpu-2")
        labour.show({**picture(5), **picture(10), "model.bin": b"weights"})

    acts = [
        labour.claim,
        lambda: labour.show(picture(5)),
        lambda: None,
        show_again_elsewhere,
        lambda: labour.complete({**picture(5), **picture(10), **picture(15)}),
    ]
    said = watched(baton, job_id, acts=acts).ok()
    found = LINK.findall(said.err)
    assert [(int(step), path, size) for step, path, size, _ in found] == [
        (step, f"validation/step-{step:06}-0.png", f"{size} B") for step, size in ((5, 17), (10, 18), (15, 18))
    ]
    fetched += [requests.get(url, timeout=60).content for _, _, _, url in found]
    assert fetched == [b"picture of step 5", b"picture of step 10", b"picture of step 15"]
    assert "model.bin" not in said.err, "what is no picture of a step is not shown"


def test_one_who_comes_late_sees_the_newest_and_how_to_get_the_others(
    baton: Baton, labour: Labour, tmp_path: Path
) -> None:
    job_id = submit(baton, labour, tmp_path, outputs=["validation"])
    labour.claim()
    labour.show({name: data for step in range(12) for name, data in picture(step).items()})
    said = watched(baton, job_id, acts=[lambda: labour.fail("no"), lambda: baton.session_options])
    assert [int(step) for step, *_ in LINK.findall(said.err)] == list(range(4, 12))
    assert f"4 earlier pictures; fetch all with: baton fetch {job_id[:8]} DIR --so-far" in said.err


def test_links_as_json(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path, outputs=["validation"])
    acts = [labour.claim, lambda: labour.show(picture(5)), lambda: labour.complete({**picture(5), **picture(10)})]
    said = watched(baton, job_id, "--json", acts=acts).ok()
    found = [one["artifact"] for one in said.lines if "artifact" in one]
    assert [(one["step"], one["path"], one["expires_in_s"]) for one in found] == [
        (5, "validation/step-000005-0.png", 900),
        (10, "validation/step-000010-0.png", 900),
    ]
    assert {one["id"] for one in said.lines} == {job_id}
    assert said.lines[-1]["state"] == "complete", "the last line tells the end"
    assert requests.get(found[0]["url"], timeout=60).content == b"picture of step 5"


@pytest.mark.parametrize("status", [404, 403])
def test_a_control_plane_that_knows_no_pictures_is_watched_all_the_same(
    status: int, baton: Baton, labour: Labour, stack: Stack, tmp_path: Path
) -> None:
    job_id = submit(baton, labour, tmp_path, outputs=["validation"])
    with FaultyProxy(stack.front) as front:
        baton("login", front.url, stdin=stack.keys["submit"]).ok()
        with front.failing("/artifacts", status) as trouble:
            acts = [labour.claim, lambda: None, lambda: labour.complete(picture(5))]
            said = watched(baton, job_id, acts=acts).ok()
        assert trouble.met == 1 and "step 5" not in said.err


def test_a_look_that_fails_is_made_again(
    baton: Baton, labour: Labour, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "RETRY_POLICY", RetryPolicy(max_tries=1, budget_s=5))
    job_id = submit(baton, labour, tmp_path, outputs=["validation"])
    labour.claim()
    labour.show(picture(5))
    with FaultyProxy(stack.front) as front:
        baton("login", front.url, stdin=stack.keys["submit"]).ok()
        with front.dropping("/artifacts") as trouble:
            acts = [lambda: front.forget(trouble), lambda: None, lambda: labour.complete(picture(5))]
            said = watched(baton, job_id, acts=acts).ok()
    assert [int(step) for step, *_ in LINK.findall(said.err)] == [5]


def test_what_there_is_so_far_can_be_fetched(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path, outputs=["validation"])
    place = tmp_path / "so-far"
    assert baton("fetch", job_id, place, "--so-far").ok().out.startswith("0 files")
    labour.claim()
    labour.show({**picture(5), **picture(10)})
    labour.release()
    labour.claim()
    labour.show({"validation/step-000005-0.png": b"made again"})
    baton("fetch", job_id, place).failed(1, "outputs exist once a job is complete")
    said = baton("fetch", job_id, place, "--so-far").ok()
    assert said.out.startswith("2 files (28 B) fetched")
    assert said.err == "The job is running: its files become outputs when the job is complete.\n"
    newest = {"validation/step-000005-0.png": b"made again", **picture(10)}
    assert files_below(place) == newest, "of each path what the last attempt stored"
    labour.show(picture(15))
    again = baton("fetch", job_id, place, "--so-far", "--json").ok().json
    assert [one["path"] for one in again["files"] if one["fetched"]] == ["validation/step-000015-0.png"]
    labour.complete({**newest, **picture(15)})
    done = baton("fetch", job_id, place, "--so-far").ok()
    assert done.out.startswith("0 files (0 B) fetched") and "3 files unchanged" in done.out
    assert done.err == "", "now it is verified as ever"
