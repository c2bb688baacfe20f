"""Break one line of the product at a time, and show that a test fails for each: `make mutants`.

`mutations.toml` lists the lines that carry a promise. For each mutant the runner copies the checkout into a temporary
directory, replaces the text, and runs the named tests there. A mutant is caught if a test fails that passes in an
unbroken copy; a run without a failing test, or one that cannot start, is an error.

    python -m tests.mutants                 # all of them
    python -m tests.mutants lease ring      # those whose promise or file contains one of the words
"""

from __future__ import annotations

import argparse
import os
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
    """A broken line: in `file` the text `find`, which occurs once, becomes `replace`."""

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


def run_tests(folder: str, tests: list[str]) -> tuple[list[str], str]:
    """Run tests in a copy. Return the ids of the failed tests, and pytest's exit code with the end of its output."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    # Without the variable, child processes in other directories import the packages of the checkout.
    variables = {**os.environ, "PYTHONPATH": folder}
    run = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    failed = [line.removeprefix("FAILED ").split(" - ")[0] for line in run.stdout.splitlines() if line[:7] == "FAILED "]
    return failed if run.returncode == TESTS_FAILED else [], f"pytest ended with {run.returncode}\n{run.stdout[-2000:]}"


def try_mutant(mutant: Mutant) -> tuple[str, str, float]:
    """Return the test that failed ("" for none), how pytest ended, and the seconds that the tests took."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_checkout(Path(folder))
        broken = Path(folder) / mutant.file
        broken.write_text(mutant.applied_to(broken.read_text(encoding="utf-8")), encoding="utf-8")
        began_at = time.monotonic()
        failed, how = run_tests(folder, ["-x", *mutant.tests])
        return failed[0] if failed else "", how, time.monotonic() - began_at


def fail_unbroken(tests: list[str]) -> list[str]:
    """Return those of the tests that fail in an unbroken copy. Raises RuntimeError if pytest cannot run them."""
    if not tests:
        return []
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_checkout(Path(folder))
        failed, how = run_tests(folder, tests)
    if not failed and not how.startswith("pytest ended with 0"):
        raise RuntimeError(how)
    return failed


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
    caught_by: list[str] = []
    with ThreadPoolExecutor(options.workers) as pool:
        for mutant, (failed, how, took_s) in zip(mutants, pool.map(try_mutant, mutants), strict=True):
            caught_by.append(failed)
            print(f"{took_s:6.1f} s  {mutant.promise}: {f'caught by {failed}' if failed else f'NOT CAUGHT: {how}'}")
            sys.stdout.flush()
    always_failing = fail_unbroken(sorted({*caught_by} - {""}))
    for mutant, failed in zip(mutants, caught_by, strict=True):
        if failed in always_failing:
            print(f"{mutant.promise}: NOT CAUGHT: {failed} fails without the mutant too")
    survived = sum(failed in ("", *always_failing) for failed in caught_by)
    print(f"{len(mutants) - survived} of {len(mutants)} mutants caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
