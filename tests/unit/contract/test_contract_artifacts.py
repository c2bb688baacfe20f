"""The step that an output's name says."""

from __future__ import annotations

import pytest

from baton.contract.base import MAX_STEP
from baton.contract.objects.artifacts import step_of


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("validation/step-000500-0.png", 500),
        ("step-0.png", 0),
        ("samples/cat_step_12.jpg", 12),
        ("step12.png", 12),
        ("a.step-7", 7),
        ("loss-step-9-final.png", 9),
        (f"step-{MAX_STEP}.png", MAX_STEP),
        (f"step-{MAX_STEP + 1}.png", None),
        ("step-5/picture.png", None),
        ("footstep-5.png", None),
        ("step-5a.png", None),
        ("step-.png", None),
        ("steps-5.png", None),
        ("00005.png", None),
        ("step-٣.png", None),
        ("", None),
    ],
)
def test_the_step_is_in_the_name_of_the_file(path: str, step: int | None) -> None:
    assert step_of(path) == step
