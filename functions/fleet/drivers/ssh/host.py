"""Keep one agent on a machine that accepts SSH: the program that the driver sends to the machine with each call.

    ~/.baton/machine/machine.json   record of the machine, as the driver made it; the directory marks a busy host
    ~/.baton/machine/process.json   process of the agent
    ~/.baton/machine/output.log     output of the agent
    ~/.baton/machine/workspace/     data of the agent, deleted at the machine's end
    ~/.baton/ended/<id>/            record and output of an ended machine; the newest KEPT_ENDED stay
    ~/.baton/code/<digest>/         Baton, as the control plane runs it
    ~/.baton/python/<digest>/       virtual environment for an interpreter that lacks what the agent imports

The driver's loader reads this text from its standard input, a line of JSON and, for `create`, Baton as a zip file. The
answer is a line of JSON on the standard output. The program needs Linux and the standard library, and imports nothing
of Baton. Older interpreters than the agent's can run `state`, which reports their version. Modules
that few calls need are imported where they are needed, because each call starts an interpreter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

Answer = dict[str, Any]

ROOT = Path("~/.baton").expanduser()
MACHINE = ROOT / "machine"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory is made in it
LOG_TAIL_BYTES = 16 * 1024
KEPT_ENDED = 50
KILL_WITHIN_S = 4.0
"""Time after which a process that SIGKILL does not end counts as hung, for instance in a GPU driver."""
INHERITED = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TMPDIR", "USER")
"""Variables of the SSH session that the agent gets besides its own."""
PIP = (
    "https://files.pythonhosted.org/packages/44/3c/d717024885424591d5376220b5e836c2d5293ce2011523c9de23ff7bf068/"
    "pip-25.3-py3-none-any.whl"
)
PIP_SHA256 = "9655943313a94722b7774661c21049070f6bbb0a1516bf02f7c8d5d9201514cd"
"""Installer of the virtual environment, because the Python of many distributions comes without `ensurepip`."""


def state() -> Answer:
    """Describe the host and its machine."""
    return {
        "python": list(sys.version_info[:2]),
        "linux": Path("/proc/self/stat").exists(),
        "free_gib": shutil.disk_usage(ROOT.parent).free / 2**30,
        "machine": _record(MACHINE),
        "running": _runs(),
    }


def create(request: Answer, bundle: bytes) -> Answer:
    """Make the machine and start its agent, which outlives the connection. The rename claims the host atomically."""
    made = ROOT / f"new-{request['record']['id']}"
    made.mkdir(parents=True, mode=0o700)
    try:
        (made / "machine.json").write_text(json.dumps(request["record"]))
        code = _unpack(bundle)
        (made / "output.log").touch()
        (made / "workspace").mkdir()
        made.rename(MACHINE)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        return {"created": False, "reason": "has a machine already" if MACHINE.exists() else str(error)}
    for stale in (ROOT / "code").iterdir():
        if stale != code:
            shutil.rmtree(stale, ignore_errors=True)
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    environment.update(PYTHONPATH=str(code), BATON_WORKSPACE=str(MACHINE / "workspace"))
    arena = _arena(request["record"]["id"])
    if SHARED_MEMORY.is_dir():
        arena.mkdir(mode=0o700)
        environment["BATON_ARENA_DIR"] = str(arena)
    environment.update(request["environment"])
    _start(request["python"], request["requirements"], environment)
    return {"created": True, "reason": ""}


def destroy(request: Answer) -> Answer:
    """Kill the machine's processes and file its record; without an effect for a machine that has ended."""
    record = _record(MACHINE)
    if record is None or record["id"] != request["id"]:
        return {"alive": []}
    alive = _kill(_process()) if _runs() else []
    if alive:
        return {"alive": alive}
    shutil.rmtree(MACHINE / "workspace", ignore_errors=True)
    shutil.rmtree(_arena(record["id"]), ignore_errors=True)
    _write(MACHINE / "machine.json", {**record, "ended_at": request["ended_at"]})
    ended = ROOT / "ended"
    ended.mkdir(exist_ok=True)
    MACHINE.rename(ended / record["id"])
    oldest = sorted(ended.iterdir(), key=lambda path: path.stat().st_ctime)
    for path in oldest[:-KEPT_ENDED]:
        shutil.rmtree(path, ignore_errors=True)
    return {"alive": []}


def record_of(request: Answer) -> Answer:
    """Return the record of a machine, also of an ended one."""
    place = _place(request["id"])
    return {"machine": place and _record(place)}


def logs(request: Answer) -> Answer:
    """Return the end of a machine's output, also of an ended one."""
    place = _place(request["id"])
    if place is None:
        return {"text": None}
    with (place / "output.log").open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        return {"text": log.read().decode(errors="replace")}


def _place(machine_id: str) -> Path | None:
    """Return the directory of a machine. The id comes from a handle, therefore it must not lead elsewhere."""
    record = _record(MACHINE)
    if record is not None and record["id"] == machine_id:
        return MACHINE
    ended = ROOT / "ended" / machine_id
    return ended if re.fullmatch("[0-9a-f]+", machine_id) and ended.is_dir() else None


def _record(place: Path) -> Answer | None:
    with contextlib.suppress(FileNotFoundError):
        return dict(json.loads((place / "machine.json").read_text()))
    return None


def _write(path: Path, value: Answer) -> None:
    """Write a value so that a reader sees the old or the new one."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def _arena(machine_id: str) -> Path:
    return SHARED_MEMORY / f"baton-machine-{machine_id}"


def _unpack(bundle: bytes) -> Path:
    """Return the directory of the bundle's files, which the first machine of a version unpacks."""
    import io
    import zipfile

    code = ROOT / "code" / hashlib.sha256(bundle).hexdigest()[:16]
    if not code.exists():
        partial = code.with_suffix(f".{os.getpid()}")
        with zipfile.ZipFile(io.BytesIO(bundle)) as files:
            files.extractall(partial)
        partial.rename(code)
    return code


# The agent's process


def _start(python: str, requirements: list[list[str]], environment: dict[str, str]) -> None:
    """Fork the process that becomes the agent; the process ends if this program dies before recording the process."""
    go, recorded = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.close(recorded)
            _redirect(MACHINE / "output.log")
            if os.read(go, 1):
                interpreter = _prepare(python, requirements)
                os.chdir(MACHINE / "workspace")
                os.execvpe(interpreter, [interpreter, "-m", "gpu_client.agent"], environment)  # noqa: S606
        except Exception as error:  # noqa: BLE001 - the machine's log is the only reader of this process
            os.write(2, f"the agent cannot be started: {error}\n".encode())
        finally:
            os._exit(1)
    _write(MACHINE / "process.json", {"pid": pid, "started": _started(pid), "boot": _boot()})
    os.write(recorded, b"\n")


def _redirect(log: Path) -> None:
    """Detach the standard streams from the connection, which would otherwise stay open for the agent's life."""
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)


def _process() -> Answer:
    return dict(json.loads((MACHINE / "process.json").read_text()))


def _runs() -> bool:
    """Return True if the agent's own process runs: another process with the same id started at another time."""
    try:
        process = _process()
    except FileNotFoundError:
        return False
    started = _started(process["pid"])
    return started is not None and (process["boot"], process["started"]) == (_boot(), started)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the state on; None for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields


def _started(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since the boot."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def _family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        fields = _stat(int(entry.name)) if entry.name.isdigit() else None
        if fields is not None:
            parents[int(entry.name)] = int(fields[1])
    family = [pid] if pid in parents else []
    for one in family:
        family += [child for child, parent in parents.items() if parent == one]
    return family


def _kill(process: Answer) -> list[int]:
    """Kill the agent's processes; return those that live on."""
    family = {one: _started(one) for one in _family(process["pid"])}
    for one in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    until = time.monotonic() + KILL_WITHIN_S
    while True:
        alive = [one for one, started in family.items() if started is not None and _started(one) == started]
        if not alive or time.monotonic() > until:
            return alive
        time.sleep(0.02)


# The interpreter of the agent


def _prepare(python: str, requirements: list[list[str]]) -> str:
    """Return an interpreter that can import what the agent needs: the host's own, or one of a virtual environment.

    The environment also sees the packages of the host's interpreter, so that jobs find, for instance, torch there.
    """
    import site
    import subprocess

    missing = [name for name, least in requirements if not _satisfied(name, least)]
    if not missing:
        return python
    wanted = [f"{name}>={least}" for name, least in requirements]
    digest = hashlib.sha256(json.dumps([sys.executable, sys.version, wanted]).encode()).hexdigest()[:16]
    place = ROOT / "python" / digest
    interpreter = place / "bin" / "python"
    if not (place / "ready").exists():
        _report(f"installing {', '.join(missing)} for {python} into {place}")
        shutil.rmtree(ROOT / "python", ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
        (packages,) = place.glob("lib/python*/site-packages")
        (packages / "host.pth").write_text("\n".join([*site.getsitepackages(), site.getusersitepackages()]) + "\n")
        pip = _fetch_pip(place)
        # Python compiles what the agent imports; pip would compile all, for longer than the agent takes to start.
        options = ["--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-compile", "--only-binary", ":all:"]
        subprocess.run([str(interpreter), str(pip / "pip"), "install", *options, *wanted], check=True)
        (place / "ready").touch()
        _report("installed")
    return str(interpreter)


def _satisfied(name: str, least: str) -> bool:
    """Return True if this interpreter has a package in a version that is not older than `least`."""
    import importlib.metadata

    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return _numbers(version) >= _numbers(least)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _fetch_pip(place: Path) -> Path:
    import urllib.request

    with urllib.request.urlopen(PIP, timeout=60) as answer:
        wheel = answer.read()
    if hashlib.sha256(wheel).hexdigest() != PIP_SHA256:
        raise RuntimeError(f"{PIP} is damaged")
    path = place / Path(PIP).name
    path.write_bytes(wheel)
    return path


def _report(message: str) -> None:
    os.write(1, f"{message}\n".encode())


def main(operation: str, sent: BinaryIO) -> None:
    """Carry out one operation."""
    os.umask(0o077)
    # A connection that is lost in the middle leaves an incomplete line, which is no JSON, or a short bundle.
    request = json.loads(sent.readline())
    if operation == "create":
        bundle = sent.read()
        if len(bundle) != request["bundle_bytes"]:
            raise EOFError("the connection was lost before the whole call")
        answer = create(request, bundle)
    elif operation == "destroy":
        answer = destroy(request)
    else:
        answer = {"state": lambda _: state(), "record": record_of, "logs": logs}[operation](request)
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin.buffer)
