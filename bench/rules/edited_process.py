"""Training under edits of its rules: records the time at which each revision takes effect. An agent starts it.

`python -m bench.rules.edited_process`: the parameters are `steps`, `step_s`, and `trace`, the file for the notes.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from baton import Session


def main() -> None:
    """Train until a rule stops the training or its steps are done."""
    with Session.start() as session:
        steps, step_s = int(session.params["steps"]), float(session.params["step_s"])
        in_force = 0
        session.resume()
        with Path(session.params["trace"]).open("a", encoding="utf-8") as trace:
            for step in range(1, steps + 1):
                time.sleep(step_s)
                session.report(step, steps, loss=1.0 / step)
                revision = session.steering.engine.revision
                if revision != in_force:
                    in_force = revision
                    trace.write(json.dumps({"revision": revision, "step": step, "at": time.time()}) + "\n")
                    trace.flush()
                if session.should_stop:
                    break
        (session.output_dir / "end.json").write_text("{}", encoding="utf-8")


if __name__ == "__main__":
    main()
