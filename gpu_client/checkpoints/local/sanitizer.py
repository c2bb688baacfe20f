"""Drop the metrics and tags of a training script that the control plane does not accept."""

import math

from pydantic import TypeAdapter, ValidationError

from baton.contract.base import MetricName

MAX_METRICS = 64
MAX_TAG_CHARS = 64

WORDS = ("nan", "inf", "-inf")
"""Words for the numbers that JSON lacks."""

_name = TypeAdapter(MetricName)


def sanitize_metrics(raw: object) -> dict[str, float]:
    """Return the entries of `raw` that are finite numbers under a valid name, at most 64; {} if `raw` is no mapping.

    The function drops other entries without an error, because a NaN loss must not cost a step or a checkpoint.
    """
    if not isinstance(raw, dict):
        return {}
    usable: dict[str, float] = {}
    for name, value in raw.items():
        if len(usable) == MAX_METRICS:
            break
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        try:
            number = float(value)
            _name.validate_python(name, strict=True)
        except (OverflowError, ValidationError):
            continue
        if math.isfinite(number):
            usable[name] = number
    return usable


def sanitize_readings(raw: object) -> dict[str, float | str]:
    """Return the entries of `sanitize_metrics` and the nonfinite entries, which `raw` spells as in `WORDS`."""
    if not isinstance(raw, dict):
        return {}
    odd = {name: value for name, value in raw.items() if isinstance(value, str) and value in WORDS}
    usable: dict[str, float | str] = dict(sanitize_metrics({name: raw[name] for name in raw if name not in odd}))
    for name, value in odd.items():
        if len(usable) < MAX_METRICS and _is_name(name):
            usable[name] = value
    return usable


def _is_name(name: object) -> bool:
    try:
        _name.validate_python(name, strict=True)
    except ValidationError:
        return False
    return True


def sanitize_tag(raw: object) -> str:
    """Return the tag of a checkpoint if the contract admits the tag, else an empty string."""
    return raw if isinstance(raw, str) and len(raw) <= MAX_TAG_CHARS and raw.isprintable() else ""
