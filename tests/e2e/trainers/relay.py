"""Train one part of a training, from the file that the part before left in the output directory.

Arguments: name of the part, and name of the part before if there is one. Parameters: steps, step_s (seconds per step),
trace (a file to which each start and end is appended). Writes <name>.bin.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import gate

from gpu_client.training.channel import AgentChannel
from gpu_client.training.checkpoint import checkpoint_directory

name, before = sys.argv[1], sys.argv[2:]
output = Path(os.environ["BATON_OUTPUT_DIR"])
params = json.loads(Path(os.environ["BATON_PARAMS"]).read_text())


def trace(what: str) -> None:
    with Path(params["trace"]).open("a") as file:
        file.write(f"{what}\n")


digest = hashlib.sha256("".join((output / f"{part}.bin").read_text() for part in before).encode()).hexdigest()
done = 0
if os.environ["BATON_RESUME_FROM"]:
    resumed = Path(os.environ["BATON_RESUME_FROM"])
    assert sorted(path.name for path in resumed.iterdir()) == ["baton.json", "state.txt"], "nothing was added to it"
    done = checkpoint_directory.verify(resumed).step
    assert resumed.name == f"checkpoint-{done}", "its numbers are the step's own"
    digest = (resumed / "state.txt").read_text()
assert [path.name for path in output.glob("checkpoint-*")] == [f"checkpoint-{done}"] * (done > 0), "no other part's"
trace(f"{name} from {done}")
earlier = (params["steps"] + 2) * len(before)  # steps of the job before this part
channel = AgentChannel(os.environ["BATON_CHANNEL"], lambda directive: None)
for step in range(done + 1, params["steps"] + 1):
    time.sleep(params["step_s"])
    digest = hashlib.sha256(f"{digest}{name}{step}".encode()).hexdigest()
    channel.report(step, params["steps"], {"loss": 1 / step})
    if step % 5 == 0:
        staged, final = (
            checkpoint_directory.staging_path(output, step),
            checkpoint_directory.checkpoint_path(output, step),
        )
        staged.mkdir()
        (staged / "state.txt").write_text(digest)
        checkpoint_directory.write_marker(staged, step, {}, "session", {})
        checkpoint_directory.publish(staged, final)
        channel.checkpoint_written(step, str(final), {})
    gate.wait(earlier + step)
(output / f"{name}.bin").write_text(digest)
trace(f"{name} done")
channel.close()
