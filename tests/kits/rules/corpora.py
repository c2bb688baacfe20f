"""Hostile rules, wrong rules, and the heaviest legal ones, for tests and benches."""

from __future__ import annotations

from collections.abc import Iterator

from baton.contract.rules.language.function_signatures import NAMES, SUMMARIES
from baton.contract.rules.metrics import BUILT_IN, UNITS, Kind, Metric, MetricCatalog

HOSTILE = [
    "10**3999999 > 0", "3999999**399999 > 0", "loss.append(1) > 0", "loss.tofile(path) > 0", "model.zero_() > 0",
    "loss.__class__.__init__.__globals__ > 0", "{args.hub_token}", "os.environ > 0 or exec(1)", "a; b", "m = True",
    "rand() > 0.5", "randint(10) > 5", "str(loss) == 'x'", "f'{loss}' == ''", "(lambda: 1)() > 0", "[loss for x in y]",
    "9" * 5000, "1e" + "9" * 39 + " > 0", "(" * 1900 + "1" + ")" * 10, "not " * 490 + "true", "-" * 1900 + "1 > 0",
    "1 +" * 600 + "1 > 0", "a<" * 900 + "a", "mean(loss, 99999999999) > 0", "a" * 1900 + " > 0", "\0\1\2", "\ud800",
    "mean(" * 300 + "loss" + ", 5)" * 300, "max(" + "loss," * 380 + "loss) > 0", "loss > 0x7fffffff",
    "import os", "eval(loss)", "exec(loss)", "open(loss) > 0", "globals() > 0", "loss @ loss > 0", "`id` > 0",
    "$HOME > 0",
]  # fmt: skip
"""Conditions: the original's holes, and what other languages would run. All of them are refused."""

HOSTILE_TEXTS = [
    "{args.hub_token!r}", "{loss.__class__.__init__.__globals__}", "{loss.__init__.__globals__[os].environ}", "{0}",
    "{}", "{loss!r}", "{loss:{step}}", "{loss:>99999999}", "{loss:" + "0" * 500 + "f}", "{os.environ[HOME]}",
    "{loss[0]}", "{", "{self!s}" * 100, "%(loss)s {__builtins__}", "{loss:.999999999f}",
]  # fmt: skip
"""Texts of `log` and `alert`: the original printed secrets for some of them. All of them are refused."""

HEAVIEST = [
    " or ".join(["loss > 1"] * 66),
    "(" * 18 + "loss" + " + 1)" * 18 + " > 0",
    "slope(loss, 100000) > 0 and std(loss, 100000) > 0 and zscore(loss, 99999) > 0",
    "median(loss, 10000) > 0",
    "min(loss, 100000) > max(loss, 99999)",
    "mean(loss, 6h) > 0 or std(loss, 6h) < 0 or median(loss, 6h) > 0 or max(loss, 6h) < 0",
    " or ".join(f"std(loss, {points}) < 0" for points in range(2, 41)),
    "loss % 1e-300 > 0 and loss * 1e300 * 1e300 > 0 and log(loss) > 0",
]
"""Heaviest conditions that the limits allow: an evaluation takes no longer than a refusal may."""

REPORTED = ("acc", "eval.f1_macro")
KNOWN = MetricCatalog([Metric("reader.wait", Kind.DURATION), Metric("flag", Kind.BOOL)], reported=REPORTED)
"""Catalog of a training: the built-in metrics, two declared ones, and the reported names."""


def wrong_conditions() -> Iterator[str]:
    """Generate conditions with wrong names, types and units; the checker must reject each."""
    yield from (f"{name}x > 0" for name in (*BUILT_IN, *REPORTED))
    yield from (f"mean({name[:-1]}, 5) > 0" for name in (*BUILT_IN, *REPORTED))
    yield from (f"{name}s(loss, 5) > 0" for name in NAMES)
    yield from (f"{name} > 0" for name in NAMES if name not in ("min", "max"))
    yield from (f"wall > 5{unit}" for unit in ("sec", "min", "hours", "S", "H", "w", "mo", "y", "us", "gb", "Gb", "KB"))
    yield from (f"gpu.mem > 5{unit}" for unit in ("G", "gib", "GiBs", "B", "bytes", "MIB", "pct"))
    examples = {Kind.NUMBER: "loss", Kind.DURATION: "wall", Kind.SIZE: "gpu.mem"}
    units: dict[Kind, list[str]] = {Kind.NUMBER: [""], Kind.DURATION: [], Kind.SIZE: []}
    for unit, (kind, _) in UNITS.items():
        units[kind].append(unit)
    for kind, metric in examples.items():
        for other, known in units.items():
            if other is not kind:
                yield from (f"{metric} {operator} 3{unit}" for operator in ("<", "==") for unit in known)
                yield f"{metric} + {examples[other]} > 0"
                yield f"{metric} < {examples[other]}"
                yield f"clamp({metric}, {examples[other]}, {metric}) > 0"
                yield f"coalesce({metric}, {examples[other]}) > 0"
        yield from (metric, f"not {metric}", f"{metric} and true", f"isnan({metric}) + 1 > 0", f"({metric} > 0) > 0")
        yield from (f"abs({metric} > 0) > 1", f"mean(isnan({metric}), 5) > 0", f"mean({metric} + 1, 5) > 0")
        for name, function in SUMMARIES.items():
            if function.partner:
                yield from (f"{name}({metric}) > 0", f"{name}({metric}, 5) > 0")
                continue
            yield from (f"{name}() > 0", f"{name}({metric}, 5, 6, 7) > 0", f"{name}({metric} > 0, 5) > 0")
            if function.window:
                windows = ("0", "1.5", "x", "10GB", "true", "100001")
                yield from (f"{name}({metric}, {window}) > 0" for window in windows)
            if function.window and function.window_required:
                yield f"{name}({metric}) > 0"
            if function.least_points == 2:
                yield f"{name}({metric}, 1) > 0"
    yield from ("mean(flag, 5) > 0", "flag > 0", "flag + 1 > 0", "true > 1", "wall * wall > 0", "1 / wall > 0")
    yield from ("best(lr) > 0", "since_best(acc) > 5", "best(loss, least) > 0", "since_best(loss, min, 5s) > 1")
    yield from ("wall % 5 > 0", "step > 5s", "mean(loss, wall) > 0", "lag(loss, 5s) > 0", "at(loss, 5) > 0")
