"""Test the check of image folders: every fault that matters is told with its file, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_sample_images

from gpu_client.datasets import folder_check as check_module
from gpu_client.datasets.contact_sheet import MAX_SHOWN, draw_sheet, select_shown
from gpu_client.datasets.folder_check import ALIKE_BITS, DatasetFinding, DatasetReport, check_folder, name_aspect_ratio
from gpu_client.datasets.images import MAX_PIXELS, BadImageError, InspectedImage, inspect_image
from tests.kits.dreambooth.photographs import ODD_EXIF

PHOTOS: list[Image.Image] = [Image.fromarray(pixels) for pixels in load_sample_images().images]


def crop(photo: int, left: int, top: int, width: int = 240, height: int = 240) -> Image.Image:
    return PHOTOS[photo].crop((left, top, left + width, top + height))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "set"
    place.mkdir()
    for number in range(3):
        crop(0, 100 * number, 30 * number).save(place / f"temple{number}.png")
    return place


def found(report: DatasetReport) -> set[tuple[str, str]]:
    return {(finding.code, finding.path) for finding in report.findings}


def test_a_good_folder_has_nothing_to_say(folder: Path) -> None:
    report = check_folder(folder, min_side=200)
    assert (len(report.images), report.faults, list(report.findings)) == (3, 0, [])
    assert report.resolutions == {"240x240": 3}
    assert report.aspect_ratios == {"1:1": 3}


def test_what_does_not_decode_is_a_fault_of_its_own_file(folder: Path) -> None:
    whole = (folder / "temple0.png").read_bytes()
    (folder / "short.png").write_bytes(whole[: len(whole) // 2])
    (folder / "text.jpg").write_text("hello")
    (folder / "empty.webp").touch()
    (folder / "notes.md").write_text("not meant to be an image")
    report = check_folder(folder, min_side=200)
    assert found(report) == {("undecodable", name) for name in ("short.png", "text.jpg", "empty.webp")}
    assert {finding.severity for finding in report.findings} == {"fault"}
    assert len(report.images) == 3


@given(data=st.binary(max_size=400), cut=st.integers(0, 400))
def test_no_bytes_whatever_are_more_than_a_finding(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int
) -> None:
    place = tmp_path_factory.mktemp("any")
    Image.new("RGB", (9, 9), "teal").save(place / "a.png")
    whole = (place / "a.png").read_bytes()
    (place / "a.png").write_bytes(whole[:cut] + data + whole[cut + len(data) :])
    try:
        inspect_image(place / "a.png", "a.png")
    except BadImageError as error:
        assert str(error)


def test_an_image_of_too_many_pixels_is_not_decoded(tmp_path: Path) -> None:
    Image.new("1", (MAX_PIXELS // 1000 + 1, 1000)).save(tmp_path / "bomb.png")
    with pytest.raises(BadImageError, match="pixels, more than 100,000,000"):
        inspect_image(tmp_path / "bomb.png", "bomb.png")


@pytest.mark.parametrize(("kind", "suffix"), [(np.uint16, "png"), (np.int32, "tif"), (np.float32, "tif")])
def test_an_image_that_would_become_white_is_a_fault(tmp_path: Path, kind: type[np.generic], suffix: str) -> None:
    levels = np.linspace(0, 65535, 64 * 64).reshape(64, 64)
    Image.fromarray(levels.astype(kind)).save(tmp_path / f"deep.{suffix}")
    with pytest.raises(BadImageError, match="more than 8 bits"):
        inspect_image(tmp_path / f"deep.{suffix}", "deep")


def test_a_folder_without_images_is_a_fault(tmp_path: Path) -> None:
    assert found(check_folder(tmp_path)) == {("no_images", ".")}


def test_small_images_are_a_warning_unless_a_size_is_asked_for(folder: Path) -> None:
    assert {finding.severity for finding in check_folder(folder).findings} == {"warning"}
    report = check_folder(folder, min_side=241)
    assert report.faults == 3
    assert found(report) == {("small", f"temple{number}.png") for number in range(3)}


def test_the_orientation_that_a_camera_notes_is_followed(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    crop(1, 0, 0, 300, 200).save(tmp_path / "turned.jpg", exif=exif)
    looked = inspect_image(tmp_path / "turned.jpg", "turned.jpg")
    assert (looked.width, looked.height) == (200, 300)


def test_notes_of_a_camera_that_cannot_be_written_anew_cost_no_photograph(tmp_path: Path) -> None:
    crop(1, 0, 0, 300, 200).save(tmp_path / "odd.jpg", exif=ODD_EXIF)
    looked = inspect_image(tmp_path / "odd.jpg", "odd.jpg")
    assert (looked.width, looked.height) == (200, 300)


def test_copies_and_what_looks_the_same(folder: Path) -> None:
    (folder / "z-copy.png").write_bytes((folder / "temple0.png").read_bytes())
    crop(0, 100, 30).resize((231, 231)).save(folder / "z-scaled.jpg", quality=60)
    Image.new("RGB", (240, 240), "red").save(folder / "plain1.png")
    Image.new("RGB", (240, 240), "blue").save(folder / "plain2.png")
    report = check_folder(folder, min_side=200)
    assert found(report) == {("duplicate", "z-copy.png"), ("near_duplicate", "z-scaled.jpg")}
    assert report.faults == 0
    by_code = {finding.code: finding.message for finding in report.findings}
    assert by_code == {
        "duplicate": "has the same bytes as temple0.png",
        "near_duplicate": "looks like temple1.png",
    }


def test_looks_are_compared_as_counting_bits_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each image is reported as like the first similar one, in whatever portions images are compared."""
    monkeypatch.setattr(check_module, "_ROWS", 7)
    chance = np.random.default_rng(3)
    for number in range(0, 60, 3):
        levels = chance.integers(0, 40, (8, 9))
        others = [levels ^ (chance.random((8, 9)) < 0.05) for _ in range(2)]
        for more, pixels in enumerate((levels, *others)):
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{number + more:02}.png")
    Image.open(tmp_path / "04.png").save(tmp_path / "same-looks.png", compress_level=1)
    report = check_folder(tmp_path, min_side=8)
    images = sorted(report.images, key=lambda image: image.path)
    expected = {}
    for number, image in enumerate(images):
        alike = [
            one
            for one in images[:number]
            if ((one.perceptual_hash or 0) ^ (image.perceptual_hash or 0)).bit_count() <= ALIKE_BITS
        ]
        if alike and image.perceptual_hash is not None:
            expected[image.path] = f"looks like {alike[0].path}"
    told = {one.path: one.message for one in report.findings if one.code == "near_duplicate"}
    assert told == expected
    assert "same-looks.png" in expected and len(expected) > 3


def test_very_many_images_are_compared(tmp_path: Path) -> None:
    """20,000 take seconds, these less: all the others differ in 32 bits or so."""
    looks = np.random.default_rng(5).integers(0, 2**64, 6_000, dtype=np.uint64).tolist()
    images = [
        InspectedImage(
            path=f"{number:04}",
            size_bytes=1,
            width=1,
            height=1,
            blake3=str(number),
            perceptual_hash=value,
            thumbnail=None,
            black=False,
        )
        for number, value in enumerate([*looks, looks[7] ^ 0b1111, looks[8] ^ 0b11111])
    ]
    (one,) = check_module._same(images)
    assert (one.path, one.message) == ("6000", "looks like 0007")


def test_captions_beside_and_in_lists(folder: Path) -> None:
    (folder / "sub").mkdir()
    crop(1, 0, 0).save(folder / "sub" / "temple0.png")
    (folder / "temple0.txt").write_text("a temple\nby a lake\n", "utf-8")
    lines = [{"file_name": "temple1.png", "text": "stairs"}, {"file_name": "temple2.png", "caption": "a roof — gold"}]
    (folder / "captions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    (folder / "sub" / "metadata.jsonl").write_text('{"file_name": "temple0.png", "text": "a flower"}\n', "utf-8")
    report = check_folder(folder, captions="required", min_side=200)
    assert report.captions == {
        "temple0.png": "a temple by a lake",
        "temple1.png": "stairs",
        "temple2.png": "a roof — gold",
        "sub/temple0.png": "a flower",
    }
    assert list(report.findings) == []


def test_captions_as_other_programs_write_them(folder: Path) -> None:
    """A mark before them, Windows' line ends, and within a text what is a line's end for Unicode and not for JSON."""
    (folder / "temple0.txt").write_bytes("\ufeffa temple\r\n".encode())
    lines = [
        '{"file_name": "temple1.png", "text": "steps\u2028and\x85stairs"}',
        '{"file_name": "temple2.png", "text": "x"}',
    ]
    (folder / "captions.jsonl").write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    report = check_folder(folder, captions="required", min_side=200)
    assert list(report.findings) == []
    assert report.captions == {"temple0.png": "a temple", "temple1.png": "steps and stairs", "temple2.png": "x"}


def test_captions_that_are_lacking(folder: Path) -> None:
    assert check_folder(folder, min_side=200).findings == []
    (folder / "temple0.txt").write_text("one")
    severities = {one.severity for one in check_folder(folder, min_side=200).findings}
    assert severities == {"warning"}, "some have one, others have not"
    report = check_folder(folder, captions="required", min_side=200)
    assert found(report) == {("no_caption", "temple1.png"), ("no_caption", "temple2.png")}
    assert report.faults == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{bad", "is no JSON"),
        ("[1]", "has no 'file_name'"),
        ('{"text": "x"}', "has no 'file_name'"),
        ('{"file_name": "temple0.png"}', "has no 'text'"),
        ('{"file_name": "temple0.png", "text": " "}', "has no 'text'"),
        ('{"file_name": "gone.png", "text": "x"}', "names 'gone.png', which is no image here"),
        ('{"file_name": "../temple0.png", "text": "x"}', "which is no image here"),
    ],
)
def test_a_bad_line_of_captions_is_told_with_its_number(folder: Path, line: str, says: str) -> None:
    (folder / "captions.jsonl").write_text('{"file_name": "temple1.png", "text": "x"}\n\n' + line + "\n")
    (finding,) = [one for one in check_folder(folder, min_side=200).findings if one.severity == "fault"]
    assert (finding.code, finding.path, finding.line) == ("bad_caption", "captions.jsonl", 3)
    assert says in finding.message and finding.remedy


def test_files_of_captions_that_cannot_be_read_or_contradict(folder: Path) -> None:
    (folder / "temple0.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "temple1.txt").write_text("  \n")
    (folder / "temple2.txt").write_text("one thing")
    (folder / "captions.jsonl").write_text('{"file_name": "temple2.png", "text": "another"}\n')
    (folder / "readme.txt").write_text("of no image: nothing is wrong with it")
    bad = {one.path: one.message for one in check_folder(folder, min_side=200).findings if one.code == "bad_caption"}
    assert bad.keys() == {"temple0.txt", "temple1.txt", "temple2.txt"}
    assert "UTF-8" in bad["temple0.txt"]
    assert bad["temple1.txt"] == "is empty"
    assert bad["temple2.txt"] == "temple2.png has another caption elsewhere: 'another'"


def test_masks_are_no_images_and_must_fit_theirs(folder: Path) -> None:
    Image.new("L", (240, 240), 255).save(folder / "temple0.mask.png")
    Image.new("L", (240, 239), 255).save(folder / "temple1.mask.png")
    (folder / "temple2.mask.png").write_text("no image")
    report = check_folder(folder, min_side=200)
    assert len(report.images) == 3
    assert found(report) == {("bad_mask", "temple1.mask.png"), ("bad_mask", "temple2.mask.png")}
    assert "has 240 x 239 pixels, its image 240 x 240" in {finding.message for finding in report.findings}


def test_a_mask_that_is_black_everywhere_is_refused_as_by_the_training(folder: Path) -> None:
    Image.new("L", (240, 240), 0).save(folder / "temple0.mask.png")
    almost = Image.new("L", (240, 240), 0)
    almost.putpixel((0, 0), 255)
    almost.save(folder / "temple1.mask.png")
    report = check_folder(folder, min_side=200)
    assert found(report) == {("bad_mask", "temple0.mask.png")}
    assert report.faults == 1
    assert [finding.message for finding in report.findings] == ["is black everywhere: nothing of its image would count"]


def test_what_is_null_in_a_list_is_as_if_it_were_absent(folder: Path) -> None:
    lines = [
        {"file_name": "temple0.png", "text": None, "caption": "a temple"},
        {"file_name": "temple1.png", "text": "stairs", "caption": None},
        {"file_name": "temple2.png", "text": None},
    ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    report = check_folder(folder, min_side=200)
    assert report.captions == {"temple0.png": "a temple", "temple1.png": "stairs"}
    bad = [(one.path, one.line) for one in report.findings if one.code == "bad_caption"]
    assert bad == [("metadata.jsonl", 3)]


def test_only_some_images_are_looked_at_with_the_masks_beside_them(folder: Path) -> None:
    for number in range(3):
        Image.new("L", (240, 239), 255).save(folder / f"temple{number}.mask.png")
    (folder / "broken.png").write_text("no image")
    (folder / "captions.jsonl").write_text('{"file_name": "temple2.png", "text": "x"}\n{bad\n')
    report = check_folder(folder, min_side=200, only={"temple0.png", "temple1.mask.png"})
    assert [image.path for image in report.images] == ["temple0.png", "temple1.png"]
    faults = {(one.code, one.path) for one in report.findings if one.severity == "fault"}
    masks = {("bad_mask", "temple0.mask.png"), ("bad_mask", "temple1.mask.png")}
    assert faults == masks | {("bad_caption", "captions.jsonl")}
    nothing = check_folder(folder, min_side=200, only={"notes.txt"})
    assert (list(nothing.images), found(nothing)) == ([], {("bad_caption", "captions.jsonl")})
    assert ("no_images", ".") in found(check_folder(tmp_folder_of(folder, "broken.png"), only={"broken.png"}))


def tmp_folder_of(folder: Path, name: str) -> Path:
    """Another folder, with one of its files."""
    place = folder.with_name("other")
    place.mkdir()
    (place / name).write_bytes((folder / name).read_bytes())
    return place


def test_hidden_files_are_left_alone(folder: Path) -> None:
    (folder / ".cache").mkdir()
    (folder / ".cache" / "captions.jsonl").write_text('{"file_name": "temple0.png", "text": "an editor\'s copy"}\n')
    (folder / ".cache" / "a.png").write_text("no image")
    (folder / "._temple0.png").write_text("what macOS leaves on foreign disks")
    assert check_folder(folder, min_side=200).faults == 0


@pytest.mark.parametrize(
    ("width", "height", "name"),
    [(512, 512, "1:1"), (1920, 1080, "16:9"), (640, 427, "3:2"), (427, 640, "2:3"), (1, 100, "1:2"), (5000, 10, "2:1")],
)
def test_aspect_ratios(width: int, height: int, name: str) -> None:
    assert name_aspect_ratio(width, height) == name


def test_faults_come_before_warnings(folder: Path) -> None:
    (folder / "zz.png").write_text("")
    severities = [finding.severity for finding in check_folder(folder).findings]
    assert severities == sorted(severities)
    assert severities[0] == "fault"


class TestSheet:
    def test_it_shows_every_image_with_its_colour(self, folder: Path, tmp_path: Path) -> None:
        (folder / "bad.png").write_text("")
        Image.new("RGB", (240, 240), "lime").save(folder / "plain.png")
        report = check_folder(folder, min_side=200, thumbnails=select_shown)
        assert draw_sheet(report, tmp_path / "sheet.png") == 5
        with Image.open(tmp_path / "sheet.png") as sheet:
            sheet.load()
            colours = {colour for _, colour in sheet.getcolors(1_000_000) or []}
        assert {(0, 255, 0), (0xD0, 0x30, 0x30)} <= colours, "the image, and the fault's frame"

    def test_of_very_many_it_shows_some_from_everywhere(self, tmp_path: Path) -> None:
        Image.new("RGB", (10, 10), "teal").save(tmp_path / "a.png")
        one = inspect_image(tmp_path / "a.png", "a.png", thumbnail=True)
        images = [one.__class__(**{**_fields(one), "path": f"{number:04}.png"}) for number in range(MAX_SHOWN + 1)]
        shown = draw_sheet(DatasetReport(images, {}), tmp_path / "sheet.png")
        assert MAX_SHOWN / 2 <= shown <= MAX_SHOWN

    def test_thumbnails_are_kept_of_those_that_it_shows(self, folder: Path) -> None:
        (folder / "bad.png").write_text("")
        assert {image.thumbnail for image in check_folder(folder, min_side=200).images} == {None}
        kept = check_folder(folder, min_side=200, thumbnails=lambda paths: paths[1:3])
        assert [image.path for image in kept.images if image.thumbnail] == ["temple0.png", "temple1.png"]

    def test_an_empty_folder_has_a_sheet_too(self, tmp_path: Path) -> None:
        fault = DatasetFinding(severity="fault", code="no_images", path=".", message="m", remedy="r")
        assert draw_sheet(DatasetReport([], {}, [fault]), tmp_path / "sheet.png") == 0
        assert (tmp_path / "sheet.png").stat().st_size > 0


def _fields(looked: object) -> dict[str, object]:
    return {name: getattr(looked, name) for name in looked.__dataclass_fields__}  # type: ignore[attr-defined]
