"""The reference page of a recipe contains everything in its document."""

from __future__ import annotations

import json

import pytest

from functions.recipes import built_in_ids, built_in_recipe
from gpu_client.cli.rules_recipes.recipes import render_reference


def test_a_list_is_submitted_as_json() -> None:
    recipe = built_in_recipe("command@1")
    assert recipe is not None
    assert render_reference(recipe).endswith("""    baton submit --recipe command@1 --set command='["...", "..."]'""")


@pytest.mark.parametrize("recipe_id", built_in_ids())
def test_every_parameter_rule_input_step_and_output_is_on_the_page(recipe_id: str) -> None:
    recipe = built_in_recipe(recipe_id)
    assert recipe is not None
    lines = render_reference(recipe).splitlines()
    assert lines[0] == f"# {recipe_id}"
    for name, spec in recipe.parameters.items():
        default = "none" if spec.default is None else f"`{json.dumps(spec.default)}`"
        cells = (f"`{name}`", "required" if spec.required else default, spec.expected(), spec.description)
        assert f"| {' | '.join(cells)} |" in lines
    for rule in recipe.rules:
        assert f"- `{rule.fields[0]}` {rule.message}. {rule.remedy}" in lines
    for given in recipe.inputs:
        assert any(line.startswith(f"| `{given.into}` |" if given.into else "| (the data") for line in lines)
    for output in recipe.outputs:
        assert any(line.startswith(f"| `{output.path}` |") for line in lines)
    for shared in recipe.shared:
        same = ", ".join(f"`{name}`" for name in shared.key)
        assert f"| `{shared.path}` | {same} | {shared.description} |" in lines
    for number, step in enumerate(recipe.steps, 1):
        assert any(line.startswith(f"{number}. **{step.name}**") for line in lines)
