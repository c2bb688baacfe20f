"""Entry point of `baton` and `python -m gpu_client.cli`; names a missing package."""

from __future__ import annotations

import sys


def run() -> int:
    """Run the program and return its exit code; an import that fails gives exit code 1."""
    try:
        from gpu_client.cli.main import main

        return main()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("baton", "gpu_client"):
            raise
        sys.stderr.write(f"baton: {error.name} is not installed. Run in a checkout of Baton: pip install '.[cli]'\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("baton: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(run())
