"""Training scripts that do what training scripts do. The argument says which; some announce themselves by progress."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gpu_client.training.channel import AgentChannel

output = Path(os.environ["BATON_OUTPUT_DIR"])
channel = AgentChannel(os.environ["BATON_CHANNEL"], lambda directive: None)
kind = sys.argv[1]
print(f"I am {kind}")
print("these are", "the last words", file=sys.stderr)


def busy(seconds: float = 600) -> None:
    channel.report(1, 10, {})
    time.sleep(seconds)


if kind == "exit-3":
    sys.exit(3)
elif kind == "bad-input":
    sys.exit(print("error: class_prompt: is needed", file=sys.stderr) or 65)
elif kind == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif kind == "segfault":
    os.kill(os.getpid(), signal.SIGSEGV)
elif kind == "hangs":
    busy()
elif kind == "no-output":
    pass
elif kind == "deaf":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    channel.close()
    (output / "deaf").touch()
    while True:
        time.sleep(1)
elif kind == "polite":
    # Takes SIGTERM for a reason to end well.
    signal.signal(signal.SIGTERM, lambda *_: ((output / "model.bin").write_text("half"), sys.exit(0)))
    busy()
elif kind == "family":
    child = "import subprocess, sys, time; subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", child])
    subprocess.Popen(["setsid", "sleep", "600"])
    busy()
elif kind == "environment":
    (output / "model.bin").write_text(json.dumps(dict(os.environ)))
elif kind == "directory":
    (output / "model").mkdir()
    (output / "model" / "a.bin").write_text("a")
    (output / "model" / "b.bin").write_text("b")
elif kind == "link-outside":
    (output / "model.bin").symlink_to("/etc/hostname")
elif kind == "disk-full":
    raise OSError(28, "No space left on device", str(output / "checkpoint-5"))
else:
    raise ValueError(kind)
channel.close()
