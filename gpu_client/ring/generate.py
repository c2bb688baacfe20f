"""Run a generator, as a job or as any number of programs:

    python -m gpu_client.ring.generate --function shapes:make --ring /mnt/ring --count 1000 --settings cap=1000

Under Baton (recipe `generator@1`) the heartbeats of the job carry the progress, and the writer has the name of the job:
another machine that claims the job continues the count, and the ring fences the former machine's writer. In a SLURM
array the writer has the name of the task. SIGTERM stops the program cleanly. `generating/generation_loop.py` describes
the forms of generators.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gpu_client.ring.core.liveness import unique_name
from gpu_client.ring.core.ring import Ring, make_ring, open_ring
from gpu_client.ring.errors import RingError, RingMismatch
from gpu_client.ring.format.manifest import WRITER_NAME
from gpu_client.ring.generating.generation_loop import (
    GenerationLoop,
    GenerationProgress,
    GeneratorFault,
    Samples,
    adapt_generator,
)
from gpu_client.ring.generating.generator_pool import GeneratorPool, split_count
from gpu_client.ring.settings import RingSettings

if TYPE_CHECKING:
    from gpu_client.training.session.session import Session

logger = logging.getLogger("baton.ring")

BAD_INPUT_EXIT_CODE = 65
"""Exit code for invalid parameters, as in `gpu_client/training/protocol.py`."""
LOG_INTERVAL_S = 10.0
_SESSION_VARIABLES = ("BATON_JOB_ID", "BATON_CHANNEL", "BATON_ARENA", "BATON_CONTROL", "BATON_RESUME_FROM")


class BadInput(Exception):  # noqa: N818
    """Error of an impossible generation; the text is for the user."""


class StandaloneProgress:
    """Logger of progress without Baton. SIGTERM and SIGINT stop cleanly, a second SIGINT at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, parent: int | None = None) -> None:
        """`parent`: id of the process whose end stops this process."""
        self._asked = False
        self._parent = parent
        self._clock = clock
        self._logged_at = -float("inf")
        signal.signal(signal.SIGTERM, self._stop)
        self._at_sigint = signal.signal(signal.SIGINT, self._stop)

    @property
    def should_stop(self) -> bool:
        """Return True after a stop request or the end of the parent."""
        return self._asked or (self._parent is not None and os.getppid() != self._parent)

    def report(self, step: int, total: int, **metrics: object) -> None:
        """Log the number of put samples."""
        now = self._clock()
        if now - self._logged_at >= LOG_INTERVAL_S or (total and step == total) or self._asked:
            self._logged_at = now
            of = f" of {total:,}" if total else ""
            logger.info("%s%s samples put", f"{step:,}", of)

    def phase(self, name: str, done: int, total: int) -> None:
        """Log a wait."""
        if done and done % LOG_INTERVAL_S == 0:
            logger.info("%s: %d", name.replace("_", " "), done)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if number == signal.SIGINT:
            signal.signal(number, self._at_sigint)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Invalid parameters exit with BAD_INPUT_EXIT_CODE and one line."""
    parser = argparse.ArgumentParser(prog="generate", description="Generate samples into a ring.")
    parser.add_argument(
        "--function", required=True, metavar="MODULE:NAME", help="generator: a function, class or generator function"
    )
    parser.add_argument("--ring", required=True, help="place of the ring, for example /mnt/ring or baton:NAME")
    parser.add_argument("--count", type=int, help="number of samples (default: endless)")
    parser.add_argument("--first-seed", type=int, default=0, help="minimum seed (default: 0)")
    parser.add_argument("--name", default="", help="name of the writer; a restart continues its count")
    parser.add_argument("--processes", type=int, default=1, help="generator processes, which share the count")
    parser.add_argument("--version", default="", help="version of the generator, for the headers")
    parser.add_argument(
        "--options", nargs="*", default=[], metavar="NAME=VALUE", help="arguments of the generator: JSON or text"
    )
    parser.add_argument(
        "--settings",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="settings for a missing ring; without them a missing ring is an error",
    )
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)  # No later process takes the name.
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    session = _session()
    try:
        _generate(options, session or StandaloneProgress(parent=options.parent))
    except (BadInput, GeneratorFault, RingError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        passes = isinstance(error, RingError) and not isinstance(error, RingMismatch)
        sys.exit(1 if passes else BAD_INPUT_EXIT_CODE)
    finally:
        if session is not None:
            session.close()


def choose_writer_name(environment: Mapping[str, str]) -> str:
    """Return the name of the job or the SLURM task, which restarts keep; "" without either."""
    if job := environment.get("BATON_JOB_ID"):
        return f"job-{job}"
    if job := environment.get("SLURM_ARRAY_JOB_ID") or environment.get("SLURM_JOB_ID"):
        # SLURM numbers the tasks of an array, and the processes that srun starts in each task.
        parts = (environment.get("SLURM_ARRAY_TASK_ID", "0"), environment.get("SLURM_PROCID", "0"))
        return "-".join(("slurm", job, *parts))
    return ""


def _generate(options: argparse.Namespace, progress: GenerationProgress) -> None:
    if options.count is not None and options.count < 1:
        raise BadInput(f"count is {options.count}: use at least 1, or omit it")
    if options.first_seed < 0:
        raise BadInput(f"the first seed is {options.first_seed}: use at least 0")
    if options.processes < 1:
        raise BadInput(f"processes is {options.processes}: use at least 1")
    name = options.name or choose_writer_name(os.environ)
    if name and not WRITER_NAME.fullmatch(f"{name}-{options.processes}"):
        raise BadInput(f"{name!r} is not a name of a writer: use letters, digits, - and _, at most about 50")
    ring = _ring(options.ring, dict(map(_pair, options.settings)))
    if options.processes > 1:
        _generate_in_copies(options, name, ring, progress)
        return
    samples = _samples(options.function, {name: _value(text) for name, text in map(_pair, options.options)})
    generation = GenerationLoop(
        ring,
        samples,
        progress,
        name=name,
        again=not options.once,
        count=options.count,
        first_seed=options.first_seed,
        generator=options.function,
        version=options.version,
    )
    made = generation.run()
    logger.info(
        "%d samples put, %d refused, %d not made, %.1f s waited", made.put, made.refused, made.failed, made.waited_s
    )


def _generate_in_copies(options: argparse.Namespace, name: str, ring: Ring, progress: GenerationProgress) -> None:
    again = bool(name)
    name = name or unique_name()
    commands: dict[str, list[str]] = {}
    for number, share in enumerate(split_count(options.count, options.processes)):
        commands[f"{name}-{number}"] = [
            *(sys.executable, "-m", "gpu_client.ring.generate"),
            *(f"--function={options.function}", f"--ring={options.ring}", f"--name={name}-{number}"),
            *([] if share is None else [f"--count={share}"]),
            *([] if again else ["--once"]),
            *(f"--first-seed={options.first_seed}", f"--version={options.version}", f"--parent={os.getpid()}"),
            *("--options", *options.options),
        ]
    # The session belongs to this process, therefore the generator processes log their progress.
    environment = {name: value for name, value in os.environ.items() if name not in _SESSION_VARIABLES}
    code = GeneratorPool(ring, commands, environment, progress, count=options.count, again=again).run()
    if code:
        sys.exit(code if code > 0 else 1)


def _session() -> Session | None:
    """Start the session of a job; return None without Baton, which saves the import of torch."""
    if not os.environ.get("BATON_JOB_ID"):
        return None
    from gpu_client.training.session.session import Session

    return Session.start()


def _ring(place: str, settings: Mapping[str, str]) -> Ring:
    if not settings:
        return open_ring(place)
    try:
        return make_ring(place, RingSettings.model_validate_strings(settings))
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'settings'}: {one['msg']}" for one in error.errors())
        raise BadInput(f"invalid settings of a ring: {faults}") from error


def _samples(name: str, options: Mapping[str, Any]) -> Samples:
    """Load a generator from a module of the job's inputs, the working directory, or an installed package."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise BadInput(f"{name!r} names no function. Use the form shapes:make")
    for folder in (os.getcwd(), os.environ.get("BATON_DATA_DIR", "")):  # noqa: PTH109 - as sys.path has them
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # The module exists and lacks a dependency.
        raise BadInput(f"there is no module {error.name}. Give the job its code as an input, or install it") from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise BadInput(f"{module_name} has no function {attribute}")
    try:
        return adapt_generator(found, options)
    except TypeError as error:
        raise BadInput(f"{name} cannot be called with {', '.join(options) or 'a seed alone'}: {error}") from error


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise BadInput(f"{text!r} is not NAME=VALUE")
    return name.strip(), value.strip()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
