"""`python -m functions.local`: the stack on this machine."""

from __future__ import annotations

import sys


def run() -> int:
    """Run the program. Returns the exit code."""
    try:
        # Here, for it takes long enough to be interrupted.
        from functions.local.program import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("baton: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(run())
