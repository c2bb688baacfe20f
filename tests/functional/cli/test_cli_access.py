"""Keys, profiles, and the connection to the control plane."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.contract.admin.keys import KeyCreate
from baton.contract.names import Scope
from gpu_client.cli.core import session as session_module
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.retry import RetryPolicy
from tests.functional.api.original_client import OriginalClient
from tests.functional.cli.people import Baton
from tests.kits.network.proxies import FaultyProxy
from tests.kits.stack.stack import ROOT, Stack, clean_environment, leashed

pytestmark = [pytest.mark.emulator, pytest.mark.processes]


@pytest.fixture
def dead_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield an address without a listener."""
    monkeypatch.setattr(session_module, "RETRY_POLICY", RetryPolicy(max_tries=1, budget_s=5))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize(
    "command",
    [["jobs"], ["show", "146683a1-cb76-4702-9fef-fcccd32594f1"], ["data", "ls"], ["keys", "list"]],
    ids=" ".join,
)
def test_an_api_that_does_not_answer(command: list[str], baton: Baton, stack: Stack, dead_url: str) -> None:
    key = stack.keys["admin"]
    for more in ([], ["--json"]):
        said = baton(*command, *more, BATON_API_URL=dead_url, BATON_API_KEY=key)
        said.failed(4, dead_url, "baton doctor")


@pytest.mark.parametrize("host", ["http://baton.invalid", "http://127.0.0.1:1"])
def test_a_real_process_gives_up_soon(host: str, stack: Stack, tmp_path: Path) -> None:
    environ = {"BATON_API_URL": host, "BATON_API_KEY": stack.keys["admin"], "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(
        [*leashed(signal.SIGKILL), "gpu_client.cli", "jobs"],
        cwd=ROOT,
        env={**clean_environment(), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.count("\n") == 1
    assert stack.keys["admin"] not in done.stderr


def test_keys_that_will_not_do(baton: Baton, stack: Stack) -> None:
    unknown = "baton_nobody00_" + "x" * 32
    baton("jobs", BATON_API_URL=stack.url, BATON_API_KEY=unknown).failed(3, "key_unknown", "baton login")
    baton("keys", "list", BATON_API_URL=stack.url, BATON_API_KEY=stack.keys["submit"]).failed(
        3, "wrong_scope", "admin", "--profile"
    )
    with BatonClient(stack.url, stack.keys["admin"]) as admin:
        made = admin.create_key(KeyCreate(name="gone", scopes=[Scope.SUBMIT]))
        admin.create_key(KeyCreate(name="gone", scopes=[Scope.SUBMIT], replaces=made.id, overlap_s=0))
    baton("jobs", BATON_API_URL=stack.url, BATON_API_KEY=made.key).failed(3, "key_expired", "baton login")
    assert standing(baton)[made.id] == "expired"


def standing(baton: Baton) -> dict[str, str]:
    """The state of each key, as the list shows it."""
    rows = [line.split() for line in baton("keys", "list").ok().out.splitlines()[1:]]
    return {row[0]: row[-1] for row in rows}


def test_a_login_that_fails_changes_nothing(baton: Baton, stack: Stack, dead_url: str) -> None:
    path = Path(baton.environ["XDG_CONFIG_HOME"]) / "baton" / "profiles.json"
    before = path.read_bytes()
    baton("login", dead_url, stdin=stack.keys["submit"]).failed(4, "baton doctor")
    baton("login", stack.url, stdin="baton_nobody00_" + "x" * 32).failed(3, "key_unknown")
    baton("login", stack.url, stdin="").failed(2, "no API key")
    baton("login", "no-url", stdin=stack.keys["submit"]).failed(2, "URL")
    baton("login", stack.url, "--name", "a/b", stdin=stack.keys["submit"]).failed(2, "is not a profile name")
    assert path.read_bytes() == before


def test_several_profiles(baton: Baton, stack: Stack) -> None:
    said = baton("login", stack.url + "/", "--name", "worker", "--json", stdin=stack.keys["worker"]).ok().json
    assert (said["profile"], said["url"], said["scopes"]) == ("worker", stack.url, ["worker"])
    baton("jobs").failed(3, "wrong_scope")
    assert baton("--profile", "default", "jobs", "--json").ok()
    assert baton("jobs", "--json", BATON_PROFILE="default").ok()
    baton("--profile", "nobody", "jobs").failed(2, "existing profiles: default, worker")


def test_a_profile_file_that_others_may_read(baton: Baton, stack: Stack) -> None:
    path = Path(baton.environ["XDG_CONFIG_HOME"]) / "baton" / "profiles.json"
    path.chmod(0o644)
    for command in (["jobs"], ["login", stack.url]):
        baton(*command, stdin=stack.keys["submit"]).failed(2, f"chmod 600 {path}", "baton keys rotate")
    doctor = baton("doctor", "--json")
    assert (doctor.code, doctor.json["checks"][0]["verdict"]) == (1, "fail")
    path.chmod(0o600)
    baton("jobs").ok()


@pytest.mark.parametrize(
    ("variable", "command", "what"),
    [("XDG_CONFIG_HOME", ["login", "URL"], "profile"), ("XDG_STATE_HOME", ["submit", "--recipe", "digits@1"], "key")],
)
def test_a_place_of_its_own_that_cannot_be_written(
    variable: str, command: list[str], what: str, baton: Baton, stack: Stack, tmp_path: Path
) -> None:
    words = [stack.url if word == "URL" else word for word in command]
    place = {"BATON_API_URL": stack.url, "BATON_API_KEY": stack.keys["submit"]}
    jobs = len(stack.client.jobs(limit=1000).jobs)
    said = baton(*words, stdin=stack.keys["submit"], **place, **{variable: "/proc/nowhere"})
    said.failed(1, "/proc/nowhere", what, f"Set {variable} to a writable directory")
    assert len(stack.client.jobs(limit=1000).jobs) == jobs, "nothing was sent"


def test_the_key_is_asked_for_without_being_shown(baton: Baton, stack: Stack) -> None:
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [*leashed(signal.SIGKILL), "gpu_client.cli", "login", stack.url, "--name", "typed", "--json"],
        cwd=ROOT,
        env={**clean_environment(), **baton.environ},
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    # the blank comes once the terminal no longer shows what is typed
    while b"API key: " not in seen:
        seen += os.read(ours, 1000)
    os.write(ours, stack.keys["submit"].encode() + b"\n")
    out, _ = running.communicate(timeout=60)
    try:
        while more := os.read(ours, 1000):
            seen += more
    except OSError:
        pass  # the other end is closed
    os.close(ours)
    assert running.returncode == 0, seen
    assert json.loads(out)["scopes"] == ["submit"]
    assert stack.keys["submit"].encode() not in seen


def test_the_life_of_a_key(baton: Baton, stack: Stack) -> None:
    made = baton("keys", "create", "laptop", "--scope", "submit", "--scope", "submit", "--expires-in", "30d").ok()
    key = made.out.strip()
    key_id = key.split("_")[1]
    assert "It is shown only once" in made.err
    assert key not in made.err
    baton("jobs", BATON_API_URL=stack.url, BATON_API_KEY=key).ok()

    rotated = baton("keys", "rotate", key_id[:10], "--overlap", "5m", "--json").ok().json
    assert (rotated["name"], rotated["scopes"]) == ("laptop", ["submit"])
    assert rotated["expires_at"] - rotated["created_at"] == 30 * 86_400
    listed = {one["id"]: one for one in baton("keys", "list", "--json").ok().json}
    assert listed[key_id]["expires_at"] - rotated["created_at"] == 300
    assert "key" not in listed[key_id]
    assert key_id in baton("keys", "list").ok().out

    assert baton("keys", "revoke", rotated["id"]).ok().out == f"Key {rotated['id']} (laptop) is revoked.\n"
    assert baton("keys", "revoke", rotated["id"], "--json").ok().json["revoked"] is True
    baton("jobs", BATON_API_URL=stack.url, BATON_API_KEY=rotated["key"]).failed(3, "key_revoked")
    assert (standing(baton)[rotated["id"]], standing(baton)[key_id]) == ("revoked", "valid")
    baton("keys", "rotate", rotated["id"]).failed(2, "is revoked")


def test_one_key_serves_a_client_of_the_original_as_the_help_says(baton: Baton, stack: Stack) -> None:
    said = " ".join(baton("keys", "create", "--help").ok().out.replace("│", " ").split())
    assert "needs both: --scope submit --scope worker" in said
    key = baton("keys", "create", "dreambooth", "--scope", "submit", "--scope", "worker").ok().out.strip()
    client = OriginalClient(stack.url, key)
    row = client.submit({"instance_prompt": "dog", "instance_data_prefix": "dog/"})
    job = client.work()
    assert job is not None and (job["id"], job["created_at"]) == (row["id"], row["created_at"])
    assert client.heartbeat(job["id"]) == 200
    client.stop(job["id"])
    # Baton's own client reads the same answers in Baton's shapes with this key, too.
    baton("jobs", BATON_API_URL=stack.url, BATON_API_KEY=key).ok()
    baton("explain", job["id"], BATON_API_URL=stack.url, BATON_API_KEY=key).ok()


def test_keys_bad_input(baton: Baton, stack: Stack) -> None:
    baton("keys", "create", "x" * 65, "--scope", "submit").failed(2, "1 to 64 characters")
    baton("keys", "create", "x", "--scope", "submit", "--expires-in", "5s").failed(2, "Give 60s to 3650d")
    baton("keys", "create", "x", "--scope", "root").failed(2, "--scope")
    baton("keys", "revoke", "nosuchkey").failed(2, "no key has the id", "baton keys list")
    baton("keys", "rotate", "abcd", "--overlap", "40d").failed(2, "Give at most 30d")
    said = baton("keys", "revoke", stack.keys["submit"]).failed(2, "this is a secret key, not a key id")
    assert stack.keys["submit"] not in said.err


def test_a_key_whose_answer_was_lost_may_exist(baton: Baton, stack: Stack) -> None:
    with FaultyProxy(stack.front) as front, front.dropping("POST /keys"):
        place = {"BATON_API_URL": front.url, "BATON_API_KEY": stack.keys["admin"]}
        said = baton("keys", "create", "lost", "--scope", "submit", **place)
    said.failed(4, "The key may have been created", "baton keys list")


def test_doctor_finds_all_well(baton: Baton, stack: Stack) -> None:
    said = baton("doctor", "--json").ok().json
    assert said["ok"] is True
    assert {one["name"]: one["verdict"] for one in said["checks"] if one["name"] not in ("upload", "download")} == {
        "profile": "ok",
        "address": "ok",
        "latency": "ok",
        "clock": "ok",
        "versions": "ok",
        "key": "ok",
    }
    assert {one["name"] for one in said["checks"]} >= {"upload", "download"}
    assert stack.keys_below(".baton-doctor/", "training-data") == {}, "the probe is gone"
    assert "valid; scopes: submit, worker, admin" in baton("doctor").ok().out


def test_doctor_finds_what_is_wrong(baton: Baton, stack: Stack, dead_url: str) -> None:
    def checks(code: int, **environ: str) -> dict[str, dict[str, str]]:
        said = baton("doctor", "--json", **environ)
        assert (said.code, said.json["ok"]) == (code, code == 0)
        return {one["name"]: one for one in said.json["checks"]}

    dead = checks(1, BATON_API_URL=dead_url, BATON_API_KEY="k")
    assert (list(dead), dead["address"]["verdict"]) == (["profile", "address"], "fail")
    assert "Connection refused" in dead["address"]["found"] and "that the API runs" in dead["address"]["remedy"]
    assert "doctor" not in str(dead["address"]), "it is being followed already"
    unknown = checks(1, BATON_API_URL=stack.url, BATON_API_KEY="baton_nobody00_" + "x" * 32)
    assert unknown["key"]["found"].startswith("key_unknown")
    worker = checks(0, BATON_API_URL=stack.url, BATON_API_KEY=stack.keys["worker"])
    assert (worker["key"]["verdict"], "upload" in worker) == ("warn", False)
    baton.session_options = {"clock": lambda: 1_000_000_000.0}
    assert checks(1)["clock"]["verdict"] == "fail"
    baton.session_options = {}
    with stack.s3.failing("PUT .*baton-doctor", 403):
        assert checks(1)["store"]["verdict"] == "fail"


def test_doctor_interrupted_takes_its_probe_away(baton: Baton, stack: Stack) -> None:
    with stack.s3.holding("GET .*baton-doctor") as held:
        running = baton.started("doctor")
        held.wait()
        assert stack.keys_below(".baton-doctor/", "training-data")
        assert running.interrupt().code == 130
    assert stack.keys_below(".baton-doctor/", "training-data") == {}


def test_local_is_the_local_stack(baton: Baton) -> None:
    running = baton.started("local", "--forget", "--port", "0", "--json")
    assert running.process.stdout is not None
    url = json.loads(running.process.stdout.readline())["url"]
    with BatonClient(url, "none") as client:
        assert client.health().status == "ok"
    assert running.interrupt().code == 0


def test_completion_scripts_are_there() -> None:
    program = Path(sys.executable).with_name("baton")
    done = subprocess.run(
        [program],
        env={**clean_environment(), "_BATON_COMPLETE": "source_bash"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "_BATON_COMPLETE" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")
