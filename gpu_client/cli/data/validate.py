"""`baton data validate`: what a folder of training images is worth, before anything is paid for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import count
from gpu_client.cli.core.output import FOLDED, Column, Screen
from gpu_client.cli.core.session import AsJson, session_of

if TYPE_CHECKING:
    from gpu_client.datasets.folder_check import Finding, Report

EXIT_FAULTS = 1
SHOWN_OF_A_KIND = 10


Captions = Annotated[bool, typer.Option("--captions", help="Every image must have a caption.")]
MinSide = Annotated[
    int | None,
    typer.Option(min=8, help="Shorter sides are faults, in pixels. Default: below 512 is a warning."),
]


def validate(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="All images below it.", show_default=False)],
    *,
    captions: Captions = False,
    min_side: MinSide = None,
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet (PNG) to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a folder of training images: do they decode, are they large enough, are there copies, captions, masks.

    Every image is decoded, and compared with all others. Exit code 1 if there is a fault. Warnings are for you to
    judge.
    """
    session = session_of(context)
    report = checked(directory, captions=captions, min_side=min_side, for_sheet=sheet is not None)
    if sheet is not None:
        # Late, like the check itself: Pillow takes longer to load than most commands run.
        from gpu_client.datasets.contact_sheet import draw_sheet

        try:
            shown = draw_sheet(report, sheet)
        except OSError as error:
            raise CliError(f"{sheet} cannot be written: {error.strerror or error}") from error
        session.screen.say(f"contact sheet of {count(shown, 'image')}: {sheet}")
    if as_json:
        session.screen.json(as_document(report))
    else:
        show(session.screen, report)
    if report.faults:
        raise typer.Exit(EXIT_FAULTS)


def checked(
    directory: Path,
    *,
    captions: bool = False,
    min_side: int | None = None,
    only: Collection[str] | None = None,
    for_sheet: bool = False,
) -> Report:
    """The report on a folder, or on some of its files. Raises CliError if it is none."""
    from gpu_client.datasets.folder_check import check
    from gpu_client.datasets.contact_sheet import shown_of

    if not directory.is_dir():
        raise CliError(f"{directory} is not a directory")
    try:
        return check(
            directory,
            captions="required" if captions else "optional",
            min_side=min_side,
            only=only,
            thumbnails=shown_of if for_sheet else lambda _: (),
        )
    except OSError as error:
        raise CliError(f"{directory} cannot be read: {error.strerror or error}") from error


def named_as_image(path: Path) -> bool:
    """Whether a push of it should be looked at."""
    from gpu_client.datasets.images import is_image

    return is_image(path)


def require_sound(
    screen: Screen, directory: Path, send: Iterable[Path], *, captions: bool = False, min_side: int | None = None
) -> None:
    """Before a push of some of its files: warnings are told in one line. Raises CliError for the first fault."""
    only = {path.relative_to(directory).as_posix() for path in send}
    asked = (" --captions" if captions else "") + (f" --min-side {min_side}" if min_side is not None else "")
    command = f"baton data validate {directory}{asked}"
    report = checked(directory, captions=captions, min_side=min_side, only=only)
    faults = [one for one in report.findings if one.severity == "fault"]
    if faults:
        more = f", and {count(len(faults) - 1, 'other fault')}" if faults[1:] else ""
        raise CliError(
            f"{_place(faults[0])} {faults[0].message}{more}: nothing was sent",
            f"{command} tells all; --no-check sends it as it is.",
        )
    if report.findings:
        screen.say(f"{count(len(report.findings), 'warning')} about the images: {command}")


def as_document(report: Report) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "images": len(report.images),
        "captions": len(report.captions),
        "faults": report.faults,
        "warnings": len(report.findings) - report.faults,
        "resolutions": report.resolutions,
        "aspect_ratios": report.aspect_ratios,
        "findings": [
            {
                "severity": one.severity,
                "code": one.code,
                "path": one.path,
                "line": one.line,
                "message": one.message,
                "remedy": one.remedy,
            }
            for one in report.findings
        ],
    }


def show(screen: Screen, report: Report) -> None:
    """The report as tables; of each kind of finding not more than a person reads."""
    rows = [
        ("images", str(len(report.images))),
        ("captions", str(len(report.captions))),
        ("resolutions", _counted(report.resolutions)),
        ("aspect ratios", _counted(report.aspect_ratios)),
        ("faults", str(report.faults)),
        ("warnings", str(len(report.findings) - report.faults)),
    ]
    screen.fields(rows)
    findings = _summed(report)
    if findings:
        screen.line("")
        screen.table(
            ("finding", Column("file", FOLDED), Column("why", FOLDED), Column("what to do", FOLDED)),
            ([one.code, _place(one), one.message, one.remedy] for one in _some(findings)),
        )
    kinds = Counter(one.code for one in findings)
    for code, number in kinds.items():
        if number > SHOWN_OF_A_KIND:
            screen.say(f"and {number - SHOWN_OF_A_KIND} more of {code}; --json has all")
    if len(findings) < len(report.findings):
        screen.say("--json names all small images")


def _summed(report: Report) -> list[Finding]:
    """The findings, the warnings of small images as one: they say the same of every file."""
    from gpu_client.datasets.folder_check import USUAL_SIDE

    small = [one for one in report.findings if (one.severity, one.code) == ("warning", "small")]
    if len(small) < 2:
        return list(report.findings)
    paths = {one.path for one in small}
    smallest = min(image.short_side for image in report.images if image.path in paths)
    summed = replace(
        small[0],
        path=f"{small[0].path} and {count(len(small) - 1, 'other')}",
        message=f"have shorter sides below {USUAL_SIDE} pixels; the smallest has {smallest}",
    )
    return [summed if one is small[0] else one for one in report.findings if one is small[0] or one not in small]


def _some(findings: Sequence[Finding]) -> list[Finding]:
    seen: Counter[str] = Counter()
    some = []
    for one in findings:
        seen[one.code] += 1
        if seen[one.code] <= SHOWN_OF_A_KIND:
            some.append(one)
    return some


def _place(finding: Finding) -> str:
    return finding.path if finding.line is None else f"{finding.path}:{finding.line}"


def _counted(counted: Mapping[str, int], shown: int = 6) -> str:
    some = [f"{name} ({number})" for name, number in list(counted.items())[:shown]]
    if len(counted) > shown:
        some.append(f"and {len(counted) - shown} others")
    return ", ".join(some) or "-"
