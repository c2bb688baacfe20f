"""A worker as the original orchestrator's is, in a process of its own: its threads, and how each of them dies.

- The heartbeat thread is no daemon: the process stays when its other threads are dead. A status other than 400 makes
  it send the next heartbeat at once; no connection makes it end the training and the worker.
- An exception while a checkpoint is uploaded ends the watcher; the training goes on and nobody is told.
- An exception in the main thread, as of a refused upload of the model, ends the work but not the heartbeats.

Settings: API_URL, API_KEY, SALAD_MACHINE_ID, INSTANCE_DIR, OUTPUT_DIR, HEARTBEAT_INTERVAL, as the original's.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import requests

from tests.functional.api.original_client import OriginalClient

EXPECTED = {
    *("pytorch_lora_weights.safetensors", "optimizer.bin", "scheduler.bin", "scaler.pt", "random_states_0.pkl"),
}
MODEL = "pytorch_lora_weights.safetensors"
QUIET_S = 0.5
POLL_S = 0.2

client = OriginalClient(os.environ["API_URL"], os.environ["API_KEY"], os.environ.get("SALAD_MACHINE_ID", ""))
instance_dir, output_dir = Path(os.environ["INSTANCE_DIR"]), Path(os.environ["OUTPUT_DIR"])
interval_s = int(os.environ.get("HEARTBEAT_INTERVAL", "30"))


class Work:
    """The worker's job, and the flags that its two threads share."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.beating = True
        self.stop = threading.Event()
        self.worker_goes_on = True

    def beat(self) -> None:
        """Send heartbeats until the job ends, in a thread."""
        while self.beating:
            try:
                status = client.heartbeat(self.job["id"])
            except requests.RequestException:
                self.worker_goes_on = self.beating = False
                self.stop.set()
                return
            if status == 400:
                self.beating = False
                self.stop.set()
            elif status < 400:
                time.sleep(interval_s)

    def train(self) -> None:
        """Run the training, in a thread."""
        job = self.job
        command = ["accelerate", "launch", job["training_script"], f"--instance_data_dir={instance_dir}"]
        command += [f"--output_dir={output_dir}", f"--checkpointing_steps={job['checkpointing_steps']}"]
        command += [f"--max_train_steps={job['max_train_steps']}", "--resume_from_checkpoint=latest"]
        process = subprocess.Popen(command)
        while process.poll() is None:
            if self.stop.wait(POLL_S):
                process.terminate()
                process.wait()
                return
        if process.returncode:
            client.report("fail", job, job["checkpoint_prefix"])
        self.stop.set()

    def watch(self) -> None:
        """The watcher thread: uploads directories that are made while it watches."""
        seen = set(output_dir.glob("checkpoint-*"))
        while not self.stop.is_set():
            for directory in sorted(set(output_dir.glob("checkpoint-*[0-9]")) - seen):
                seen.add(directory)
                self._upload(directory)
            time.sleep(POLL_S)

    def _upload(self, directory: Path) -> None:
        while {file.name for file in directory.iterdir() if _is_quiet(file)} != EXPECTED:
            time.sleep(POLL_S)
        zipped = io.BytesIO()
        with zipfile.ZipFile(zipped, "w") as archive:
            for file in directory.iterdir():
                archive.write(file, file.name)
        key = f"{self.job['checkpoint_prefix']}{directory.name}.zip"
        client.upload(self.job["checkpoint_bucket"], key, zipped.getvalue())
        _tell("progress", self.job, key)

    def do(self) -> bool:
        """The job in the main thread; whether the worker goes on."""
        heartbeats = threading.Thread(target=self.beat)
        heartbeats.start()
        for directory in (instance_dir, output_dir):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        job = self.job
        if job["resume_from"] is not None:
            data = client.download(job["checkpoint_bucket"], job["resume_from"])
            name = job["resume_from"].rpartition("/")[2].removesuffix(".zip")
            zipfile.ZipFile(io.BytesIO(data)).extractall(output_dir / name)
        for key in job["instance_data_keys"]:
            (instance_dir / key.rpartition("/")[2]).write_bytes(client.download(job["data_bucket"], key))
        threads = [threading.Thread(target=target) for target in (self.train, self.watch)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if (output_dir / MODEL).exists():
            key = f"{job['checkpoint_prefix']}{MODEL}"
            client.upload(job["checkpoint_bucket"], key, (output_dir / MODEL).read_bytes())
            _tell("complete", job, key)
        self.beating = False
        heartbeats.join()
        return self.worker_goes_on


def _is_quiet(file: Path) -> bool:
    stat = file.stat()
    return stat.st_size > 0 and time.time() - stat.st_mtime > QUIET_S


def _tell(what: str, job: dict[str, Any], key: str) -> None:
    """Report; a refusal is printed and forgotten."""
    try:
        client.report(what, job, key)
    except requests.RequestException as error:
        print(f"{what}: {error}", flush=True)


def main() -> None:
    """Work until told otherwise."""
    goes_on = True
    while goes_on:
        job = client.work()
        if job is None:
            time.sleep(1)
        else:
            goes_on = Work(job).do()


if __name__ == "__main__":
    main()
