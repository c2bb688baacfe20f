"""Command `baton data validate`: check training images, masks and captions before a training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import count
from gpu_client.cli.core.output import FOLDED, CommandOutput, TableColumn
from gpu_client.cli.core.session import AsJson, session_of

if TYPE_CHECKING:
    from gpu_client.datasets.folder_check import DatasetFinding, DatasetReport

EXIT_FAULTS = 1
SHOWN_OF_A_KIND = 10


Captions = Annotated[bool, typer.Option("--captions", help="Require a caption for each image.")]
MinSide = Annotated[
    int | None,
    typer.Option(
        min=8, help="Minimum length of the shorter side in pixels. Default: no minimum, but a warning below 512."
    ),
]


def validate(
    context: typer.Context,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory with images, searched recursively.", show_default=False)
    ],
    *,
    captions: Captions = False,
    min_side: MinSide = None,
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet (PNG) to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check training images, their captions and masks.

    Finds undecodable, small and duplicate images: decodes each image and compares it with all others. Exit code 1 if
    there is a fault; warnings do not change the exit code.
    """
    session = session_of(context)
    report = check_images(directory, captions=captions, min_side=min_side, for_sheet=sheet is not None)
    if sheet is not None:
        # Imported here because Pillow takes longer to load than most commands run.
        from gpu_client.datasets.contact_sheet import draw_sheet

        try:
            shown = draw_sheet(report, sheet)
        except OSError as error:
            raise CliError(f"{sheet} cannot be written: {error.strerror or error}") from error
        session.output.note(f"contact sheet of {count(shown, 'image')}: {sheet}")
    if as_json:
        session.output.json(report_as_data(report))
    else:
        show(session.output, report)
    if report.faults:
        raise typer.Exit(EXIT_FAULTS)


def check_images(
    directory: Path,
    *,
    captions: bool = False,
    min_side: int | None = None,
    only: Collection[str] | None = None,
    for_sheet: bool = False,
) -> DatasetReport:
    """Check a folder, or the files `only` of the folder. Raises CliError if `directory` is no directory."""
    from gpu_client.datasets.contact_sheet import select_shown
    from gpu_client.datasets.folder_check import check_folder

    if not directory.is_dir():
        raise CliError(f"{directory} is not a directory")
    try:
        return check_folder(
            directory,
            captions="required" if captions else "optional",
            min_side=min_side,
            only=only,
            thumbnails=select_shown if for_sheet else lambda _: (),
        )
    except OSError as error:
        raise CliError(f"{directory} cannot be read: {error.strerror or error}") from error


def has_image_name(path: Path) -> bool:
    """Return True if the file name is an image's name."""
    from gpu_client.datasets.images import is_image

    return is_image(path)


def require_valid_images(
    output: CommandOutput, directory: Path, send: Iterable[Path], *, captions: bool = False, min_side: int | None = None
) -> None:
    """Check the files of a push; print the number of warnings. Raises CliError with the first fault."""
    only = {path.relative_to(directory).as_posix() for path in send}
    asked = (" --captions" if captions else "") + (f" --min-side {min_side}" if min_side is not None else "")
    command = f"baton data validate {directory}{asked}"
    report = check_images(directory, captions=captions, min_side=min_side, only=only)
    faults = [one for one in report.findings if one.severity == "fault"]
    if faults:
        more = f", and {count(len(faults) - 1, 'other fault')}" if faults[1:] else ""
        raise CliError(
            f"{_format_place(faults[0])} {faults[0].message}{more}: nothing was sent",
            f"List all findings with: {command}. To skip the check: --no-check",
        )
    if report.findings:
        output.note(f"{count(len(report.findings), 'warning')} about the images: {command}")


def report_as_data(report: DatasetReport) -> dict[str, Any]:
    """Return the report as JSON values."""
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


def show(output: CommandOutput, report: DatasetReport) -> None:
    """Print the report as tables, with a limited number of findings per code."""
    rows = [
        ("images", str(len(report.images))),
        ("captions", str(len(report.captions))),
        ("resolutions", _format_counts(report.resolutions)),
        ("aspect ratios", _format_counts(report.aspect_ratios)),
        ("faults", str(report.faults)),
        ("warnings", str(len(report.findings) - report.faults)),
    ]
    output.fields(rows)
    findings = _merge_small(report)
    if findings:
        output.line("")
        output.table(
            ("finding", TableColumn("file", FOLDED), TableColumn("why", FOLDED), TableColumn("what to do", FOLDED)),
            ([one.code, _format_place(one), one.message, one.remedy] for one in _limit_findings(findings)),
        )
    kinds = Counter(one.code for one in findings)
    for code, number in kinds.items():
        if number > SHOWN_OF_A_KIND:
            output.note(f"and {count(number - SHOWN_OF_A_KIND, f'more {code} finding')}; --json lists all")
    if len(findings) < len(report.findings):
        output.note("--json lists all small images")


def _merge_small(report: DatasetReport) -> list[DatasetFinding]:
    """Return the findings, with all warnings about small images merged into one."""
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


def _limit_findings(findings: Sequence[DatasetFinding]) -> list[DatasetFinding]:
    seen: Counter[str] = Counter()
    some = []
    for one in findings:
        seen[one.code] += 1
        if seen[one.code] <= SHOWN_OF_A_KIND:
            some.append(one)
    return some


def _format_place(finding: DatasetFinding) -> str:
    return finding.path if finding.line is None else f"{finding.path}:{finding.line}"


def _format_counts(counted: Mapping[str, int], shown: int = 6) -> str:
    some = [f"{name} ({number})" for name, number in list(counted.items())[:shown]]
    if len(counted) > shown:
        some.append(f"and {len(counted) - shown} others")
    return ", ".join(some) or "-"
