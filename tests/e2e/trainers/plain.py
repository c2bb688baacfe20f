"""A training script that knows nothing of us: the `checkpoint-<step>` convention, and the environment.

Parameters: steps, every, step_s, write_s (seconds that writing a checkpoint takes), keep (older ones are deleted).
"""

import json
import os
import shutil
import time
from pathlib import Path

import gate

output = Path(os.environ["BATON_OUTPUT_DIR"])
params = {"every": 5, "step_s": 0.05, "write_s": 0.0, "keep": 99}
params |= json.loads(Path(os.environ["BATON_PARAMS"]).read_text())
resumed = os.environ["BATON_RESUME_FROM"]
total = json.loads((Path(resumed) / "state.json").read_text())["total"] if resumed else 0
done = int(resumed.rpartition("-")[2]) if resumed else 0
print(f"starting at {done}")
for step in range(done + 1, params["steps"] + 1):
    time.sleep(params["step_s"])
    total += step
    if step % params["every"] == 0:
        directory = output / f"checkpoint-{step}"
        directory.mkdir()
        with (directory / "state.json").open("w") as file:
            text = json.dumps({"total": total, "padding": "x" * 10_000})
            for start in range(0, len(text), 1_000):
                file.write(text[start : start + 1_000])
                file.flush()
                time.sleep(params["write_s"] / 10)
        for old in range(0, step - params["every"] * (params["keep"] - 1), params["every"]):
            shutil.rmtree(output / f"checkpoint-{old}", ignore_errors=True)
    print(f"step {step}")
    gate.wait(step)
(output / "model.bin").write_text(str(total))
