"""Supervise ``family_trainer.py`` and nothing else, until a test kills this process. Argument: a directory."""

import os
import sys
import time
from pathlib import Path

from gpu_client.agent.process.supervisor import start_trainer


def main(directory: Path) -> None:
    trainer = Path(__file__).with_name("family_trainer.py")
    command = [sys.executable, str(trainer), str(directory), "stays"]
    process = start_trainer(command, {"PATH": os.environ["PATH"]}, directory)
    (directory / "guardian.tmp").write_text(str(process._guardian.pid))
    (directory / "guardian.tmp").rename(directory / "guardian")
    time.sleep(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
