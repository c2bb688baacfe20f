"""Remove the ring of Wirehead's config.yaml: `python -m gpu_client.ring.wirehead_clean [config.yaml]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gpu_client.ring.core.ring import remove_ring
from gpu_client.ring.errors import RingError, RingMissing
from gpu_client.ring.tools.wirehead_log import WireheadConfig, print_lines


def clean(config_path: str = "config.yaml") -> int:
    """Remove the ring. Returns the number of removed objects and records; 0 for a missing ring.

    Stop the processes of the ring first. Raises RingMismatch, and OSError for an unreachable store.
    """
    try:
        return remove_ring(WireheadConfig.read(config_path).place)
    except RingMissing:
        return 0


def main(arguments: Sequence[str]) -> int:
    """Remove the ring; return the exit status."""
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        sys.stderr.write("usage: python -m gpu_client.ring.wirehead_clean [config.yaml]\n")
        return 2
    try:
        removed = clean(*arguments)
    except (RingError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    print_lines(f"Deleted the ring, with {removed} objects in it" if removed else "There was no ring")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
