"""Run the worker: `python -m gpu_client.agent`."""

from __future__ import annotations

import sys


def run() -> int:
    """Run the program. Returns the exit code."""
    try:
        # A signal can interrupt the slow import, therefore the import is inside the `try`.
        from gpu_client.agent.app.program import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("baton: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(run())
