"""An attempt is interrupted while it makes class images; the next one, on another machine, takes them over."""

from __future__ import annotations

import io
import logging
import shutil
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dreambooth_runs import Run, outputs, power_cut, short_training, train_in
from PIL import Image

from baton import Session
from baton.contract.names import SHARED_DIR, SHARED_PARTS
from gpu_client.training.dreambooth.sampling import class_images, shared_images
from gpu_client.training.dreambooth.sampling.shared_images import PART_BYTES, PART_EVERY_S, SHARED_FILE, ImageParts
from tests.kits.clock import Clock
from tests.kits.dreambooth.photographs import save_crops

PARTS = f"{SHARED_FILE}{SHARED_PARTS}"
PRIOR = {
    "with_prior_preservation": True,
    "class_prompt": "a photo of a cat",
    "num_class_images": 5,
    "sample_batch_size": 2,
    "max_train_steps": 1,
}
AGENT = {"BATON_JOB_ID": "job-1"}
Hand = Callable[[Path, int], Path]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is shown after each batch."""
    monkeypatch.setattr(shared_images, "PART_EVERY_S", 0.0)
    monkeypatch.setattr(shared_images, "PART_SHARE", 10**9)


@pytest.fixture
def hand(data_dir: Path) -> Hand:
    """Gives what an attempt has shown to the next one, as control plane and agent do; returns where it lies."""

    def give(output: Path, epoch: int) -> Path:
        place = data_dir / SHARED_DIR / PARTS / str(epoch)
        shutil.copytree(output / PARTS, place)
        return place

    return give


def results(output: Path) -> dict[str, bytes]:
    """Read the archive that a job leaves."""
    return {name: content for name, content in outputs(output).items() if not name.startswith(PARTS)}


def names_in(place: Path) -> dict[str, list[str]]:
    found = {}
    for path in sorted(place.iterdir()):
        with zipfile.ZipFile(path) as archive:
            found[path.name] = archive.namelist()
    return found


@pytest.mark.usefixtures("at_once")
def test_each_image_is_made_once_though_two_attempts_are_cut_off(
    run: Run, made: list[int], hand: Hand, tmp_path: Path
) -> None:
    whole = results(run("whole", **PRIOR, variables=AGENT))
    made.clear()
    with power_cut(1, "class images"):
        run("first", **PRIOR, variables=AGENT)
    assert names_in(hand(tmp_path / "first", 1)) == {"00000.zip": ["00000.jpg", "00001.jpg"]}
    with power_cut(1, "class images"):
        run("second", **PRIOR, variables=AGENT)
    assert names_in(hand(tmp_path / "second", 2)) == {"00002.zip": ["00002.jpg", "00003.jpg"]}, "what is new, no more"
    third = run("third", **PRIOR, variables=AGENT)
    assert made == [2, 2, 1]
    assert results(third) == whole


@pytest.fixture(scope="module")
def cut_off(tiny_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], Path]:
    """Return the results of a training, and the parts of another one that was cut off after four images."""
    place = tmp_path_factory.mktemp("cut-off")
    save_crops(place / "data" / "instance", "cat", 5)
    parameters = {**short_training(tiny_sd), **PRIOR}
    whole = results(train_in(place / "whole", place / "data", parameters, AGENT))
    with pytest.MonkeyPatch.context() as patch, power_cut(2, "class images"):
        patch.setattr(shared_images, "PART_EVERY_S", 0.0)
        patch.setattr(shared_images, "PART_SHARE", 10**9)
        train_in(place / "first", place / "data", parameters, AGENT)
    return whole, place / "first"


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("cut off", "00000.zip cannot be read"),
        ("no archive", "00000.zip cannot be read"),
        ("another key", "00000.zip have another key"),
        ("no image", "is damaged"),
        ("a directory", "00000.zip cannot be read"),
        ("foreign", ""),
    ],
)
def test_parts_that_cannot_be_used_cost_nothing_but_themselves(
    run: Run,
    made: list[int],
    hand: Hand,
    damage: str,
    said: str,
    cut_off: tuple[dict[str, bytes], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    whole, first = cut_off
    place = hand(first, 1) / "00000.zip"
    made.clear()
    content = place.read_bytes()
    images = ["00000.jpg", "00001.jpg"]
    if damage == "cut off":
        place.write_bytes(content[: len(content) // 2])
    elif damage == "no archive":
        place.write_bytes(b"")
    elif damage in ("another key", "no image"):
        with zipfile.ZipFile(place) as archive:
            comment, files = archive.comment, [archive.read(name) for name in images]
        with zipfile.ZipFile(place, "w") as archive:
            archive.comment = comment if damage == "no image" else b"another"
            for name, encoded in zip(images, files, strict=True):
                archive.writestr(name, b"no image" if damage == "no image" else encoded)
    elif damage == "a directory":
        place.unlink()
        place.mkdir()
    else:
        place.rename(place.with_name("notes.txt"))
    second = run("second", **PRIOR, variables=AGENT)
    assert made == [2, 1], "all but those of the other part"
    assert results(second) == whole
    assert said in caplog.text


@pytest.mark.usefixtures("at_once")
def test_of_two_that_have_the_same_image_the_sound_one_is_taken(
    run: Run, made: list[int], hand: Hand, tmp_path: Path
) -> None:
    with power_cut(1, "class images"):
        run("first", **PRIOR, variables=AGENT)
    sound = hand(tmp_path / "first", 1)
    damaged = hand(tmp_path / "first", 0) / "00000.zip"
    with zipfile.ZipFile(damaged) as archive:
        comment = archive.comment
    with zipfile.ZipFile(damaged, "w") as archive:
        archive.comment = comment
        archive.writestr("00000.jpg", b"no image")
    made.clear()
    second = run("second", **PRIOR, variables=AGENT)
    assert made == [2, 1]
    with zipfile.ZipFile(sound / "00000.zip") as archive:
        assert (second / "class_images" / "00000.jpg").read_bytes() == archive.read("00000.jpg")


def test_all_that_was_made_is_shown_when_the_job_is_told_to_stop(
    run: Run, made: list[int], hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = results(run("whole", **PRIOR, variables=AGENT))
    assert not (tmp_path / "whole" / PARTS).exists(), "who needs no part shows none"
    made.clear()
    sample = class_images.sample

    def told(*arguments: Any) -> list[Image.Image]:
        if len(made) == 1:
            signal.raise_signal(signal.SIGTERM)
        images: list[Image.Image] = sample(*arguments)
        return images

    with monkeypatch.context() as patch:
        patch.setattr(class_images, "sample", told)
        first = run("first", **PRIOR, variables=AGENT)
    assert made == [2, 2] and results(first) == {}
    assert names_in(hand(first, 1)) == {"00000.zip": [f"0000{number}.jpg" for number in range(4)]}
    assert results(run("second", **PRIOR, variables=AGENT)) == whole
    assert made == [2, 2, 1]


@pytest.mark.usefixtures("at_once")
def test_without_an_agent_nothing_is_shown(run: Run) -> None:
    assert not (run(**PRIOR) / PARTS).exists()


@pytest.mark.usefixtures("at_once")
def test_a_part_that_cannot_be_written_costs_nothing_but_itself(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / PARTS).write_text("a file where a directory should be")
    output = run(**PRIOR, variables=AGENT)
    assert len(list((output / "class_images").iterdir())) == 5
    assert "cannot be published before all are generated" in caplog.text


def test_it_is_told_how_far_everything_is_that_comes_between_steps(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program reports progress in each phase between steps: a job making class images looked like a hanging one."""
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(Session, "phase", lambda _session, *phase: told.append(phase))
    cached = {"center_crop": True, "cache_latents": True, "cache_text_embeddings": True, "train_text_encoder": False}
    run(**PRIOR, **cached, validation_prompt="sks cat")
    assert told == [
        *(("class_images", done, 5) for done in (2, 4, 5)),
        *(("cached_latents", done, 10) for done in range(1, 11)),
        *(("cached_prompts", done, 3) for done in range(1, 4)),
        *(("validation_pictures", done, 2) for done in range(1, 3)),
    ]


class Shown:
    """A session that records the files which a training shows."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.job_id = "job-1"
        self.parts: dict[str, list[str]] = {}

    def artifact(self, path: Path) -> None:
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
            assert path.relative_to(self.output_dir).parent.as_posix() == PARTS
            self.parts[path.name] = archive.namelist()


def parts_of(session: Any, clock: Callable[[], float]) -> ImageParts:
    return ImageParts(session, "key", clock)


def test_a_part_is_shown_from_time_to_time(tmp_path: Path) -> None:
    session, clock = Shown(tmp_path), Clock()
    parts = parts_of(session, clock)
    parts.show_if_due()
    for number in range(7):
        parts.add(f"0000{number}.jpg", b"x")
        parts.show_if_due()
        clock.now += PART_EVERY_S / 2
    parts.show()
    parts.show()
    assert session.parts == {
        "00000.zip": ["00000.jpg", "00001.jpg", "00002.jpg"],
        "00003.zip": ["00003.jpg", "00004.jpg"],
        "00005.zip": ["00005.jpg", "00006.jpg"],
    }


def test_there_are_few_parts_however_long_it_takes(tmp_path: Path) -> None:
    session, clock = Shown(tmp_path), Clock()
    parts = parts_of(session, clock)
    for number in range(3 * 24 * 60):  # three days, an image a minute
        clock.now += 60
        parts.add(f"{number:05}.jpg", b"x")
        parts.show_if_due()
    assert 100 < len(session.parts) < 300


def test_a_part_is_never_larger_than_what_is_sent_before_the_end(tmp_path: Path) -> None:
    session, clock = Shown(tmp_path), Clock()
    parts = parts_of(session, clock)
    for number in range(3):
        parts.add(f"0000{number}.jpg", bytes(PART_BYTES // 2))
    parts.show_if_due()
    assert session.parts == {"00000.zip": ["00000.jpg", "00001.jpg"], "00002.zip": ["00002.jpg"]}
    parts.add("00003.jpg", b"x")
    parts.show_if_due()
    assert len(session.parts) == 2
