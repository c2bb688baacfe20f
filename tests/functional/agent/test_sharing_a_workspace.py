"""Run two agents on one workspace: with real processes, real locks and without root's rights."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gpu_client.agent.workspace.slots import Workspace
from tests.kits.stack.stack import ROOT, clean_environment, leashed
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes]

JOB = "146683a1-cb76-4702-9fef-fcccd32594f1"
HOLD = f"""
import sys, time
from pathlib import Path
from gpu_client.agent.workspace.slots import Workspace

arenas = Path(sys.argv[2]) if len(sys.argv) > 2 else None
space = Workspace.open(Path(sys.argv[1]), "agent-1", arenas)
job = space.prepare("{JOB}", 4)
(job.data / "big").write_text("x")
if job.arena:
    (job.arena / "checkpoint").mkdir()
    (job.arena / "checkpoint" / "model.safetensors").write_text("x")
space.write_state("{JOB}", 4, "training", 1)
print(job.arena or space.slot, flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def program(name: str, root: Path, memory: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the agent's own program against an unreachable control plane."""
    settings = {
        "BATON_API_URL": "http://127.0.0.1:9",
        "BATON_API_KEY": "bk_0123456789abcdef_secret",
        "BATON_WORKER_ID": name,
        "BATON_WORKSPACE": str(root),
        "BATON_ARENA_DIR": str(memory),
        "BATON_LOG_LEVEL": "INFO",
    }
    command = [*leashed(signal.SIGKILL), "gpu_client.agent"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env={**clean_environment(), **settings}, stderr=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_an_agent_removes_the_shared_memory_of_a_killed_one_and_leaves_a_living_ones(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    with ExitStack() as stack:
        places = {}
        for name in ("killed", "living"):
            command = [sys.executable, "-c", HOLD, str(tmp_path / name), str(memory)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            places[name] = process, Path(process.stdout.readline().strip())
        process, left = places["killed"]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (left / "checkpoint" / "model.safetensors").exists()
        log = tmp_path / "log"
        agent = stack.enter_context(program("another", tmp_path / "another", memory, log))
        until(lambda: f"removed {left}" in log.read_text() or agent.poll() is not None, what=f"the removal of {left}")
        assert not left.exists(), log.read_text()
        _, kept = places["living"]
        assert list(memory.iterdir()) == [kept]
        assert (kept / "checkpoint" / "model.safetensors").exists()


def test_a_living_agents_slot_is_left_alone_a_killed_ones_is_taken_over(
    tmp_path: Path, holder: tuple[subprocess.Popen[str], Path]
) -> None:
    process, slot = holder
    files = slot / "jobs" / f"{JOB}.4" / "data" / "big"
    with Workspace.open(tmp_path, "agent-1") as other:
        assert other.slot != slot
        assert other.take_previous_state() is None
        other.prepare(JOB, 4)
        assert files.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    with Workspace.open(tmp_path, "agent-1") as successor:
        assert successor.slot == slot
        assert not files.exists()
        previous = successor.take_previous_state()
        assert previous is not None
        assert (previous.job_id, previous.epoch, previous.phase) == (JOB, 4, "training")


def test_a_child_of_a_killed_agent_does_not_keep_its_slot(tmp_path: Path) -> None:
    """The lock's descriptor must not be inherited."""
    code = HOLD.replace(
        "print(", 'import subprocess; p = subprocess.Popen(["sleep", "60"]); print(p.pid, flush=True); print('
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        slot = Path(process.stdout.readline().strip())
        process.kill()
        process.wait()
        process.stdout.close()
        with Workspace.open(tmp_path, "agent-1") as successor:
            assert successor.slot == slot
    finally:
        os.kill(child, signal.SIGKILL)


# Root may write anywhere thanks to two capabilities; without them it is bound by permissions like everybody.
WITHOUT_PRIVILEGES = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""

PROTECTED = """
import os, sys
from pathlib import Path
from gpu_client.agent.workspace.slots import Workspace

root = Path(sys.argv[1])
with Workspace.open(root, "a") as space:
    job = space.prepare("j", 1)
    deep = job.data / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    (deep / "file").chmod(0o000)
    for directory in (deep, deep.parent, job.data, job.output, job.root, job.root.parent):
        directory.chmod(0o000 if directory == deep.parent else 0o500)
    try:
        (job.output / "x").write_text("x")
        sys.exit("the test proves nothing: permissions do not hold here")
    except PermissionError:
        pass
    left = space.purge()
    assert left == (), left
    assert not list((space.slot / "trash").iterdir())
    assert not job.root.exists()
    space.prepare("j", 1)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs capabilities")
def test_read_only_files_and_directories_are_purged(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_PRIVILEGES, PROTECTED, str(tmp_path / "space")]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
