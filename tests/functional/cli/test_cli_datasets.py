"""`baton data validate`: findings for users and for programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.functional.cli.people import Baton
from tests.kits.clouds.emulator import unique
from tests.kits.stack.stack import Stack

pytestmark = [pytest.mark.emulator, pytest.mark.processes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "set"
    place.mkdir()
    photo = Image.fromarray(load_sample_images().images[0])
    for number in range(12):
        photo.crop((30 * number, 10 * number, 30 * number + 250, 10 * number + 250)).save(place / f"{number:02}.png")
    return place


def test_a_good_folder(baton: Baton, folder: Path, tmp_path: Path) -> None:
    said = baton("data", "validate", folder, "--min-side", 250, "--sheet", tmp_path / "sheet.png").ok()
    assert "250x250 (12)" in said.out and "1:1 (12)" in said.out
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.format == "PNG" and sheet.width > 8 * 128
    found = baton("data", "validate", folder, "--min-side", 250, "--json").ok().json
    assert found["findings"] == []
    assert (found["images"], found["resolutions"]) == (12, {"250x250": 12})


def test_small_images_are_summed_up_as_one_warning(baton: Baton, folder: Path) -> None:
    said = baton("data", "validate", folder).ok()
    small = [line for line in said.out.splitlines() if line.startswith("small")]
    assert [line.partition("  Use")[0].split("  ", 1)[1].strip() for line in small] == [
        "00.png and 11 others  have shorter sides below 512 pixels; the smallest has 250"
    ]
    assert said.out.startswith("images "), "no empty line comes first"
    assert "--json lists all small images" in said.err
    found = baton("data", "validate", folder, "--json").ok().json["findings"]
    assert [one["path"] for one in found if one["code"] == "small"] == [f"{number:02}.png" for number in range(12)]
    for number in range(1, 12):
        (folder / f"{number:02}.png").unlink()
    assert "has 250 x 250 pixels" in baton("data", "validate", folder).ok().out, "one alone is told as it is"


def test_faults_end_in_an_exit_code_and_are_told_with_a_remedy(baton: Baton, folder: Path) -> None:
    (folder / "03.png").write_bytes((folder / "03.png").read_bytes()[:2000])
    said = baton("data", "validate", folder, "--captions")
    assert said.code == 1
    assert "undecodable" in said.out and "Replace or remove it." in said.out
    assert "and 1 more no_caption finding; --json lists all" in said.err
    found = baton("data", "validate", folder, "--captions", "--json")
    assert found.code == 1
    assert found.json["faults"] == 12
    assert found.json["findings"][-1]["severity"] == "warning", "they are small: faults come first"


@pytest.mark.parametrize("what", ["missing", "a file"])
def test_what_is_no_folder(baton: Baton, tmp_path: Path, what: str) -> None:
    place = tmp_path / what
    if what == "a file":
        place.touch()
    baton("data", "validate", place).failed(2, "is not a directory")


def test_a_sheet_that_cannot_be_written(baton: Baton, folder: Path, tmp_path: Path) -> None:
    baton("data", "validate", folder, "--sheet", tmp_path / "none" / "s.png").failed(2, "cannot be written")


def test_push_looks_at_new_images_first(baton: Baton, stack: Stack, folder: Path) -> None:
    prefix = unique("set")
    whole = (folder / "03.png").read_bytes()
    (folder / "03.png").write_bytes(whole[:2000])
    refused = baton("data", "push", folder, prefix)
    refused.failed(2, "03.png does not decode", "nothing was sent", "To skip the check: --no-check")
    assert stack.keys_below(prefix + "/", "training-data") == {}
    (folder / "03.png").write_bytes(whole)
    said = baton("data", "push", folder, prefix).ok()
    assert "12 warnings about the images" in said.err, "they are small"
    assert len(stack.keys_below(prefix + "/", "training-data")) == 13
    (folder / "notes.txt").write_text("of nothing")
    said = baton("data", "push", folder, prefix).ok()
    assert "warnings" not in said.err, "no image is new"


def test_push_asks_for_what_validate_can_ask_for(baton: Baton, stack: Stack, folder: Path) -> None:
    prefix = unique("set")
    (folder / "captions.jsonl").write_text('{"file_name": "00.png", "text": "a temple"}\n')
    baton("data", "push", folder, prefix, "--captions").failed(2, "has no caption", "nothing was sent")
    baton("data", "push", folder, prefix, "--min-side", "251").failed(2, "250 x 250", "--min-side 251. To skip")
    baton("data", "push", folder, prefix, "--captions", "--no-check").failed(2, "excludes --captions")
    assert stack.keys_below(prefix + "/", "training-data") == {}
    baton("data", "push", folder, prefix, "--min-side", "250").ok()
    (folder / "13.png").write_bytes((folder / "03.png").read_bytes())
    baton("data", "push", folder, prefix, "--captions").failed(2, "13.png has no caption")
    assert len(stack.keys_below(prefix + "/", "training-data")) == 14


def test_push_looks_at_captions_and_masks_though_no_image_is_new(baton: Baton, stack: Stack, folder: Path) -> None:
    prefix = unique("set")
    captions, mask = folder / "captions.jsonl", folder / "00.mask.png"
    captions.write_text('{"file_name": "00.png", "text": "a temple"}\n')
    baton("data", "push", folder, prefix).ok()
    before = stack.keys_below(prefix + "/", "training-data")
    captions.write_text("{bad\n")
    baton("data", "push", folder, prefix).failed(2, "captions.jsonl:1 is no JSON", "nothing was sent")
    captions.write_text('{"file_name": "00.png", "text": "a roof"}\n')
    mask.write_text("no image")
    baton("data", "push", folder, prefix).failed(2, "00.mask.png is no image", "nothing was sent")
    Image.new("L", (250, 249), 255).save(mask)
    baton("data", "push", folder, prefix).failed(2, "00.mask.png has 250 x 249 pixels, its image 250 x 250")
    assert stack.keys_below(prefix + "/", "training-data") == before
    Image.new("L", (250, 250), 255).save(mask)
    sent = baton("data", "push", folder, prefix, "--json").ok().json["sent"]
    assert sent == [f"{prefix}/00.mask.png", f"{prefix}/captions.jsonl"]


def test_push_sends_what_does_not_decode_if_told_so(baton: Baton, stack: Stack, folder: Path) -> None:
    prefix = unique("set")
    (folder / "03.png").write_text("")
    baton("data", "push", folder, prefix, "--no-check").ok()
    assert f"{prefix}/03.png" in stack.keys_below(prefix + "/", "training-data")
