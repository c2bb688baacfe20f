"""Format numbers, times and untrusted text for people. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime

from gpu_client.cli.core.errors import CliError

_LEVELS = "▁▂▃▄▅▆▇█"
_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_COLOR = re.compile("\x1b\\[[0-9;]{0,32}m")
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f]")


def duration(seconds: float) -> str:
    """Format a duration: `14 s`, `3 min 5 s`, `2 h 14 min`, `3 d 4 h`."""
    whole = max(0, round(seconds))
    for unit_s, name, below_s, below in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            count, rest = divmod(whole, unit_s)
            return f"{count} {name}" + (f" {rest // below_s} {below}" if rest >= below_s else "")
    return f"{whole} s"


def age(seconds: float) -> str:
    """Format a duration in one unit: `14 s`, `3 min`, `2 h`, `3 d`."""
    return " ".join(duration(seconds).split()[:2])


def parse_duration(text: str) -> int:
    """Parse `90`, `90s`, `15m`, `12h`, `30d` or `2w` to seconds. Raises CliError."""
    found = re.fullmatch(r"\s*([0-9]{1,10})\s*([a-z]*)\s*", text.lower())
    if found is None or (found[2] or "s") not in _UNITS_S:
        raise CliError(f"{text!r} is not a duration", "Write it like 3600, 90s, 15m, 12h, 30d or 2w.")
    return int(found[1]) * _UNITS_S[found[2] or "s"]


def require_finite(value: float | None, option: str) -> float | None:
    """Return `value`; raise CliError for NaN and infinities, which pass an option's own bounds."""
    if value is not None and not math.isfinite(value):
        raise CliError(f"{option} must be a finite number")
    return value


def size(count_bytes: float) -> str:
    """Format bytes in decimal units: `301 B`, `1.2 MB`."""
    if count_bytes < 1000:
        return f"{count_bytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count_bytes /= 1000
        if count_bytes < 999.95 or unit == "TB":
            break
    return f"{count_bytes:.1f} {unit}"


def number(value: float) -> str:
    """Format a metric with four significant digits."""
    return f"{value:.4g}"


def moment(at: int) -> str:
    """Format a server time (seconds since 1970) in this machine's time zone."""
    return datetime.fromtimestamp(at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def day(at: int) -> str:
    """Format the date of a server time in this machine's time zone."""
    return moment(at)[:10]


def count(number_of: int, one: str, many: str | None = None) -> str:
    """Format a number with its noun: `1 file`, `3 files`."""
    return f"{number_of:,} {one if number_of == 1 else many or one + 's'}"


def sparkline(values: Sequence[float], cells: int) -> str:
    """Return the newest values as block characters, scaled to the greatest value."""
    shown = [max(value, 0.0) for value in values[-cells:]]
    top = max(shown, default=0.0)
    if top <= 0:
        return _LEVELS[0] * len(shown)
    return "".join(_LEVELS[min(int(value / top * len(_LEVELS)), len(_LEVELS) - 1)] for value in shown)


def printable(text: str) -> str:
    """Remove all control characters except colors, so that foreign text cannot control the terminal."""
    pieces: list[str] = []
    end = 0
    for found in _COLOR.finditer(text):
        pieces += [_CONTROL.sub("", text[end : found.start()]), found[0]]
        end = found.end()
    pieces.append(_CONTROL.sub("", text[end:]))
    return "".join(pieces) + ("\x1b[0m" if len(pieces) > 1 else "")


def plain(text: str) -> str:
    """Return foreign text on one line without control characters."""
    return _CONTROL.sub("", _COLOR.sub("", text.replace("\n", " ").replace("\t", " ")))
