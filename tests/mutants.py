"""Break one line of the product at a time, and show that a test fails for each: `make mutants`.

`mutations.toml` lists the lines that carry a promise. For each mutant the runner copies the checkout into a temporary
directory, replaces the text, and runs the named tests there. A mutant is caught if a test fails; a run without a
failing test, or one that cannot start, is an error.

    python -m tests.mutants                 # all of them
    python -m tests.mutants lease ring      # those whose promise or file contains one of the words
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutations.toml"
TESTS_FAILED = 1
"""pytest's exit code when tests ran and some failed."""


@dataclass(frozen=True)
class Mutant:
    """One broken line: in `file` the text `find`, which occurs once, becomes `replace`."""

    promise: str
    file: str
    find: str
    replace: str
    tests: list[str]

    def applied_to(self, text: str) -> str:
        """Return the broken text. Raises ValueError unless `find` occurs exactly once."""
        found = text.count(self.find)
        if found != 1:
            raise ValueError(f"{self.file}: {self.find!r} occurs {found} times, not once")
        return text.replace(self.find, self.replace)


def read_mutants() -> list[Mutant]:
    """Return the mutants of `mutations.toml`, in their order."""
    return [Mutant(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]]


def copy_checkout(target: Path) -> None:
    """Copy the files that git tracks, as they are in the working tree, and link the environments."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for environment in (".venv", ".emulator", ".fms-hf-tuning"):
        (target / environment).symlink_to(ROOT / environment)


def try_mutant(mutant: Mutant) -> tuple[bool, str, float]:
    """Return whether a test failed, the test that failed or pytest's last lines, and the seconds the tests took."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_checkout(Path(folder))
        broken = Path(folder) / mutant.file
        broken.write_text(mutant.applied_to(broken.read_text(encoding="utf-8")), encoding="utf-8")
        began_at = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *mutant.tests]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        took_s = time.monotonic() - began_at
    failed = [line.removeprefix("FAILED ").split(" - ")[0] for line in run.stdout.splitlines() if line[:7] == "FAILED "]
    if run.returncode == TESTS_FAILED and failed:
        return True, failed[0], took_s
    return False, f"pytest ended with {run.returncode}\n{run.stdout[-2000:]}", took_s


def chosen(mutants: list[Mutant], words: list[str]) -> Iterator[Mutant]:
    """Yield the mutants whose promise or file contains one of the words; all of them without words."""
    for mutant in mutants:
        if not words or any(word in mutant.promise.lower() or word in mutant.file for word in words):
            yield mutant


def main() -> int:
    """Try the chosen mutants. Returns 1 if a mutant was not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="try the mutants whose promise or file contains one of the words")
    parser.add_argument("--workers", type=int, default=2, help="mutants tried at once; default 2")
    options = parser.parse_args()
    mutants = list(chosen(read_mutants(), options.words))
    survived = 0
    with ThreadPoolExecutor(options.workers) as pool:
        for mutant, (caught, by, took_s) in zip(mutants, pool.map(try_mutant, mutants), strict=True):
            survived += not caught
            print(f"{took_s:6.1f} s  {mutant.promise}: {'caught by' if caught else 'NOT CAUGHT:'} {by}", flush=True)
    print(f"{len(mutants) - survived} of {len(mutants)} mutants caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
