"""Run the local stack until Ctrl-C."""

from __future__ import annotations

import argparse
import errno
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from baton.contract.fleets.money import Budget
from functions.domain.errors import StorageUnavailable
from functions.fleet.clock import FleetClock
from functions.local.emulator import EmulatorError, StateInUseError
from functions.local.stack import LocalStack

DEFAULT_STATE_DIR = ".baton/local"
BUDGET_FILE = "fleet-budget.json"
NO_BUDGET = "none"
CLOCK_TOLERANCE_S = 60
REPEAT_S = 3600
MAX_PORT = 65_535
CLOUD_CHECK_S = 0.5


def main(arguments: list[str] | None = None) -> int:
    """Start the stack, print its URL and keys, wait for a signal, stop. Returns the exit code.

    1 if the stack cannot start or the emulated cloud ends early.
    """
    parser = argparse.ArgumentParser(prog="python -m functions.local", description=__doc__)
    parser.add_argument(
        "--state-dir",
        type=Path,
        help=f"directory of the state, kept across restarts; default {DEFAULT_STATE_DIR}, with a fast clock of the "
        f"fleets {DEFAULT_STATE_DIR}-x60",
    )
    parser.add_argument("--forget", action="store_true", help="keep the state in memory only")
    parser.add_argument("--port", type=_parse_port, default=8787, help="port of the API; 0 selects a free port")
    parser.add_argument("--sweep-interval-s", type=_parse_interval, default=60.0, help="seconds between sweeps")
    parser.add_argument(
        "--fleet-clock-speed",
        type=_parse_speed,
        default=1,
        metavar="N",
        help="speed of the clock of rented machines; with 60 an hour of rent passes in a minute",
    )
    parser.add_argument(
        "--fleet-budget",
        metavar="JSON",
        help="budget of all fleets together, for example '{\"per_day_usd\": 5}'; kept in the state directory until "
        f"`{NO_BUDGET}` removes it",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON with the URLs and keys")
    options = parser.parse_args(arguments)
    if options.state_dir is None:
        # At another speed the clock of the fleets leaves the time of the day for good, and with it the days of budgets.
        fast = f"-x{options.fleet_clock_speed}" if options.fleet_clock_speed != 1 else ""
        options.state_dir = Path(f"{DEFAULT_STATE_DIR}{fast}")
    budget = _choose_budget(parser, options)
    logging.getLogger("baton.fleet").addFilter(RepeatFilter())
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stack = LocalStack(
        state_dir=None if options.forget else options.state_dir,
        port=options.port,
        sweep_interval_s=options.sweep_interval_s,
        fleet_clock_speed=options.fleet_clock_speed,
        fleet_budget=budget,
    )
    try:
        stack.start()
        _keep_budget(budget, options)
    except (EmulatorError, OSError) as error:
        print(f"The local stack could not start: {_explain(error, options)}", file=sys.stderr)
        stack.stop()
        return 1
    try:
        _announce(stack, options, budget)
        while not stop.wait(CLOUD_CHECK_S):
            stack.check()
        if left := _describe_left(stack):
            # The output of --json is one document.
            print(left, file=sys.stderr if options.json else sys.stdout, flush=True)
    except EmulatorError as error:
        state_note = "the state is lost" if options.forget else f"the state is kept in {options.state_dir}"
        print(f"The local stack ends, {state_note}: {error}", file=sys.stderr)
        return 1
    finally:
        if not options.json:
            print("Stopping ...", flush=True)
        stack.stop()
    return 0


def _explain(error: Exception, options: argparse.Namespace) -> str:
    """Return the cause of a failed start, with the remedy where one is known."""
    if isinstance(error, StateInUseError):
        return f"{error}. End that control plane, or add: --state-dir {options.state_dir}-2 --port {options.port + 1}"
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}. Name a directory that you may write with --state-dir."
    taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
    return error.strerror + (". Choose another with --port, or 0 for any free one." if taken else "")


def _parse_port(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {MAX_PORT}")
    return int(text)


def _parse_speed(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be a whole number, at least 1")
    return int(text)


def _parse_interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError("must be a number of seconds above 0")
    return seconds


def _read_budget(parser: argparse.ArgumentParser, text: str | None) -> Budget | None:
    """Return a budget; end the program for a text that is none."""
    try:
        return None if text is None else Budget.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        parser.error(f'--fleet-budget: {problem}. Write JSON such as {{"per_day_usd": 5}}.')


class RepeatFilter(logging.Filter):
    """Drops a message of the fleets that was logged less than an hour ago: each tick repeats the reason of its wait."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True for a message to log."""
        text = record.getMessage()
        if record.created - self._logged_at.get(text, 0) < REPEAT_S:
            return False
        self._logged_at[text] = record.created
        return True


def _choose_budget(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Budget | None:
    """Return the budget of the command line, else the one that the state directory keeps."""
    if options.fleet_budget is not None:
        return None if options.fleet_budget == NO_BUDGET else _read_budget(parser, options.fleet_budget)
    kept = options.state_dir / BUDGET_FILE
    try:
        return None if options.forget else Budget.model_validate_json(kept.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as error:
        cause = error.strerror if isinstance(error, OSError) else "the file holds no budget"
        parser.error(
            f"{kept}, which keeps the budget of all fleets, cannot be read: {cause}. Write the budget anew with "
            f"--fleet-budget, or remove the budget with --fleet-budget {NO_BUDGET}."
        )


def _keep_budget(budget: Budget | None, options: argparse.Namespace) -> None:
    """Keep the budget for later starts, which would otherwise let the fleets spend without a bound."""
    if options.forget:
        return
    kept = options.state_dir / BUDGET_FILE
    if budget is None:
        kept.unlink(missing_ok=True)
    else:
        aside = kept.with_suffix(".new")
        aside.write_text(budget.model_dump_json(exclude_none=True))
        aside.replace(kept)


def _describe_left(stack: LocalStack) -> str:
    """Return what a user must know about machines that go on; empty if there can be none."""
    try:
        return stack.describe_rented_machines()
    except StorageUnavailable as error:
        return f"Rented machines go on and cost money, and cannot be named: {error}"


def _python() -> str:
    """Return the path of this interpreter, relative if possible."""
    here = Path(sys.executable)
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else str(here)


def _announce(stack: LocalStack, options: argparse.Namespace, budget: Budget | None) -> None:
    if options.json:
        print(json.dumps({"url": stack.url, "cloud_url": stack.cloud_url, "keys": stack.keys}), flush=True)
        return
    state_note = "state in memory" if options.forget else f"state in {options.state_dir}"
    print(f"Baton is running at {stack.url} ({state_note})\n", flush=True)
    for name, key in stack.keys.items():
        print(f"  {name:7} key  {key}")
    print(
        f"\nThe console:  {stack.url}/console (sign in with the admin key)"
        f"\nTry:  curl -s {stack.url}/health"
        f"\nA worker:  BATON_API_URL={stack.url} BATON_API_KEY={stack.keys['worker']} {_python()} -m gpu_client.agent"
        f"\nEvents:  the bus baton-local of the emulated EventBridge at {stack.cloud_url} (functions/local/README.md)"
        + "".join(f"\nFleets:  {line}" for line in _fleet_lines(stack.fleet_clock, options.fleet_clock_speed, budget))
        + "\n\nCtrl-C stops it.",
        flush=True,
    )


def _fleet_lines(clock: FleetClock, speed: int, budget: Budget | None) -> Iterator[str]:
    """Yield what a user must know about the money and the time of the fleets."""
    if budget is not None:
        text = budget.model_dump_json(exclude_none=True)
        yield f"all together within the budget {text}; --fleet-budget {NO_BUDGET} removes this bound"
    now = int(time.time())
    ahead_s = clock.at(now) - now
    if speed != 1:
        yield f"the clock runs {speed} times as fast, for trials with loopback; every other provider bills real hours"
    elif ahead_s > CLOCK_TOLERANCE_S:
        yield (
            f"the clock is {ahead_s / 3600:.1f} h ahead, because it ran fast before, and so are the days of budgets; "
            "another --state-dir has the right time"
        )
