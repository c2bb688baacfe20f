"""Test the emulator's process: start, stop, errors, the end with its parent."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from functions.local.emulator import Emulator, EmulatorError, StateInUseError
from functions.local.lifecycle import HOST
from tests.kits.clouds.emulator import unique
from tests.kits.network.ports import free_port
from tests.kits.waiting import alive, until

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

ROOT = Path(__file__).resolve().parents[3]
STARTS_AND_WAITS = """
import sys
from pathlib import Path
from functions.local.emulator import Emulator
emulator = Emulator(state_dir=Path(sys.argv[1]))
emulator.start()
emulator.client("s3").create_bucket(Bucket="kept")
print(emulator.pid, flush=True)
sys.stdin.read()
"""


def wait_for_end(pid: int) -> None:
    until(lambda: not alive(pid), what="the end of the emulator")


def temporary_directory(pid: int) -> Path:
    """Return the directory for the temporary files of the emulator; the copies of functions are 91 MB each."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (place,) = (one.removeprefix(b"TMPDIR=") for one in variables if one.startswith(b"TMPDIR="))
    return Path(os.fsdecode(place))


def test_it_listens_on_the_loopback_only_and_leaves_nothing_behind() -> None:
    with Emulator() as emulator:
        pid = emulator.pid
        assert emulator.endpoint_url.startswith(f"http://{HOST}:")
        assert emulator.client("dynamodb").list_tables()["TableNames"] == []
        assert os.getpgid(pid) == pid
        port = int(emulator.endpoint_url.rpartition(":")[2])
        listening = Path("/proc/net/tcp").read_text().splitlines()
        addresses = [line.split()[1] for line in listening]
        assert [address for address in addresses if address.endswith(f":{port:04X}")][:1] == [f"0100007F:{port:04X}"]
    assert not alive(pid)
    with pytest.raises(EmulatorError, match="not running"):
        emulator.client("s3")
    emulator.stop()


def test_it_can_be_started_again_and_two_do_not_disturb_each_other() -> None:
    with Emulator() as first, Emulator() as second:
        first.client("s3").create_bucket(Bucket="first")
        assert second.client("s3").list_buckets()["Buckets"] == []
        first.stop()
        first.start()
        assert first.client("s3").list_buckets()["Buckets"] == []
        with pytest.raises(EmulatorError, match="already running"):
            second.start()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EmulatorError, match=f"port {port} on 127.0.0.1 is not free"):
            Emulator(port=port).start()


def test_a_wanted_port_is_used() -> None:
    port = free_port()
    with Emulator(port=port) as emulator:
        assert emulator.endpoint_url == f"http://{HOST}:{port}"
        emulator.client("s3").list_buckets()


def test_a_missing_environment_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_EMULATOR_PYTHON", "/nowhere/python")
    with pytest.raises(EmulatorError, match="make setup"):
        Emulator().start()


def test_a_failed_start_shows_the_log_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests' own interpreter has no ministack.
    monkeypatch.setenv("BATON_EMULATOR_PYTHON", sys.executable)
    emulator = Emulator()
    with pytest.raises(EmulatorError, match="No module named 'hypercorn'"):
        emulator.start()
    with pytest.raises(EmulatorError, match="not running"):
        _ = emulator.pid


@pytest.mark.parametrize("durable", [False, True])
def test_no_temporary_file_outlives_it(tmp_path: Path, durable: bool) -> None:
    with Emulator(state_dir=tmp_path if durable else None) as emulator:
        place = temporary_directory(emulator.pid)
        (place / "ministack-lambda-api").mkdir()
    assert not place.exists()


def test_one_that_does_not_come_up_in_time_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\necho started\nexec sleep 60\n")
    hanging.chmod(0o700)
    monkeypatch.setenv("BATON_EMULATOR_PYTHON", str(hanging))
    with pytest.raises(EmulatorError, match=r"did not answer within 1 s\nstarted"):
        Emulator(start_timeout_s=1, stop_timeout_s=1).start()


def test_a_death_of_its_own_is_reported() -> None:
    with Emulator() as emulator:
        os.kill(emulator.pid, signal.SIGKILL)
        with pytest.raises(EmulatorError, match="ended by itself"):
            until(emulator.check)


def test_a_directory_serves_one_emulator_at_a_time(tmp_path: Path) -> None:
    with Emulator(state_dir=tmp_path) as first:
        with pytest.raises(StateInUseError, match=f"in use by another emulator, .* process id {os.getpid()}$"):
            Emulator(state_dir=tmp_path).start()
        first.client("s3").list_buckets()


def test_a_damaged_directory_is_refused_with_the_file_named(tmp_path: Path) -> None:
    with Emulator(state_dir=tmp_path):
        pass
    snapshot = tmp_path / "dynamodb" / "snapshot.json"
    snapshot.write_text("{}")
    with pytest.raises(EmulatorError, match=r"snapshot\.json"):
        Emulator(state_dir=tmp_path).start()
    assert snapshot.read_text() == "{}"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_process_that_started_it_and_saves_its_state(tmp_path: Path, number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTS_AND_WAITS, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        place = temporary_directory(pid)
        assert place.is_dir()
        parent.send_signal(number)
        parent.wait(60)
        wait_for_end(pid)
    assert not place.exists()
    with Emulator(state_dir=tmp_path) as emulator:
        assert [bucket["Name"] for bucket in emulator.client("s3").list_buckets()["Buckets"]] == ["kept"]


def test_it_ends_even_when_a_sibling_holds_its_pipe(tmp_path: Path) -> None:
    # A forked child keeps the write end of the emulator's standard input open; the parent's id tells all the same.
    script = STARTS_AND_WAITS.replace(
        "sys.stdin.read()",
        "import os, signal, time\n"
        "child = os.fork()\n"
        "if child == 0:\n    time.sleep(20)\n    os._exit(0)\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)",
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid, sibling = int(parent.stdout.readline()), int(parent.stdout.readline())
        try:
            wait_for_end(pid)
            assert alive(sibling)
        finally:
            os.kill(sibling, signal.SIGKILL)


def test_clients_leave_the_environment_of_the_caller_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody's")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://example.invalid")
    with Emulator() as emulator:
        client = emulator.client("dynamodb", max_connections=7, read_timeout=30)
        assert client.meta.endpoint_url == emulator.endpoint_url
        assert client.meta.config.max_pool_connections == 7
        assert client.meta.config.read_timeout == 30
        client.list_tables()
        environment = Path(f"/proc/{emulator.pid}/environ").read_bytes()
        assert b"AWS_" not in environment


def test_checksums_are_the_standard_ones_and_quick(emulator: Emulator) -> None:
    # The check value of CRC-64/NVME for "123456789" is 0xAE8B14860A799888. Byte by byte in Python, 64 MiB took seconds.
    s3 = emulator.client("s3")
    bucket = unique("checksums")
    s3.create_bucket(Bucket=bucket)
    s3.put_object(Bucket=bucket, Key="check", Body=b"123456789", ChecksumAlgorithm="CRC64NVME")
    head = s3.head_object(Bucket=bucket, Key="check", ChecksumMode="ENABLED")
    assert base64.b64decode(head["ChecksumCRC64NVME"]).hex() == "ae8b14860a799888"
