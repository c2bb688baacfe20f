"""A deterministic training without torch, as a script that uses our session looks from outside.

Parameters: steps, every (a checkpoint each so many steps), step_s (seconds per step), first_step_s (the same in the
first attempt). Writes model.bin.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import gate

from gpu_client.training.channel import AgentChannel
from gpu_client.training.checkpoint import checkpoint_directory
from gpu_client.training.protocol import TrainerDirective

output = Path(os.environ["BATON_OUTPUT_DIR"])
params = {"every": 5, "step_s": 0.02, **json.loads(Path(os.environ["BATON_PARAMS"]).read_text())}
step_s = params.get("first_step_s", params["step_s"]) if os.environ["BATON_EPOCH"] == "1" else params["step_s"]
wishes: list[TrainerDirective] = []
channel = AgentChannel(os.environ["BATON_CHANNEL"], wishes.append)
done, digest = 0, hashlib.sha256(b"seed").hexdigest()
if os.environ["BATON_RESUME_FROM"]:
    resumed = Path(os.environ["BATON_RESUME_FROM"])
    done = checkpoint_directory.verify(resumed).step
    digest = (resumed / "state.txt").read_text()
    print(f"resumed at {done}")
    found = (resumed / "state.txt").read_bytes() + (resumed / "weights.bin").read_bytes()
    print(f"found {done} {hashlib.sha256(found).hexdigest()}")


def save(step: int) -> None:
    staged, final = checkpoint_directory.staging_path(output, step), checkpoint_directory.checkpoint_path(output, step)
    staged.mkdir()
    (staged / "state.txt").write_text(digest)
    # The weights depend on the job: the agent would not send a pack that another job has stored.
    own = hashlib.shake_128(f"{os.environ['BATON_JOB_ID']}{digest}".encode()).digest(32_000)
    (staged / "weights.bin").write_bytes(own)
    checkpoint_directory.write_marker(staged, step, {"loss": 1 / step}, "session", {})
    checkpoint_directory.publish(staged, final)
    channel.checkpoint_written(step, str(final), {"loss": 1 / step})


for step in range(done + 1, params["steps"] + 1):
    gate.wait(step - 1, unless=lambda: wishes)
    time.sleep(step_s)
    digest = hashlib.sha256(f"{digest}{step}".encode()).hexdigest()
    channel.report(step, params["steps"], {"loss": 1 / step})
    print(f"step {step}")
    stop = next((wish for wish in wishes if wish.kind == "stop"), None)
    asked = [wish for wish in wishes if wish.kind == "checkpoint"]
    if step % params["every"] == 0 or asked or (stop and stop.checkpoint):
        wishes[:] = [wish for wish in wishes if wish not in asked]
        save(step)
    if stop:
        print(f"leaving: {stop.reason}")
        break
else:
    (output / "model.bin").write_text(digest)
channel.close()
