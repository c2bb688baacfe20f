"""Entry point `python -m cdk COMMAND` (cdk/tool/command_line.py)."""

from __future__ import annotations

import sys


def run() -> int:
    """Run the program. Returns the exit code."""
    try:
        # The import takes seconds. Inside `try`, Ctrl-C during the import ends the program without a traceback.
        from cdk.tool.command_line import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("baton: interrupted before anything was changed.\n")
        return 130


if __name__ == "__main__":
    sys.exit(run())
